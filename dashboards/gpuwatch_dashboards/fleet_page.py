"""What the page "Fleet" shows: the site in figures, its GPUs over time, and who loses most. HTML, everything escaped."""

from __future__ import annotations

from html import escape
from urllib.parse import urlencode

from gpuwatch_dashboards.cards import Card, card
from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.palette import STATES, Look
from gpuwatch_dashboards.panels.fleet_states import FLEET_STATES
from gpuwatch_dashboards.sources.fleet import LOST_KINDS, Holder, Holders, Now, Past
from gpuwatch_dashboards.units import digits, display

MUCH = 0.1
"""From this share of lost time on, the page's head is a warning."""
KINDS: dict[str, Look] = {
    "useful": STATES["compute"],
    "rest": Look("anything else", "#B5B5B5"),
    "stalled": STATES["stalled"],
    "idle": STATES["held_idle"],
    "starved": STATES["input_wait"],
}
"""What a holder's bar is made of, in its order; `rest` is what the other kinds leave."""
TITLES = {"user": "User", "job": "Job", "node": "Node", "run": "Run"}
NOBODY = {"user": "nobody known", "job": "no job", "node": "no name", "run": "no hook"}
HEIGHT_PX = 280


def head(found: Now, recorded: Past, times: str) -> str:
    """Return the site in a sentence and figures; `times` are the words for the stretch of time."""
    everything = found.gpus.get("all", 0.0)
    lost = sum(found.gpus.get(kind, 0.0) for kind in LOST_KINDS)
    share = lost / everything if everything else None
    lost_hours = sum(recorded.hours.get(kind, 0.0) for kind in LOST_KINDS)
    sentence = "No GPU was counted in the last minutes."
    if share is not None:
        sentence = f"{display(share, 'ratio')} of the GPUs' time is lost now: as if {digits(lost)} of {everything:,.0f} GPUs stood still"
    look = STATES["unknown" if share is None else "input_wait" if share >= MUCH else "compute"]
    figures = [
        ("gpus", f"{everything:,.0f}", "GPUs"),
        ("nodes", f"{found.nodes:,}", "nodes"),
        ("useful", _share(found, "useful"), "computing now"),
        ("starved", _share(found, "starved"), "waiting for data now"),
        ("idle", _share(found, "idle"), "held idle now"),
        ("lost", f"{lost_hours:,.0f}", f"GPU-hours lost, {times}"),
    ]
    if recorded.cost is not None:
        figures.append(("cost", f"{recorded.cost:,.0f}", f"lost money, {times}"))
    if found.silent_nodes:
        figures.append(("silent", f"{found.silent_nodes:,}", "nodes that do not answer"))
    numbers = "".join(
        f'<div class="gw-figure gw-figure-{kind}"><b>{escape(number)}</b><span>{escape(what)}</span></div>'
        for kind, number, what in figures
    )
    return (
        f'<section class="gw-verdict" style="--gw:{look.colour}"><h1 class="gw-sentence">{escape(sentence)}</h1>'
        f'<div class="gw-figures">{numbers}</div></section>'
    )


def _share(found: Now, kind: str) -> str:
    everything = found.gpus.get("all", 0.0)
    return display(found.gpus.get(kind, 0.0) / everything if everything else None, "ratio")


def states(recorded: Past, span: Span) -> Card:
    """Return the GPUs by state over the time."""
    return card(FLEET_STATES, [recorded.states], span, HEIGHT_PX)


def table(found: Holders, level: str, times: str) -> str:
    """Return who lost most, and what the others lost together."""
    if not found.most:
        return '<div class="gw-nothing">No GPU-hour was recorded in this time.</div>'
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
        return NOBODY[level]
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
