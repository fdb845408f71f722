"""The page "Fleet": all GPUs that Prometheus knows, who loses most of their time, and the way to their nodes and runs."""

from __future__ import annotations

import time

import streamlit as st

from gpuwatch_dashboards import fleet_page, markup
from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.selection import MAX_POINTS, chosen
from gpuwatch_dashboards.sources import fleet
from gpuwatch_dashboards.sources.fleet import LEVELS, RECORDED_S
from gpuwatch_dashboards.views.site import Site, draw_card, reader_clock, redrawn, remember, top_bar

EVERY_S = 30.0
MOST_ROWS = 25
TIMES_S = {"1 h": 3600.0, "24 h": 86_400.0, "7 days": 7 * 86_400.0, "30 days": 30 * 86_400.0}
DEFAULT_TIME, DEFAULT_LEVEL = "7 days", "user"
_TIME, _LEVEL = "fleet_time", "fleet_level"


def page(site: Site) -> None:
    """Draw the page, now and then every half minute."""
    redrawn(_fleet, site, EVERY_S)


def _fleet(site: Site) -> None:
    top_bar(site, chosen(st.query_params))
    if site.prometheus is None:
        st.html(markup.FLEET_NEEDS_PROMETHEUS)
        return
    prometheus = site.prometheus
    times, level = _choices()
    words = f"last {times}"
    # what is recorded every five minutes is asked for as often
    end_s = time.time() // RECORDED_S * RECORDED_S
    span = Span(end_s - TIMES_S[times], end_s, MAX_POINTS)
    found = site.once.get(("fleet now",), lambda: fleet.now(prometheus), lambda _: EVERY_S)
    recorded = site.once.get(("fleet past", span), lambda: fleet.past(prometheus, span), lambda _: RECORDED_S)
    if not found.gpus and not recorded.hours:
        st.html(markup.NOTHING_RECORDED)
        return
    with st.container(key="verdict"):
        st.html(fleet_page.head(found, recorded, words))
    with st.container(key="stack"):
        draw_card(
            site.once.get(("fleet states", span), lambda: fleet_page.states(recorded, span), lambda _: RECORDED_S)
        )
    with st.container(key="box-holders"):
        st.html(markup.panel_head("Who loses most", f"GPU-hours that were paid for and gave nothing, {words}."))
        st.segmented_control(
            "Lost time by",
            list(LEVELS),
            key=_LEVEL,
            required=True,
            format_func=lambda name: f"By {name}",
            label_visibility="collapsed",
            on_change=lambda: remember(by=st.session_state[_LEVEL]),
        )
        table = site.once.get(
            ("fleet table", level, span),
            lambda: fleet_page.table(fleet.holders(prometheus, level, span, MOST_ROWS), level, words),
            lambda _: RECORDED_S,
        )
        st.html(markup.key_of_looks(fleet_page.KINDS.values()) + table)
    st.html(f'<p class="gw-foot">{prometheus.label} · updated {reader_clock()(time.time())}</p>')


def _choices() -> tuple[str, str]:
    """Draw the choice of time; return it and the level that was chosen."""
    asked, by = st.query_params.get("window"), st.query_params.get("by")
    if _TIME not in st.session_state:
        st.session_state[_TIME] = asked if asked in TIMES_S else DEFAULT_TIME
    if _LEVEL not in st.session_state:
        st.session_state[_LEVEL] = by if by in LEVELS else DEFAULT_LEVEL
    with st.container(key="choices", horizontal=True, vertical_alignment="center"):
        times = st.segmented_control(
            "Time range",
            list(TIMES_S),
            key=_TIME,
            required=True,
            label_visibility="collapsed",
            on_change=lambda: remember(window=st.session_state[_TIME]),
        )
    return times or DEFAULT_TIME, st.session_state[_LEVEL] or DEFAULT_LEVEL
