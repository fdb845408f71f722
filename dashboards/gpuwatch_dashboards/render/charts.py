"""A panel's lines by name, colour and order, and its legend as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuwatch.api import Points, Series
from gpuwatch.tools.reports.display import LOOKS, SEQUENCE, Look, display
from gpuwatch_dashboards.panels import Curve, Panel

DASHES = ("solid", "dash", "dashdot", "longdash")
MAX_LEGEND = 4
LEAST_SHARE = 0.0005
"""What never reaches this is not drawn: it would be a name in the legend without an area."""


@dataclass(frozen=True)
class DrawnLine:
    """One line or area, ready to draw."""

    name: str
    points: Points
    colour: str
    dash: str = "solid"
    pattern: str = ""
    stacked: bool = False
    """A part of its panel's stack; else a line, over the stack where there is one."""
    value: float | None = None
    """In the legend: the last value, or of a share the mean over the time shown."""

    @property
    def hatch(self) -> str:
        return Look(self.name, self.colour, self.pattern).hatch


def drawn_lines(panel: Panel, traces: Sequence[Sequence[Series]]) -> list[DrawnLine]:
    """Return a panel's lines in drawing order (of a stack: bottom first); `traces` are those of each of its curves."""
    lines: list[DrawnLine] = []
    for curve, of_curve in zip(panel.curves, traces, strict=True):
        for trace in sorted(of_curve, key=lambda t: _order(curve, t)):
            stacked = panel.stacked and not curve.over_stack
            if stacked and max((value for _, value in trace.points if value is not None), default=0) < (
                LEAST_SHARE if panel.unit == "ratio" else 1e-9
            ):
                continue
            lines.append(_line(panel, curve, trace, len(lines)))
    return lines


def legend_values(panel: Panel, lines: Sequence[DrawnLine]) -> list[tuple[DrawnLine, str]]:
    """Return the legend: each line with its value for people; of a stack the top first, as the eye reads it."""
    if len(lines) > MAX_LEGEND and not panel.stacked:
        return _summary(panel, lines)
    ordered = reversed(lines) if panel.stacked else lines
    return [(line, display(line.value, panel.unit)) for line in ordered]


def spoken(panel: Panel, lines: Sequence[DrawnLine]) -> str:
    """Return the chart in words, for those who cannot see it."""
    text = ", ".join(f"{line.name} {value}" for line, value in legend_values(panel, lines))
    return f"{panel.title}: {text}" if text else panel.title


def _summary(panel: Panel, lines: Sequence[DrawnLine]) -> list[tuple[DrawnLine, str]]:
    """Return one entry that stands for many lines: their range and mean now."""
    values = [line.value for line in lines if line.value is not None]
    if not values:
        return []
    low, high = display(min(values), panel.unit), display(max(values), panel.unit)
    mean = display(sum(values) / len(values), panel.unit)
    return [(replace(lines[0], name=f"{lines[0].name} to {lines[-1].name}:"), f"{low} to {high}, mean {mean}")]


def _line(panel: Panel, curve: Curve, trace: Series, number: int) -> DrawnLine:
    stacked = panel.stacked and not curve.over_stack
    value = trace.mean if stacked and panel.unit == "ratio" else trace.last
    for label, looks in LOOKS.items():
        if curve.legend == f"{{{label}}}" and trace.labels.get(label) in looks:
            look = looks[trace.labels[label]]
            return DrawnLine(look.name, trace.points, look.colour, "solid", look.pattern, stacked, value)
    name = re.sub(r"\{(\w+)\}", lambda found: trace.labels.get(found[1], ""), curve.legend)
    dash = "dot" if curve.dashed else DASHES[number % len(DASHES)]
    return DrawnLine(name, trace.points, SEQUENCE[number % len(SEQUENCE)], dash, "", stacked, value)


def _order(curve: Curve, trace: Series) -> tuple[int, tuple[str, ...]]:
    for label, looks in LOOKS.items():
        if label in trace.labels:
            names = list(looks)
            value = trace.labels[label]
            return (names.index(value) if value in names else len(names), (value,))
    return (0, tuple(trace.labels.values()))
