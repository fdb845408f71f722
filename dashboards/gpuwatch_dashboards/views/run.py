"""The page "Run": one rank's steps over its whole life or any part of it, what stands out, and how the ranks compare."""

from __future__ import annotations

import time
from dataclasses import replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from gpuwatch.api import Run
from gpuwatch_dashboards import markup
from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.selection import chosen, key_of, span_between, span_of
from gpuwatch_dashboards.units import display
from gpuwatch_dashboards.views.run_content import Content, content
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


def page(site: Site) -> None:
    """Draw the page, now and then every five seconds."""
    redrawn(_run, site, EVERY_S)


def _run(site: Site) -> None:
    selection = chosen(st.query_params)
    runs = site.source.runs(selection.node, selection.run)
    run = chosen_run(runs)
    node = site.source.node(run)
    stretch = selection.range
    if run is None:
        top_bar(site, selection)
        st.html(markup.no_runs(node) + foot(site, node, None))
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
    drawn = site.once.get(key, lambda: content(site.source, runs, run, span, stretch), lambda _: EVERY_S)
    head.html(markup.run_head(run, _figures(run, drawn)))
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
    """Return the head's place; of a run that is new to this page it says already what is known without its steps."""
    if st.session_state.get(_HEADED) == key_of(run):
        return box
    st.session_state[_HEADED] = key_of(run)
    head = box.empty()
    head.html(markup.run_head(run, [("all", f"{run.steps:,}", "steps done"), ("reading", "…", "reading them")]))
    return head


def _draw(drawn: Content) -> None:
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
                markup.panel_head("Ranks", "Which rank do the others wait for? Of the last minute, or the whole run.")
            )
            st.html(drawn.table)
    if drawn.past is None:
        return
    with st.container(key="box-past"):
        st.html(markup.panel_head("Found in this run", "What was found, and from when to when?"))
        st.html(markup.past_findings(drawn.past, reader_clock()))


def _figures(run: Run, drawn: Content) -> list[tuple[str, str, str]]:
    """Return (class, number, what it is) of the steps shown."""
    steps = drawn.steps
    figures = [] if drawn.past is None else [("steps", f"{steps.steps:,}", "steps shown")]
    figures.append(("all", f"{run.steps:,}", "steps done"))
    figures += [
        (name, display(value, "s"), f"step {name}") for name, value in (steps.step_s or {}).items() if name != "p5"
    ]
    if len(steps.epochs):
        figures.append(("epochs", f"{len(steps.epochs):,}", "epochs begun"))
    return figures + markup.rate_figures(run) + markup.cost_figures(run)
