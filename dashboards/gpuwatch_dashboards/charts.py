"""A panel and its lines as a Plotly figure, with the legend apart (as text, so that it never overlaps or moves)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np

from gpuwatch_dashboards.model import Points, Span, Trace
from gpuwatch_dashboards.palette import LOOKS, SEQUENCE
from gpuwatch_dashboards.panels import Curve, Panel
from gpuwatch_dashboards.units import display, scale_for

DASHES = ("solid", "dash", "dashdot", "longdash")
MAX_LEGEND = 4
LEAST_SHARE = 0.0005
"""What never reaches this is not drawn: it would be a name in the legend without an area."""
_WHOLE = {"tickvals": [0, 25, 50, 75, 100], "ticktext": ["0%", "25%", "50%", "75%", "100%"], "ticksuffix": ""}
"""The ticks of an axis that ends at 100%."""
LEAST_TOP_RATIO = 0.1
"""An axis of a share never ends below this: a tenth of a per cent must not look like a mountain."""
CONFIG = {"displayModeBar": False, "scrollZoom": False, "responsive": True}
"""For st.plotly_chart. Nothing to drag: on a phone a finger on a chart scrolls the page."""


@dataclass(frozen=True)
class DrawnLine:
    """One line or area, ready to draw."""

    name: str
    points: Points
    colour: str
    dash: str = "solid"
    pattern: str = ""
    value: float | None = None
    """What the legend says: the last value, or of a share the mean over the time shown."""


def drawn_lines(panel: Panel, traces: Sequence[Sequence[Trace]]) -> list[DrawnLine]:
    """Return a panel's lines in drawing order (of a stack: bottom first); `traces` are those of each of its curves."""
    lines: list[DrawnLine] = []
    for curve, of_curve in zip(panel.curves, traces, strict=True):
        for trace in sorted(of_curve, key=lambda t: _order(curve, t)):
            if panel.stacked and max((value for _, value in trace.points if value is not None), default=0) < (
                LEAST_SHARE if panel.unit == "ratio" else 1e-9
            ):
                continue
            lines.append(_line(panel, curve, trace, len(lines)))
    return lines


def figure(panel: Panel, lines: Sequence[DrawnLine], span: Span, height_px: int) -> dict[str, Any]:
    """Return the Plotly figure as plain data. Times are Unix ms, which Plotly shows in the reader's own time.

    Points are arrays: lists of numbers cost Plotly twice the time.
    """
    peak = _peak(panel, lines)
    scale = scale_for(panel.unit, peak)

    data: list[dict[str, Any]] = []
    for line in lines:
        for number, segment in enumerate(_segments(line.points) if panel.stacked else [line.points]):
            trace: dict[str, Any] = {
                "type": "scatter",
                "mode": "lines",
                "name": line.name,
                "x": np.array([1e3 * time_s for time_s, _ in segment], dtype=float),
                "y": np.array([nan if value is None else value for _, value in segment]) * scale.factor,
                "line": {"color": line.colour, "width": 0.5 if panel.stacked else 2, "dash": line.dash},
                "hovertemplate": "%{y:.3~r}" + scale.suffix,
                "showlegend": False,
                "connectgaps": False,
            }
            if panel.stacked:
                # one stack a stretch: Plotly would draw a slope to zero across a gap
                trace |= {"stackgroup": f"stretch {number}", "fillcolor": line.colour}
                if line.pattern:
                    trace["fillpattern"] = {"shape": line.pattern, "fgcolor": "#FFFFFF", "size": 6, "solidity": 0.25}
            elif len(lines) == 1:
                trace |= {"fill": "tozeroy", "fillcolor": f"{line.colour}22"}
            data.append(trace)
    layout: dict[str, Any] = {
        "height": height_px,
        "margin": {"l": 62, "r": 10, "t": 12, "b": 24},
        "hovermode": "x unified",
        "dragmode": False,
        "uirevision": panel.key,
        "xaxis": {
            "range": [1e3 * span.start_s, 1e3 * span.end_s],
            "type": "date",
            "fixedrange": True,
            "nticks": 5,
            "showgrid": False,
            "tickformat": "%H:%M:%S" if span.end_s - span.start_s < 240 else "%H:%M",
            "hoverformat": "%H:%M:%S",
        },
        "yaxis": {
            "range": [0, _top(panel, peak) * scale.factor * 1.001],
            "ticksuffix": scale.suffix,
            "fixedrange": True,
            **(_WHOLE if panel.unit == "ratio" and panel.maximum == 1.0 else {"nticks": 5}),
        },
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": threshold.value * scale.factor,
                "y1": threshold.value * scale.factor,
                "line": {"color": SEQUENCE[5], "width": 1, "dash": "dot"},
            }
            for threshold in panel.thresholds
        ],
    }
    return {"data": data, "layout": layout}


