"""What happened during a run, marked in a chart over time: epochs as lines, phases and findings as bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuwatch.api import Epoch, Finding, Series
from gpuwatch.tools.reports.display import SEVERITIES, STATES

MARKED_STATES = ("startup", "compile", "eval", "checkpoint", "stalled", "unknown")
"""States that a timeline marks where they take most of the time."""
MOST_EPOCH_MARKS = 60
MOST_BANDS = 200
FAINT = 0.16


@dataclass(frozen=True)
class Mark:
    """Something that happened, at a moment or over a stretch. Times are Unix seconds."""

    at_s: float
    text: str
    colour: str
    until_s: float | None = None


def epoch_marks(epochs: Sequence[Epoch]) -> list[Mark]:
    """Return a line at each epoch's begin; of very many only every second, third …"""
    every = -(-len(epochs) // MOST_EPOCH_MARKS) or 1
    return [
        Mark(epoch.time_s, f"epoch {n + 1} begins with step {epoch.step:,}", "#8C8C8C")
        for n, epoch in enumerate(epochs)
        if n % every == 0
    ]


def phase_marks(ledger: Sequence[Series]) -> list[Mark]:
    """Return a band wherever a state that is no training took most of the time; `ledger` are shares by state."""
    marks = []
    for line in ledger:
        state = line.labels.get("state", "")
        if state not in MARKED_STATES:
            continue
        begin: float | None = None
        for time_s, value in (*line.points, (line.points[-1][0] if line.points else 0.0, None)):
            most = value is not None and value > 0.5
            if most and begin is None:
                begin = time_s
            elif not most and begin is not None:
                marks.append(Mark(begin, STATES[state].name, STATES[state].colour, time_s))
                begin = None
    return marks[:MOST_BANDS]


def finding_marks(findings: Sequence[Finding]) -> list[Mark]:
    """Return a band over each finding's time."""
    return [
        Mark(f.since_s, f.title, SEVERITIES[f.severity].colour, max(f.seen_s or f.since_s, f.since_s))
        for f in findings
        if f.since_s is not None
    ][-MOST_BANDS:]


def lines_and_bands(marks: Sequence[Mark], start_s: float, end_s: float) -> dict[str, Any]:
    """Return an ECharts series' markLine and markArea for the marks within a stretch of time."""
    here = [mark for mark in marks if mark.at_s <= end_s and (mark.until_s or mark.at_s) >= start_s]
    moments = [
        {"xAxis": 1e3 * mark.at_s, "name": mark.text, "lineStyle": {"color": mark.colour}}
        for mark in here
        if mark.until_s is None
    ]
    bands = [
        [
            {
                "xAxis": 1e3 * max(mark.at_s, start_s),
                "name": mark.text,
                "itemStyle": {"color": mark.colour, "opacity": FAINT},
            },
            {"xAxis": 1e3 * min(mark.until_s, end_s)},
        ]
        for mark in here
        if mark.until_s is not None
    ]
    option: dict[str, Any] = {}
    if moments:
        option["markLine"] = {
            "symbol": "none",
            "label": {"show": False},
            "lineStyle": {"type": "dashed", "width": 1, "opacity": 0.55},
            "data": moments,
            "tooltip": {"formatter": "{b}"},
        }
    if bands:
        option["markArea"] = {"label": {"show": False}, "data": bands, "tooltip": {"formatter": "{b}"}}
    return option
