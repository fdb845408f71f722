"""The page "Run": one rank's steps over its whole life or any part of it, what stands out, and how the ranks compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from gpuwatch.api import Finding, Run, Series, Steps
from gpuwatch.errors import SourceError
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.query import Scope, Span
from gpuwatch_dashboards.render import markup
from gpuwatch_dashboards.render.cards import Card, card, read_panels
from gpuwatch_dashboards.render.charts import epoch_marks, finding_marks, phase_marks
from gpuwatch_dashboards.render.markup import PAGES
from gpuwatch_dashboards.render.timeline import (
    RANK_STEPS,
    heat_card,
    merged,
    nothing_card,
    shown_one_by_one,
    step_cards,
    trace,
)
from gpuwatch_dashboards.selection import chosen, in_order, key_of, span_between, span_of
from gpuwatch_dashboards.sources import Source
from gpuwatch_dashboards.views.site import (
    Site,
    chosen_run,
    draw_card,
    foot,
    reader_clock,
    redrawn,
    remember,
    run_box,
    top_bar,
)

EVERY_S = 5.0
LEAST_S = 0.02
_HEADED = "headed_run"
FINE_BUCKETS = 6000
"""The heat map's cells; the timeline's buckets are made of them, so that the agent reads the steps once."""
RANK_BUCKETS, MOST_RANKS = 200, 16
WITHOUT_AGENT = ("step_time", "findings")
"""Panels that show from Prometheus alone what the agent's steps and findings would."""


def page(site: Site) -> None:
    """Draw the page, now and then every five seconds."""
    redrawn(_run, site, EVERY_S)


def _run(site: Site) -> None:
    selection = chosen(st.query_params)
    runs = in_order(site.source.runs(selection.node, selection.run))
    run = chosen_run(runs)
    node = site.source.node(run)
    stretch = selection.range
    if run is None:
        top_bar(site, selection)
        st.html(PAGES.no_runs(node) + foot(site, node))
        return
    top_bar(site, replace(selection, run=run.run, rank=str(run.rank)))
    now_s = time.time() // EVERY_S * EVERY_S
    span = span_between(*stretch) if stretch else span_of(run, None, now_s)
    with st.container(key="choices", horizontal=True, vertical_alignment="center"):
        run_box(runs, run)
        _zoom(run, span, stretch)
    box = st.container(key="verdict")
    head = _early_head(run, box)
    # a run that is over stays as it is
    key = ("run", key_of(run), stretch, span, run.status, len(runs))
    drawn = site.once.get(key, lambda: _content(site.source, runs, run, span, stretch), lambda _: EVERY_S)
    head.html(PAGES.run_head(run, drawn.steps, drawn.past is not None))
    _draw(drawn)
    st.html(foot(site, node, run))


def _zoom(run: Run, span: Span, stretch: tuple[float, float] | None) -> None:
    """Draw the buttons that do by key what a click on a chart does."""
    length = span.end_s - span.start_s
    middle = (span.start_s + span.end_s) / 2
    moves = {
        "Zoom in": (middle - length / 4, middle + length / 4, length > 4 * LEAST_S),
        "Zoom out": (middle - length, middle + length, stretch is not None),
        "Earlier": (span.start_s - length / 2, span.end_s - length / 2, stretch is not None),
        "Later": (span.start_s + length / 2, span.end_s + length / 2, stretch is not None),
    }
    for name, (start_s, end_s, can) in moves.items():
        st.button(name, on_click=_go, args=(max(run.started_s, start_s), end_s), disabled=not can)
    st.button("Whole run", on_click=_go, args=(None, None), disabled=stretch is None)


def _go(start_s: float | None, end_s: float | None) -> None:
    ends = (None, None) if start_s is None or end_s is None else (f"{start_s:.3f}", f"{end_s:.3f}")
    remember(**{"from": ends[0], "to": ends[1]})


def _early_head(run: Run, box: DeltaGenerator) -> DeltaGenerator:
    """Return the head's place; of a run that is new to this page it shows at once what is known without its steps."""
    if st.session_state.get(_HEADED) == key_of(run):
        return box
    st.session_state[_HEADED] = key_of(run)
    head = box.empty()
    head.html(PAGES.run_head(run, None, False))
    return head


