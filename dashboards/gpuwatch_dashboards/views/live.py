"""The page "Live": one run's verdict, where its time goes, what to do about it, and the node's GPUs. Redraws itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import streamlit as st

from gpuwatch_dashboards import markup
from gpuwatch_dashboards.model import Node, Run, Span
from gpuwatch_dashboards.selection import (
    DEFAULT_WINDOW,
    WINDOWS_S,
    Chosen,
    chosen,
    key_of,
    settled,
    span_between,
    span_of,
    span_of_node,
)
from gpuwatch_dashboards.views.live_content import Charts, Words, charts, words
from gpuwatch_dashboards.views.site import (
    Site,
    chosen_run,
    draw_card,
    foot,
    redrawn,
    remember,
    run_box,
    top_bar,
)

ALL_GPUS = "all"
LEAST_HOLD_S, MOST_HOLD_S = 1.0, 30.0
"""Charts are made anew when their stretch of time moves; those of a fixed one after half a minute at most."""
_WINDOW, _GPU = "window", "gpu_choice"


def page(site: Site) -> None:
    """Draw the page, now and then every two seconds."""
    redrawn(_live, site)


def _live(site: Site) -> None:
    selection = chosen(st.query_params)
    runs = site.source.runs(selection.node, selection.run)
    run = chosen_run(runs)
    node = site.source.node(run, selection.node)
    top_bar(site, selection if run is None else replace(selection, run=run.run, rank=str(run.rank)))
    if run is None and not node.gpus:
        st.html(markup.no_runs(node) + foot(site, node, None))
        return
    window = _choices(runs, run, selection)
    now_s = float(int(time.time()))
    span = _span(run, window, selection, now_s)
    gpu = selection.gpu if node.gpus and any(each.gpu == selection.gpu for each in node.gpus) else None
    who = (None if run is None else key_of(run), gpu, node.host, node.gpus is None)
    hold_s = max(LEAST_HOLD_S, (span.end_s - span.start_s) / span.points)
    drawn = site.once.get(
        ("charts", who, span), lambda: charts(site.source, run, node, span, gpu), lambda _: min(MOST_HOLD_S, hold_s)
    )
    said = site.once.get(("words", who, span), lambda: words(runs, run, node, drawn.gpu_shares, now_s))
    _draw(run, node, drawn, said, gpu)
    st.html(foot(site, node, run))


def _choices(runs: Sequence[Run], run: Run | None, selection: Chosen) -> str:
    """Draw the choice of run and time; return the name of the window."""
    with st.container(key="choices", horizontal=True, vertical_alignment="center"):
        if run is not None:
            run_box(runs, run)
        if _WINDOW not in st.session_state:
            st.session_state[_WINDOW] = selection.window or DEFAULT_WINDOW
        window = st.segmented_control(
            "Time range",
            list(WINDOWS_S),
            key=_WINDOW,
            required=True,
            label_visibility="collapsed",
            on_change=_remember_window,
        )
        if selection.range is not None:
            st.button("Back to now", on_click=lambda: remember(**{"from": None, "to": None}))
    return window or selection.window or DEFAULT_WINDOW


def _remember_window() -> None:
    remember(**{"window": st.session_state[_WINDOW], "from": None, "to": None})


def _span(run: Run | None, window: str, selection: Chosen, now_s: float) -> Span:
    """Return the stretch of time to draw. All who look now look at the same."""
    if selection.range is not None:
        return span_between(*selection.range)
    if run is None:
        return settled(span_of_node(WINDOWS_S[window], now_s))
    span = span_of(run, WINDOWS_S[window], now_s)
    return settled(span) if run.status == "running" else span


def _draw(run: Run | None, node: Node, drawn: Charts, said: Words, gpu: str | None) -> None:
    if run is not None:
        with st.container(key="verdict"):
            st.html(markup.verdict(run))
    else:
        st.html(markup.no_runs(node, short=True))
    if said.runs:
        with st.container(key="panel-runs"):
            st.html(markup.panel_head(f"Runs on {node.host}", "Which one is worth a look?") + said.runs)
    with st.container(key="grid-top"):
        if drawn.top is not None:
            draw_card(drawn.top)
        with st.container(key="panel-findings"):
            st.html(markup.panel_head("What to do", "What was found, what proves it, and the one change to make."))
            st.html(said.findings)
    if said.strip:
        with st.container(key="panel-gpus"):
            st.html(markup.panel_head(f"GPUs of {node.host}", "What does each do now, and where did its time go?"))
            st.html(said.strip)
        if node.gpus and len(node.gpus) > 1:
            _gpu_choice([each.gpu for each in node.gpus], gpu)
        with st.container(key="grid-gpu"):
            for card in drawn.gpu:
                draw_card(card)
    with st.container(key="grid"):
        for card in (*drawn.run, *drawn.node):
            draw_card(card)


def _gpu_choice(gpus: Sequence[str], gpu: str | None) -> None:
    if _GPU not in st.session_state:
        st.session_state[_GPU] = gpu or ALL_GPUS
    st.segmented_control(
        "GPUs in the charts below",
        [ALL_GPUS, *gpus],
        key=_GPU,
        required=True,
        format_func=lambda name: "All GPUs" if name == ALL_GPUS else f"GPU {name}",
        label_visibility="collapsed",
        on_change=lambda: remember(gpu=None if st.session_state[_GPU] in (None, ALL_GPUS) else st.session_state[_GPU]),
    )
