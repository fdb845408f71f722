"""The page "Fleet": all GPUs that Prometheus knows, who loses most of their time, and the way to their nodes and runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import urlencode

import streamlit as st
from markupsafe import Markup

from gpuwatch.tools.reports.display import KINDS, digits, display
from gpuwatch_dashboards.model import Scope, Span
from gpuwatch_dashboards.panels import GROUPS
from gpuwatch_dashboards.render.cards import card, figures
from gpuwatch_dashboards.render.markup import PAGES
from gpuwatch_dashboards.selection import MAX_POINTS, chosen
from gpuwatch_dashboards.sources.prometheus import LEVELS, LOST_KINDS, RECORDED_S, Holders
from gpuwatch_dashboards.views.site import (
    Site,
    answered,
    choice,
    draw_card,
    draw_panels,
    foot,
    redrawn,
    top_bar,
)

EVERY_S = 30.0
MOST_ROWS = 25
TIMES_S = {"1 h": 3600.0, "24 h": 86_400.0, "7 days": 7 * 86_400.0, "30 days": 30 * 86_400.0}
DEFAULT_TIME, DEFAULT_LEVEL = "7 days", "user"
MUCH = 0.1
"""From this share of lost time on, the page's head is a warning."""
HEIGHT_PX = 280
FIRST = "fleet_states"
HOLDERS = frozenset(f"by_{level}" for level in LEVELS)
"""Panels that the table of holders replaces."""
TITLES = {"user": "User", "job": "Job", "node": "Node", "run": "Run"}
NO_NAME = {"user": "no known user", "job": "no job", "node": "no name", "run": "no hook"}


def page(site: Site) -> None:
    """Draw the page, now and then every half minute."""
    redrawn(_fleet, site, EVERY_S)


def _fleet(site: Site) -> None:
    top_bar(site, chosen(st.query_params))
    if site.prometheus is None:
        st.html(PAGES.fleet_needs_prometheus())
        return
    prometheus = site.prometheus
    with st.container(key="choices", horizontal=True, vertical_alignment="center"):
        times = choice("Time range", list(TIMES_S), "window", DEFAULT_TIME, "fleet_time")
    words = f"last {times}"
    # what is recorded every five minutes is read as often
    end_s, length_s = time.time() // RECORDED_S * RECORDED_S, TIMES_S[times]
    span = Span(end_s - length_s, end_s, min(MAX_POINTS, int(length_s / RECORDED_S)))
    panels = GROUPS["fleet"]
    kinds = site.once.get(("fleet now",), prometheus.gpus_by_kind, lambda _: EVERY_S)
    stats = [panel for panel in panels if panel.kind == "stat"]
    numbers = site.once.get(
        ("fleet numbers", span), lambda: figures(answered(site, stats, Scope(), span)), lambda _: EVERY_S
    )
    if not kinds and 'gw-figure-lost"' not in numbers:
        st.html(PAGES.nothing_recorded())
        return
    with st.container(key="verdict"):
        st.html(_head(kinds, numbers))
    with st.container(key="stack"):
        first = [panel for panel in panels if panel.key == FIRST]
        for panel, values in site.once.get(
            ("fleet states", span), lambda: answered(site, first, Scope(), span), lambda _: RECORDED_S
        ):
            draw_card(card(panel, values, span, HEIGHT_PX))
    with st.container(key="box-holders"):
        st.html(PAGES.panel_head("Who loses most", f"GPU-hours that were paid for and gave nothing, {words}."))
        level = choice("Lost time by", list(LEVELS), "by", DEFAULT_LEVEL, "fleet_level", lambda name: f"By {name}")
        table = site.once.get(
            ("fleet table", level, span),
            lambda: _table(prometheus.holders(level, span, MOST_ROWS), level, words),
            lambda _: RECORDED_S,
        )
        st.html(PAGES.key(KINDS.values()) + table)
    rest = [panel for panel in panels if panel.kind != "stat" and panel.key not in (FIRST, *HOLDERS)]
    draw_panels(site, "fleet", rest, Scope(), span, EVERY_S)
    st.html(foot(site))


def _head(kinds: Mapping[str, float], numbers: Markup) -> Markup:
    """Return the site in a sentence and in figures."""
    everything = kinds.get("all", 0.0)
    lost = sum(kinds.get(kind, 0.0) for kind in LOST_KINDS)
    share = lost / everything if everything else None
    sentence = "No GPU was counted in the last minutes."
    if share is not None:
        sentence = f"{display(share, 'ratio')} of the GPUs' time is lost now: as much as {digits(lost)} of {everything:,.0f} GPUs"
    return PAGES.fleet_head(
        "unknown" if share is None else "input_wait" if share >= MUCH else "compute", sentence, numbers
    )


def _table(found: Holders, level: str, times: str) -> Markup:
    """Return who lost most, and what the others lost together; a node leads to its page, a run to its steps."""
    if not found.most:
        return PAGES.nothing("No GPU-hour was recorded in this time.")
    page = {"node": "live", "run": "run"}.get(level)
    rows = []
    for holder in found.most:
        link = f"{page}?{urlencode({level: holder.name})}" if page and holder.name else ""
        everything, shares = holder.hours.get("all", 0.0), {}
        if everything > 0.0:
            shares = {kind: holder.hours.get(kind, 0.0) / everything for kind in KINDS if kind != "rest"}
            shares["rest"] = max(0.0, 1.0 - sum(shares.values()))
        rows.append((holder, link, shares))
    priced = any(holder.cost is not None for holder in found.most)
    return PAGES.holders(TITLES[level], rows, NO_NAME[level], priced, found.others, found.others_lost_hours, times)
