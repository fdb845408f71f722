"""A ledger in cells: shares become whole cells whose sum is the width, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from gpuwatch.api import Series
from gpuwatch.ledger import shares
from gpuwatch.units import percent
from gpuwatch_dashboards.palette import STATES
from gpuwatch_dashboards.terminal.looks import DIM, glyph, state_look, state_style, words
from gpuwatch_dashboards.terminal.sparkline import buckets

_ORDER = {state: number for number, state in enumerate(STATES)}


def in_order(states: Mapping[str, float]) -> list[str]:
    """Return the states that have time, what is useful first (the palette's order)."""
    return sorted((s for s, seconds in states.items() if seconds > 0), key=lambda s: (_ORDER.get(s, len(_ORDER)), s))


def cells(states: Mapping[str, float], width: int) -> dict[str, int]:
    """Return whole cells by state whose sum is `width`, by largest remainder; empty when no state has time.

    No state is off its exact share by a cell or more; one below half a cell may get none.
    """
    whole = sum(max(0.0, seconds) for seconds in states.values())
    if whole <= 0 or width <= 0:
        return {}
    exact = {state: width * states[state] / whole for state in in_order(states)}
    given = {state: int(share) for state, share in exact.items()}
    for state in sorted(exact, key=lambda s: given[s] - exact[s])[: width - sum(given.values())]:
        given[state] += 1
    return given


def bar(states: Mapping[str, float], width: int) -> Text:
    """Return the ledger as one bar of `width` cells; dots where nothing was booked."""
    line = Text()
    for state, count in cells(states, width).items():
        line.append(glyph(state) * count, state_style(state))
    return line if line.plain else words("·" * max(0, width), DIM)


def legend(recent: Mapping[str, float], whole: Mapping[str, float], least: float = 0.0005) -> list[Text]:
    """Return one entry a state, the largest first: its glyph, its name, its share of `recent` and (in parentheses) of `whole`.

    States below `least` in both are left out.
    """
    now, ever = shares(recent), shares(whole)
    entries = []
    for state in sorted({*now, *ever}, key=lambda s: (-now.get(s, 0.0), -ever.get(s, 0.0))):
        if max(now.get(state, 0.0), ever.get(state, 0.0)) < least:
            continue
        entry = swatch(state)
        entry.append(f" {state_look(state).name} ")
        if recent:
            entry.append(percent(now.get(state, 0.0)), "bold")
        if whole:
            entry.append(f" ({percent(ever.get(state, 0.0))})" if recent else f"({percent(ever[state])})", DIM)
        entries.append(entry)
    return entries


def swatch(state: str) -> Text:
    return words(glyph(state) * 2, state_style(state))


def area(traces: Sequence[Series], width: int, rows: int, start_s: float, end_s: float) -> list[Text]:
    """Return the ledger over time, `rows` lines, top first: each column one stretch of time, its states stacked.

    Args:
        traces: One a state, its label "state"; of a column the mean counts. A column that nothing was sampled in is blank.
    """
    columns: list[dict[str, float]] = [{} for _ in range(width)]
    for trace in traces:
        for column, value in zip(columns, buckets(trace.points, width, start_s, end_s), strict=True):
            if value is not None:
                column[trace.labels.get("state", "unknown")] = value
    stacks = [[state for state, count in cells(column, rows).items() for _ in range(count)] for column in columns]
    lines = []
    for row in reversed(range(rows)):
        line = Text()
        for stack in stacks:
            if stack:
                line.append(glyph(stack[row]), state_style(stack[row]))
            else:
                line.append(" ")
        lines.append(line)
    return lines
