"""The page "Live": one run's verdict, where its time goes, what to do about it, and the node's GPUs. Redraws itself."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import streamlit as st

from gpuwatch.api import Run
from gpuwatch_dashboards import gpu_strip, markup
from gpuwatch_dashboards.model import Node, Span
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
from gpuwatch_dashboards.views.live_content import charts, ledger, words
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


@dataclass(frozen=True)
class _Shown:
    """What the page is about, and over which stretch of time."""

    runs: Sequence[Run]
    run: Run | None
    node: Node
    gpu: str | None
    """Index of the GPU that the charts are narrowed to; None: all of them."""
    span: Span

    @property
    def key(self) -> Hashable:
        who = None if self.run is None else key_of(self.run)
        return who, self.gpu, self.node.host, self.node.gpus is None, self.span

    @property
    def hold_s(self) -> float:
        return min(MOST_HOLD_S, max(LEAST_HOLD_S, (self.span.end_s - self.span.start_s) / self.span.points))


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
    gpu = selection.gpu if node.gpus and any(each.gpu == selection.gpu for each in node.gpus) else None
    shown = _Shown(runs, run, node, gpu, _span(run, window, selection, now_s))
    # in this order: what is drawn is on its way to the reader while the next part is fetched and made
    _verdict(shown)
    _top(site, shown, now_s)
    _rest(site, shown)
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


def _verdict(shown: _Shown) -> None:
    if shown.run is not None:
        with st.container(key="verdict"):
            st.html(markup.verdict(shown.run))
    else:
        st.html(markup.no_runs(shown.node, short=True))


def _top(site: Site, shown: _Shown, now_s: float) -> None:
    run, node = shown.run, shown.node
    said = site.once.get(("words", shown.key), lambda: words(shown.runs, run, node, now_s))
    if said.runs:
        with st.container(key="panel-runs"):
            st.html(markup.panel_head(f"Runs on {node.host}", "Which one is worth a look?") + said.runs)
    with st.container(key="grid-top"):
        if run is not None:
            made = site.once.get(
                ("ledger", shown.key), lambda: ledger(site.source, run, shown.span), lambda _: shown.hold_s
            )
            draw_card(made)
        with st.container(key="panel-findings"):
            st.html(markup.panel_head("What to do", "What was found, what proves it, and the one change to make."))
            st.html(said.findings)


def _rest(site: Site, shown: _Shown) -> None:
    node = shown.node
    drawn = site.once.get(
        ("charts", shown.key),
        lambda: charts(site.source, shown.run, node, shown.span, shown.gpu),
        lambda _: shown.hold_s,
    )
    if gpus := node.gpus:
        with st.container(key="panel-gpus"):
            st.html(markup.panel_head(f"GPUs of {node.host}", "What does each do now, and where did its time go?"))
            st.html(site.once.get(("strip", shown.key), lambda: gpu_strip.strip(gpus, drawn.gpu_shares, shown.runs)))
        if len(gpus) > 1:
            _gpu_choice([each.gpu for each in gpus], shown.gpu)
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
