"""The page "Live": one run's verdict, where its time goes, and what to do about it. Redraws itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import streamlit as st

from gpuwatch_dashboards import markup
from gpuwatch_dashboards.charts import CONFIG, drawn_lines, figure, legend_values
from gpuwatch_dashboards.errors import SourceError
from gpuwatch_dashboards.model import Node, Run, Scope, Span, Trace
from gpuwatch_dashboards.panels import BY_KEY, Panel
from gpuwatch_dashboards.panels.gpu import GPU_PANELS
from gpuwatch_dashboards.selection import DEFAULT_WINDOW, WINDOWS_S, find, key_of, select, span_of
from gpuwatch_dashboards.sources import Source

REFRESH_S = 2.0
TOP_PANEL = "ledger"
ROWS = (
    ("step_time", "loader_workers", "gpu_utilization"),
    ("cpu", "pressure", "shm"),
    ("network", "disk", "gpu_power"),
)
WITHOUT_GPU = {"gpu_power": "throughput"}
"""Panels that would only say once more that there is no GPU, and what stands in their place."""
TOP_HEIGHT_PX, HEIGHT_PX = 300, 150
_WANTED, _SHOWN = "wanted_run", "shown_run"


def page(source: Source) -> None:
    """Draw the page, now and then every `REFRESH_S`."""
    st.fragment(_live, run_every=REFRESH_S)(source)


def _live(source: Source) -> None:
    try:
        runs = source.runs()
        wanted = find(runs, st.query_params.get("run"), st.query_params.get("rank"))
        run = select(runs, wanted, st.session_state.get(_SHOWN))
        node = source.node(run)
        if run is None:
            st.html(markup.BRAND)
            st.html(markup.no_runs(node) + markup.foot(source.label, node, None, _clock(time.time())))
            return
        st.session_state[_SHOWN] = key_of(run)
        window_s = _top_bar(runs, run)
        _draw(source, run, node, span_of(run, window_s, time.time()))
    except SourceError as error:
        st.html(markup.BRAND)
        st.html(markup.away(error))


def _top_bar(runs: Sequence[Run], run: Run) -> float | None:
    """Draw brand, run chooser (when there is a choice) and time range; return the chosen range in seconds."""
    with st.container(key="top", horizontal=True, horizontal_alignment="distribute"):
        st.html(markup.BRAND, width="content")
        if len(runs) > 1:
            by_key = {key_of(r): r for r in runs}
            if st.session_state.get(_WANTED) != key_of(run):
                st.session_state[_WANTED] = key_of(run)
            st.selectbox(
                "Run",
                list(by_key),
                format_func=lambda key: _choice(by_key[key]) if key in by_key else key,
                key=_WANTED,
                on_change=_remember_choice,
                label_visibility="collapsed",
                width=420,
            )
        window = st.segmented_control(
            "Time range", list(WINDOWS_S), default=DEFAULT_WINDOW, key="window", label_visibility="collapsed"
        )
    asked = st.query_params.get("run")
    if asked and asked != run.run:
        st.caption(f"The run in this link ({asked}) is not known here; this is another one.")
    return WINDOWS_S[window or DEFAULT_WINDOW]


def _choice(run: Run) -> str:
    rank = f" · rank {run.rank}" if run.world_size > 1 else ""
    return f"{run.name or run.run}{rank} · {markup.STATUS_SIGNS[run.status]} {run.status}"


def _remember_choice() -> None:
    """Put the choice into the address: a link to it, and what the next refresh goes by."""
    run, _, rank = st.session_state[_WANTED].rpartition("/")
    st.query_params["run"] = run
    st.query_params["rank"] = rank


def _draw(source: Source, run: Run, node: Node, span: Span) -> None:
    rows = ROWS if node.gpus else tuple(tuple(WITHOUT_GPU.get(key, key) for key in row) for row in ROWS)
    panels = [BY_KEY[key] for key in (TOP_PANEL, *(key for row in rows for key in row))]
    scope = Scope(run.run, str(run.rank), run.instance)
    answers = iter(source.evaluate([curve.query for panel in panels for curve in panel.curves], scope, span))
    traces = {panel.key: [next(answers) for _ in panel.curves] for panel in panels}

    with st.container(key="verdict"):
        st.html(markup.verdict(run))
    left, right = st.columns([3, 2], gap="small")
    with left:
        _panel(BY_KEY[TOP_PANEL], traces[TOP_PANEL], span, node, TOP_HEIGHT_PX)
    with right, st.container(key="panel-findings"):
        st.html(
            markup.panel_head("What to do", "What was found, what proves it, and the one change to make.")
            + markup.findings(run.findings, span.end_s, run.status == "running")
        )
    for row in rows:
        for column, key in zip(st.columns(len(row), gap="small"), row, strict=True):
            with column:
                _panel(BY_KEY[key], traces[key], span, node, HEIGHT_PX)
    st.html(markup.foot(source.label, node, run, _clock(time.time())))


def _panel(panel: Panel, traces: Sequence[Sequence[Trace]], span: Span, node: Node, height_px: int) -> None:
    lines = drawn_lines(panel, traces)
    with st.container(key=f"panel-{panel.key}"):
        st.html(markup.panel_head(panel.title, panel.question, legend_values(panel, lines)))
        if any(len(line.points) > 1 for line in lines):
            drawn = figure(panel, lines, span, height_px)
            st.plotly_chart(drawn, key=f"chart-{panel.key}", config=CONFIG)
        elif panel in GPU_PANELS and node.gpus:
            st.html(markup.nothing("This GPU does not report it."))
        else:
            st.html(markup.nothing(panel.empty))


def _utc_offset() -> timedelta:
    """Return the reader's offset from UTC (browsers say it the other way round)."""
    return timedelta(minutes=-(st.context.timezone_offset or 0))


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, timezone(_utc_offset())).strftime("%H:%M:%S")