def _draw(drawn: _Content) -> None:
    with st.container(key="stack"):
        for card in drawn.timeline:
            draw_card(card)
        draw_card(drawn.ledger)
        if drawn.heat is not None:
            draw_card(drawn.heat)
        if drawn.ranks is not None:
            draw_card(drawn.ranks)
    if drawn.table:
        with st.container(key="box-ranks"):
            st.html(
                PAGES.panel_head("Ranks", "Which rank do the others wait for? Of the last minute, or the whole run.")
            )
            st.html(drawn.table)
    if drawn.past is None:
        return
    with st.container(key="box-past"):
        st.html(PAGES.panel_head("Found in this run", "What was found, and from when to when?"))
        st.html(markup.past_findings(drawn.past, reader_clock()))


@dataclass(frozen=True)
class _Content:
    steps: Steps
    timeline: tuple[Card, ...]
    ledger: Card
    heat: Card | None
    """None where the steps are few enough to be shown one by one, or none are at hand."""
    ranks: Card | None
    """Step times of all ranks; None for a run of one."""
    table: str
    """HTML; empty for a run of one rank."""
    past: tuple[Finding, ...] | None
    """None: the agent that keeps them is away; the timeline then has a note, and what Prometheus knows."""


def _content(
    source: Source, runs: Sequence[Run], run: Run, span: Span, stretch: tuple[float, float] | None
) -> _Content:
    """Return the content; `stretch` is the time that was chosen, None for the whole run. Raises SourceError."""
    steps, past, away = _kept(source, run, stretch)
    scope = Scope(run.run, str(run.rank), run.instance)
    [(panel, ledger)] = read_panels(source, [BY_KEY["ledger"]], scope, span)
    marks = [*epoch_marks(steps.epochs), *phase_marks(ledger[0]), *finding_marks(past)]
    timeline = step_cards(steps, span, marks) if steps.step else [nothing_card(away)]
    if away is not None:
        known = read_panels(source, [BY_KEY[key] for key in WITHOUT_AGENT], scope, span)
        timeline += [card(*each, span, 200, zoom=True) for each in known]
    everyone = markup.ranks_of(runs, run)
    several = len(everyone) > 1
    return _Content(
        steps=steps,
        timeline=tuple(timeline),
        ledger=card(panel, ledger, span, 200, marks=marks, zoom=True),
        heat=None if away is not None or shown_one_by_one(steps) else heat_card(steps),
        ranks=_of_ranks(source, everyone, span, stretch) if several and away is None else None,
        table=markup.rank_table(everyone, run),
        past=tuple(past) if away is None else None,
    )


def _kept(source: Source, run: Run, stretch: tuple[float, float] | None) -> tuple[Steps, list[Finding], str | None]:
    """Return what only the agent of the run's node keeps; with Prometheus as source, why it does not answer."""
    try:
        return source.steps(run, FINE_BUCKETS, *(stretch or (None, None))), source.past_findings(run), None
    except SourceError as error:
        if run.instance is None:
            raise
        what = f"{error.what[:1].upper()}{error.what[1:]}"
        return (
            Steps(),
            [],
            f"Single steps are kept by the node's own agent. {what}: {error.remedy}. The rest is Prometheus's.",
        )


def _of_ranks(source: Source, everyone: Sequence[Run], span: Span, stretch: tuple[float, float] | None) -> Card:
    lines = []
    for rank in everyone[:MOST_RANKS]:
        try:
            steps = merged(source.steps(rank, RANK_BUCKETS, *(stretch or (None, None))), RANK_BUCKETS)
        except SourceError:  # the agent of another node is away: the ranks of the others are compared
            continue
        columns = [steps.column(name) for name in ("data_wait_s", "transfer_s", "compute_s")]
        means = zip(*(column.mean for column in columns if column is not None), strict=True)
        whole = trace(steps, [sum(value or 0.0 for value in parts) for parts in means], "rank", str(rank.rank))
        lines.append(Series({"rank": str(rank.rank)}, whole.points))
    return card(RANK_STEPS, [lines], replace(span, points=RANK_BUCKETS), 200, zoom=True)
