"""The page "Fleet": all GPUs that Prometheus knows, who loses most of their time, and the way to their nodes and runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from urllib.parse import urlencode

import streamlit as st

from gpuwatch_dashboards.model import Scope, Span
from gpuwatch_dashboards.panels import GROUPS
from gpuwatch_dashboards.render import markup
from gpuwatch_dashboards.render.cards import card, figures
from gpuwatch_dashboards.render.palette import KINDS, STATES
from gpuwatch_dashboards.render.units import digits, display
from gpuwatch_dashboards.selection import MAX_POINTS, chosen
from gpuwatch_dashboards.sources.prometheus import LEVELS, LOST_KINDS, RECORDED_S, Holder, Holders
from gpuwatch_dashboards.views.site import (
    Site,
    answered,
    draw_card,
    draw_panels,
    reader_clock,
    redrawn,
    remember,
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
"""Panels that the table of holders stands for."""
TITLES = {"user": "User", "job": "Job", "node": "Node", "run": "Run"}
NO_NAME = {"user": "no known user", "job": "no job", "node": "no name", "run": "no hook"}
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
        st.html(markup.NOTHING_RECORDED)
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
            lambda: _table(prometheus.holders(level, span, MOST_ROWS), level, words),
            lambda _: RECORDED_S,
        )
        st.html(markup.key_of_looks(KINDS.values()) + table)
    rest = [panel for panel in panels if panel.kind != "stat" and panel.key not in (FIRST, *HOLDERS)]
    draw_panels(site, "fleet", rest, Scope(), span, EVERY_S)
    st.html(f'<p class="gw-foot">{prometheus.label} · updated {reader_clock()(time.time())}</p>')


def _head(kinds: Mapping[str, float], numbers: str) -> str:
    """Return the site in a sentence and in figures (HTML)."""
    everything = kinds.get("all", 0.0)
    lost = sum(kinds.get(kind, 0.0) for kind in LOST_KINDS)
    share = lost / everything if everything else None
    sentence = "No GPU was counted in the last minutes."
    if share is not None:
        sentence = f"{display(share, 'ratio')} of the GPUs' time is lost now: as if {digits(lost)} of {everything:,.0f} GPUs stood still"
    look = STATES["unknown" if share is None else "input_wait" if share >= MUCH else "compute"]
    return (
        f'<section class="gw-verdict" style="--gw:{look.colour}"><h1 class="gw-sentence">{escape(sentence)}</h1>'
        f"{numbers}</section>"
    )


def _choices() -> tuple[str, str]:
    """Draw the choice of time; return it and the level that was chosen."""
    wanted, by = st.query_params.get("window"), st.query_params.get("by")
    if _TIME not in st.session_state:
        st.session_state[_TIME] = wanted if wanted in TIMES_S else DEFAULT_TIME
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


def _table(found: Holders, level: str, times: str) -> str:
    """Return who lost most, and what the others lost together."""
    if not found.most:
        return markup.nothing("No GPU-hour was recorded in this time.")
    priced = any(holder.cost is not None for holder in found.most)
    columns = [
        TITLES[level],
        "Now",
        "Its GPU-hours",
        "Starved",
        "Held idle",
        "Stalled",
        "Lost",
        *(["Money"] if priced else []),
    ]
    head = "".join(f'<th scope="col">{text}</th>' for text in columns)
    rows = "".join(_row(holder, level, priced) for holder in found.most)
    text = ""
    if found.others:
        lost = _hours(found.others_lost_hours)
        text = f'<p class="gw-foot">and {found.others:,} more, who lost {lost} together, {escape(times)}</p>'
    return f'<table class="gw-gpus gw-fleet"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{text}'


def _row(holder: Holder, level: str, priced: bool) -> str:
    hours = [_hours(holder.hours.get(kind, 0.0)) for kind in LOST_KINDS]
    now = "–" if holder.gpus is None else f"{digits(holder.gpus)} GPUs"
    cells = [
        ("Now", now),
        ("Its GPU-hours", _bar(holder)),
        *zip(("Starved", "Held idle", "Stalled"), hours, strict=True),
        ("Lost", f"<b>{_hours(holder.lost_hours)}</b>"),
    ]
    if priced:
        cells.append(("Money", "–" if holder.cost is None else f"{holder.cost:,.0f}"))
    return (
        f'<tr data-holder="{escape(holder.name)}"><th scope="row">{_link(holder.name, level)}</th>'
        f"{''.join(f'<td data-label={chr(34)}{label}{chr(34)}>{cell}</td>' for label, cell in cells)}</tr>"
    )


def _hours(hours: float) -> str:
    return f"{digits(hours) if hours else 0} h"


def _link(name: str, level: str) -> str:
    """Return a holder's name; a node leads to its page, a run to its steps."""
    if not name:
        return NO_NAME[level]
    query = {"node": ("live", {"node": name}), "run": ("run", {"run": name})}.get(level)
    if query is None:
        return escape(name)
    return f'<a href="{query[0]}?{escape(urlencode(query[1]))}" target="_self">{escape(name)}</a>'


def _bar(holder: Holder) -> str:
    everything = holder.hours.get("all", 0.0)
    if everything <= 0.0:
        return "–"
    shares = {kind: holder.hours.get(kind, 0.0) / everything for kind in KINDS if kind != "rest"}
    shares["rest"] = max(0.0, 1.0 - sum(shares.values()))
    words = ", ".join(f"{look.name} {display(shares[kind], 'ratio')}" for kind, look in KINDS.items())
    parts = "".join(
        f'<i class="{look.hatch}" style="--gw:{look.colour};width:{100 * shares[kind]:.2f}%"></i>'
        for kind, look in KINDS.items()
        if shares[kind] > 0.0
    )
    return (
        f'<span class="gw-hours">{everything:,.0f} h</span>'
        f'<span class="gw-bar" role="img" aria-label="{escape(words)}" title="{escape(words)}">{parts}</span>'
    )
