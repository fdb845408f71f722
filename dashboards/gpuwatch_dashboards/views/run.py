"""The page "Run": one rank's steps over its life or any part of it, what stands out, and how the ranks compare."""

import time
from collections.abc import Sequence
from dataclasses import replace

import streamlit as st

from gpuwatch.api import Finding, Run, Steps
from gpuwatch.errors import SourceError
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.query import Scope, Span
from gpuwatch_dashboards.render import timeline
from gpuwatch_dashboards.render.cards import PAGES, Card, card, findings, past_findings, rank_table, ranks_of
from gpuwatch_dashboards.render.charts import epoch_marks, finding_marks, phase_marks
from gpuwatch_dashboards.selection import Stretch, concluded, in_order, run_panels, span_between, span_of, stretch_of
from gpuwatch_dashboards.sources import SharedSource
from gpuwatch_dashboards.views import site as parts
from gpuwatch_dashboards.views.site import Site

EVERY_S = 5.0
LEAST_S = 0.02
FINE_BUCKETS = 6000
"""The heat map's cells; the timeline's buckets are made of them, so that the agent reads the steps once."""
RANK_BUCKETS, MOST_RANKS = 200, 16
MOVES = {"Zoom in": (0.25, 0.75), "Zoom out": (-0.5, 1.5), "Earlier": (-0.5, 0.5), "Later": (0.5, 1.5)}
"""By button: from where to where it goes, in lengths of the stretch that is shown."""
WITHOUT_AGENT = ("step_time", "findings")
"""Panels that show from Prometheus alone what the agent's steps and findings would."""


def page(site: Site) -> None:
    runs = in_order(site.source.runs(st.query_params.get("node"), st.query_params.get("run")))
    run, stretch = parts.chosen_run(runs), stretch_of(st.query_params)
    node = site.source.node(run)
    if run is None:
        st.html(PAGES.no_runs(node) + parts.foot(site, node))
        return
    span = span_between(*stretch) if stretch else span_of(run, None, time.time() // EVERY_S * EVERY_S)
    with st.container(key="choices", horizontal=True, vertical_alignment="center"):
        parts.run_box(runs, run)
        _zoom(run, span, stretch)
    steps, past, away = _kept(site.source, run, stretch)
    st.container(key="verdict").html(PAGES.run_head(run, steps, away is None))
    scope = Scope(run.run, str(run.rank), run.instance)
    asked = run_panels(run, [BY_KEY["ledger"]])
    held = site.source.once.get(("states", scope, span), lambda: site.source.answers(asked, scope, span), EVERY_S)
    [(panel, ledger)] = held
    marks = [*epoch_marks(steps.epochs), *phase_marks(ledger[0]), *finding_marks(past)]
    cards = timeline.step_cards(steps, span, marks)
    if away is not None:
        cards = [card(replace(timeline.HOST_STEPS, empty=away), [[]], span)]
        known = site.source.answers([BY_KEY[key] for key in WITHOUT_AGENT], scope, span)
        cards += [card(*each, span, timeline.HEIGHT_PX, zoom=True) for each in known]
    cards.append(card(panel, ledger, span, timeline.HEIGHT_PX, marks=marks, zoom=True))
    if away is None and not timeline.shown_one_by_one(steps):
        cards.append(timeline.heat_card(steps))
    everyone = ranks_of(runs, run)
    if away is None and len(everyone) > 1:
        cards.append(_of_ranks(site.source, everyone, span, stretch))
    parts.draw_cards("stack", cards)
    if table := rank_table(everyone, run):
        about = "Which rank do the others wait for? In the last minute, or in the whole run."
        parts.box("ranks", PAGES.panel_head("Ranks", about) + table)
    if found := concluded(run):
        parts.box("findings", PAGES.findings_head(True) + findings(found, time.time(), False))
    if away is None and (past or not found):
        title = PAGES.panel_head("Found in this run", "What was found, and from when to when?")
        parts.box("past", title + past_findings(past, parts.clock))
    st.html(parts.foot(site, node, run))


def _zoom(run: Run, span: Span, stretch: Stretch) -> None:
    """Draw the buttons that do by key what a click on a chart does."""
    length_s = span.end_s - span.start_s
    for name, (begin, end) in MOVES.items():
        times_s = max(run.started_s, span.start_s + begin * length_s), span.start_s + end * length_s
        can = length_s > 4 * LEAST_S if name == "Zoom in" else stretch is not None
        st.button(name, on_click=parts.go_to, args=times_s, disabled=not can)
    st.button("Whole run", on_click=parts.go_to, disabled=stretch is None)


def _kept(source: SharedSource, run: Run, stretch: Stretch) -> tuple[Steps, list[Finding], str | None]:
    """Return what only the agent of the run's node keeps; with Prometheus as source, why it does not answer."""
    try:
        return source.steps(run, FINE_BUCKETS, *(stretch or (None, None))), source.past_findings(run), None
    except SourceError as error:
        if run.instance is None:
            raise
        why = f"{error.what[:1].upper()}{error.what[1:]}: {error.remedy}"
        note = f"Single steps are kept by the node's own agent. {why}. The other charts come from Prometheus."
        return Steps(), [], note


def _of_ranks(source: SharedSource, everyone: Sequence[Run], span: Span, stretch: Stretch) -> Card:
    lines = []
    for rank in everyone[:MOST_RANKS]:
        try:
            steps = source.steps(rank, RANK_BUCKETS, *(stretch or (None, None)))
        except SourceError:  # the agent of another node is away: the ranks of the others are compared
            continue
        columns = [steps.columns.get(name) for name in timeline.HOST]
        means = zip(*(column.mean for column in columns if column is not None), strict=True)
        wholes = [sum(value or 0.0 for value in parts) for parts in means]
        lines.append(timeline.trace(steps, wholes, "rank", str(rank.rank)))
    return card(timeline.RANK_STEPS, [lines], span, timeline.HEIGHT_PX, zoom=True)