def legend_values(panel: Panel, lines: Sequence[DrawnLine]) -> list[tuple[DrawnLine, str]]:
    """Return the legend: each line with its value for people; of a stack the top first, as the eye reads it."""
    if len(lines) > MAX_LEGEND and not panel.stacked:
        return _summary(panel, lines)
    ordered = reversed(lines) if panel.stacked else lines
    return [(line, display(line.value, panel.unit)) for line in ordered]


def _summary(panel: Panel, lines: Sequence[DrawnLine]) -> list[tuple[DrawnLine, str]]:
    """Return one entry that stands for many lines: their range and mean now."""
    values = [line.value for line in lines if line.value is not None]
    if not values:
        return []
    low, high = display(min(values), panel.unit), display(max(values), panel.unit)
    mean = display(sum(values) / len(values), panel.unit)
    return [(replace(lines[0], name=f"{lines[0].name} to {lines[-1].name}:"), f"{low} to {high}, mean {mean}")]


def _peak(panel: Panel, lines: Sequence[DrawnLine]) -> float:
    """Return the highest value drawn: of a stack, its whole height."""
    heights: dict[float, float] = {}
    for line in lines:
        for time_s, value in line.points:
            if value is not None:
                heights[time_s] = (
                    heights.get(time_s, 0.0) + value if panel.stacked else max(heights.get(time_s, 0.0), value)
                )
    return max(heights.values(), default=0.0)


def _top(panel: Panel, peak: float) -> float:
    if panel.maximum is not None:
        return panel.maximum
    if panel.unit == "ratio":
        return max(peak * 1.15, LEAST_TOP_RATIO)
    return peak * 1.15 or 1.0


def _line(panel: Panel, curve: Curve, trace: Trace, number: int) -> DrawnLine:
    value = trace.mean if panel.stacked and panel.unit == "ratio" else trace.last
    for label, looks in LOOKS.items():
        if curve.legend == f"{{{label}}}" and trace.labels.get(label) in looks:
            look = looks[trace.labels[label]]
            return DrawnLine(look.name, trace.points, look.colour, "solid", look.pattern, value)
    name = re.sub(r"\{(\w+)\}", lambda found: trace.labels.get(found[1], ""), curve.legend)
    dash = "dot" if curve.dashed else DASHES[number % len(DASHES)]
    return DrawnLine(name, trace.points, SEQUENCE[number % len(SEQUENCE)], dash, "", value)


def _order(curve: Curve, trace: Trace) -> tuple[int, tuple[str, ...]]:
    for label, looks in LOOKS.items():
        if label in trace.labels:
            names = list(looks)
            value = trace.labels[label]
            return (names.index(value) if value in names else len(names), (value,))
    return (0, tuple(trace.labels.values()))


def _segments(points: Points) -> list[Points]:
    """Return the stretches between gaps."""
    stretches: list[list[tuple[float, float | None]]] = [[]]
    for point in points:
        if point[1] is None:
            stretches.append([])
        else:
            stretches[-1].append(point)
    return [tuple(stretch) for stretch in stretches if stretch]
