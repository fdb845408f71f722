"""The page "Fleet": all GPUs that Prometheus knows, whose time is lost now, and the way to their nodes and runs."""

import time
from collections.abc import Sequence

import streamlit as st
from markupsafe import Markup

from gpuwatch.tools.reports.display import digits, display
from gpuwatch_dashboards.panels import BY_KEY, GROUPS, Panel
from gpuwatch_dashboards.query import Answers, Scope, Span
from gpuwatch_dashboards.render.cards import PAGES, figures
from gpuwatch_dashboards.selection import MAX_POINTS
from gpuwatch_dashboards.views.site import Site, choice, draw_panels, foot

EVERY_S = 30.0
RECORDED_S = 300.0  # GPU-hours are recorded every five minutes: they need not be read more often
TIMES_S = {"1 h": 3600.0, "24 h": 86_400.0, "7 days": 7 * 86_400.0, "30 days": 30 * 86_400.0}
DEFAULT_TIME = "24 h"
LEVELS = ("user", "job", "node", "run")
MUCH = 0.1  # from this share of lost time on, the page's head is a warning
FIRST = ("lost_now", "fleet_alerts", "silent_nodes")


def page(site: Site) -> None:
    if site.source.prometheus is None:
        st.html(PAGES.fleet_needs_prometheus())
        return
    with st.container(key="choices", horizontal=True, vertical_alignment="center"):
        times = choice("Time range", list(TIMES_S), "window", DEFAULT_TIME, "fleet_time")
    end_s, length_s = time.time() // RECORDED_S * RECORDED_S, TIMES_S[times]
    span = Span(end_s - length_s, end_s, min(MAX_POINTS, int(length_s / RECORDED_S)))
    now = Span(span.start_s, time.time() // EVERY_S * EVERY_S)
    panels = GROUPS["fleet"]
    stats = [panel for panel in panels if panel.kind == "stat"]
    numbers = site.source.once.get(("fleet", now), lambda: site.source.answers(stats, Scope(), now), EVERY_S)
    head = _head(numbers, site.source.currency())
    if head is None:
        st.html(PAGES.nothing_recorded())
        return
    st.container(key="verdict").html(head)
    by_level = [BY_KEY[f"by_{level}"] for level in LEVELS]
    draw_panels(site, "fleet-now", [BY_KEY[key] for key in FIRST], Scope(), now, EVERY_S)
    rest = [panel for panel in panels if panel not in (*stats, *by_level) and panel.key not in FIRST]
    draw_panels(site, "fleet", rest, Scope(), span, RECORDED_S)
    level = choice("Lost time by", LEVELS, "by", LEVELS[0], "fleet_level", lambda name: f"By {name}")
    draw_panels(site, "fleet-lost", [by_level[LEVELS.index(level)]], Scope(), span, RECORDED_S)
    st.html(foot(site))


def _head(numbers: Sequence[tuple[Panel, Answers]], currency: str) -> Markup | None:
    """Return the site in a sentence and in figures; None where nothing is recorded."""
    values = {panel.key: lines[0][0].last for panel, lines in numbers if lines[0]}
    shares = [values[kind] or 0.0 for kind in ("starved", "idle", "stalled") if kind in values]
    if not shares and "lost" not in values:
        return None
    state, sentence = "unknown", "No GPU was counted in the last minutes."
    if shares and (gpus := values.get("gpus")):
        lost = sum(shares)
        state, as_gpus = "input_wait" if lost >= MUCH else "compute", f"{digits(lost * gpus)} of {gpus:,.0f} GPUs"
        sentence = f"{display(lost, 'ratio')} of the GPUs' time is lost now: as much as {as_gpus}"
    return PAGES.fleet_head(state, sentence, figures(numbers, currency))
