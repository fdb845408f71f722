"""A panel's lines by name, colour and order, its legend as text, and its chart as an ECharts option.

`st.echarts_chart` draws the options (https://echarts.apache.org/en/option.html).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import ceil, log10
from typing import Any

from gpuwatch.api import Epoch, Finding, Points, Series
from gpuwatch.tables import table
from gpuwatch.tools.reports import display as shown
from gpuwatch.tools.reports.display import Look, Scale, display
from gpuwatch_dashboards.panels import Curve, Panel
from gpuwatch_dashboards.query import Span, shares_of

Option = dict[str, Any]
MAX_LEGEND = 4
LEAST_SHARE = 0.0005  # what never reaches this is not drawn: it would be a name in the legend without an area
DIGITS = 5  # of a chart's top: more cannot be seen
LEAST_TOP_RATIO = 0.1  # an axis of a share never ends below this: a tenth of a per cent must not look like a mountain
_FIXED = table("gpuwatch_dashboards.render", "options.yml")
GRID: Option = _FIXED["grid"]  # the same for all, so that charts below each other have their moments below each other
PICKS = 60  # a click on a chart finds the nearest of so many moments
MARKED_STATES = ("startup", "compile", "eval", "checkpoint", "stalled", "unknown")
MOST_EPOCH_MARKS, MOST_BANDS = 60, 200
_DASHES: dict[str, Any] = {"solid": "solid", "dash": [8, 4], "dashdot": [10, 3, 2, 3], "longdash": [14, 5]}


@dataclass(frozen=True)
class DrawnLine(Look):
    points: Points = ()
    dash: str = "solid"
    stacked: bool = False  # a part of its panel's stack; else a line, over the stack where there is one
    value: float | None = None  # in the legend: the last value, or of a share the mean over the time shown


def drawn_lines(panel: Panel, traces: Sequence[Sequence[Series]]) -> list[DrawnLine]:
    """Return a panel's lines in drawing order (of a stack: bottom first); `traces` are those of each of its curves."""
    least = LEAST_SHARE if panel.unit == "ratio" else 1e-9
    lines: list[DrawnLine] = []
    for curve, of_curve in zip(panel.curves, traces, strict=True):
        ordered = sorted(of_curve, key=_order)
        for trace, share in zip(ordered, shares_of(ordered), strict=True):
            line = _line(panel, curve, trace, len(lines), share)
            if not line.stacked or max((v for _, v in line.points if v is not None), default=0.0) >= least:
                lines.append(line)
    return lines


def _line(panel: Panel, curve: Curve, trace: Series, number: int, share: float | None) -> DrawnLine:
    stacked = panel.kind == "stack" and not curve.over_stack
    value = share if stacked and panel.unit == "ratio" else trace.last
    label = curve.legend.strip("{}")
    if look := shown.LOOKS.get(label, {}).get(trace.labels.get(label, "")):
        return DrawnLine(look.name, look.colour, look.pattern, trace.points, "solid", stacked, value)
    name = re.sub(r"\{(\w+)\}", lambda found: trace.labels.get(found[1], ""), curve.legend)
    dash = "dot" if curve.dashed else list(_DASHES)[number % len(_DASHES)]
    return DrawnLine(name, shown.SEQUENCE[number % len(shown.SEQUENCE)], "", trace.points, dash, stacked, value)


def _order(trace: Series) -> tuple[int, list[list[str | int]]]:
    for label, looks in shown.LOOKS.items():
        if value := trace.labels.get(label):
            return [*looks, value].index(value), [[value]]
    parts = (re.split(r"(\d+)", value) for value in trace.labels.values())  # each second one is a number
    return 0, [[int(part) if number % 2 else part for number, part in enumerate(each)] for each in parts]


def legend_values(panel: Panel, lines: Sequence[DrawnLine]) -> list[tuple[DrawnLine, str]]:
    """Return the legend: each line with its value for people; of a stack the top first; of many lines their range."""
    values = [line.value for line in lines if line.value is not None]
    if len(lines) > MAX_LEGEND and panel.kind != "stack" and values:
        low, high, mean = (display(each, panel.unit) for each in (min(values), max(values), sum(values) / len(values)))
        return [(replace(lines[0], name=f"{lines[0].name} to {lines[-1].name}:"), f"{low} to {high}, mean {mean}")]
    return [(line, display(line.value, panel.unit)) for line in (reversed(lines) if panel.kind == "stack" else lines)]


def spoken(panel: Panel, lines: Sequence[DrawnLine]) -> str:
    """Return the chart in words, for those who cannot see it."""
    text = ", ".join(f"{line.name} {value}" for line, value in legend_values(panel, lines))
    return f"{panel.title}: {text}" if text else panel.title


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
    numbered = [*enumerate(epochs, 1)][::every]
    is_whole = bool(epochs) and epochs[0].step == 0  # else it is not known how many there were before
    named = [(f"epoch {number}" if is_whole else "an epoch", epoch) for number, epoch in numbered]
    return [Mark(epoch.time_s, f"{name} begins with step {epoch.step:,}", shown.GREY) for name, epoch in named]


def phase_marks(ledger: Sequence[Series]) -> list[Mark]:
    """Return a band wherever a state that is no training took most of the time; `ledger` are shares by state."""
    marks = []
    for line in ledger:
        if (state := line.labels.get("state", "")) in MARKED_STATES:
            # a point is the share of the interval before it
            for most, found in groupby(pairwise(line.points), key=lambda ends: (ends[1][1] or 0.0) > 0.5):
                intervals = list(found)
                if most:
                    look = shown.STATES[state]
                    marks.append(Mark(intervals[0][0][0], look.name, look.colour, intervals[-1][1][0]))
    return marks[:MOST_BANDS]


def finding_marks(findings: Sequence[Finding]) -> list[Mark]:
    return [
        Mark(f.since_s, f.title, shown.SEVERITIES[f.severity].colour, max(f.seen_s or f.since_s, f.since_s))
        for f in findings
        if f.since_s is not None
    ][-MOST_BANDS:]


def _lines_and_bands(marks: Sequence[Mark], span: Span) -> Option:
    """Return a series' markLine and markArea for the marks within a stretch of time."""
    moments: list[Option] = []
    bands: list[list[Option]] = []
    for mark in marks:
        if mark.until_s is None and span.start_s <= mark.at_s <= span.end_s:
            moments.append({"xAxis": 1e3 * mark.at_s, "name": mark.text, "lineStyle": {"color": mark.colour}})
        elif mark.until_s is not None and mark.at_s <= span.end_s and mark.until_s >= span.start_s:
            style = {"color": mark.colour, "opacity": 0.16}
            begin = {"xAxis": 1e3 * max(mark.at_s, span.start_s), "name": mark.text, "itemStyle": style}
            bands.append([begin, {"xAxis": 1e3 * min(mark.until_s, span.end_s)}])
    quiet: Option = {"label": {"show": False}, "tooltip": {"formatter": "{b}"}}
    line = {"type": "dashed", "width": 1, "opacity": 0.55}
    option = {"markLine": {**quiet, "symbol": "none", "lineStyle": line, "data": moments}} if moments else {}
    return option | ({"markArea": {**quiet, "data": bands}} if bands else {})


def line_option(
    panel: Panel, lines: Sequence[DrawnLine], span: Span, marks: Sequence[Mark] = (), pick: bool = False
) -> Option:
    """Return the chart over a stretch of time; with `pick` a click on it selects one of `PICKS` moments (see `picked`).

    Times are Unix ms, which ECharts shows in the reader's own time zone. Lines of a stack get the times of all of them,
    and lines with the same times share them.
    """
    known = [dict(line.points) for line in lines]
    of_stack = [points for line, points in zip(lines, known, strict=True) if line.stacked]
    stack_s = sorted({time_s for points in of_stack for time_s in points})
    heights = [sum(points.get(time_s) or 0.0 for points in of_stack) for time_s in stack_s]
    others = (v for line in lines if not line.stacked for _, v in line.points if v is not None)
    peak = max([*heights, *others], default=0.0)
    top = panel.maximum or max(1.15 * peak, LEAST_TOP_RATIO if panel.unit == "ratio" else 0.0) or 1.0
    scale = shown.scale_for(panel.unit, peak)
    digits = max(0, DIGITS - ceil(log10(top * scale.factor)))
    columns: dict[str, list[float | None]] = {}
    series = []
    for number, (line, points) in enumerate(zip(lines, known, strict=True)):
        values = [points.get(time_s) for time_s in (stack_s if line.stacked else points)]
        times = [round(1e3 * time_s) for time_s in (stack_s if line.stacked else points)]
        clock = next((name for name, column in columns.items() if name[0] == "t" and column == times), f"t{number}")
        columns[clock] = [*times]
        columns[f"v{number}"] = [None if v is None else round(v * scale.factor, digits) for v in values]
        series.append(_series(line, number, clock, alone=len(lines) == 1))
    rows = max(map(len, columns.values()), default=0)  # ECharts reads as many of each column as the first one has
    if series:
        series[0] |= _lines_and_bands(marks, span)
        if limits := [value * scale.factor for value, _ in panel.thresholds()]:
            series[-1]["markLine"] = reference("yAxis", limits, shown.VERMILLION)
    axes = [time_axis(span)]
    if pick:
        axes.append({**_FIXED["pick_axis"], "data": list(range(PICKS))})
        series.append({**_FIXED["pick_bars"], "data": [top * scale.factor] * PICKS})
    return {
        "grid": GRID,
        "tooltip": tooltip(scale),
        "xAxis": axes,
        "yAxis": value_axis(scale, top, whole=panel.unit == "ratio" and panel.maximum == 1.0),
        "dataset": {"source": {name: column + [None] * (rows - len(column)) for name, column in columns.items()}},
        "series": series,
    }


def picked(number: int, start_s: float, end_s: float) -> float:
    """Return the moment of a click's bar."""
    return start_s + (number + 0.5) / PICKS * (end_s - start_s)


def tooltip(scale: Scale) -> Option:
    """Return the text at the moment under the pointer: each line's value with its unit."""
    suffix = scale.suffix.replace("%", "%%")
    return {"trigger": "axis", "confine": True, "valueFormatter": f"%.3g{suffix}", "transitionDuration": 0}


def time_axis(span: Span) -> Option:
    return {**_FIXED["time_axis"], "min": 1e3 * span.start_s, "max": 1e3 * span.end_s}


def value_axis(scale: Scale, top: float, whole: bool = False) -> Option:
    """Return an axis from 0 to `top` (in the base unit); of a `whole` the ticks are quarters."""
    label = {"formatter": f"{{value}}{scale.suffix}", "showMaxLabel": whole}
    end = round(top * scale.factor, 6)
    axis: Option = {"type": "value", "min": 0, "max": end, "splitNumber": 3, "axisLabel": label}
    return axis | ({"interval": 25} if whole else {})


def decal(pattern: str) -> Option:
    """Return the item style that hatches an area; nothing for a look without a pattern."""
    if not pattern:
        return {}
    strokes = {"dashArrayX": [1, 0], "dashArrayY": [4, 3], "rotation": -0.785 if pattern == "x" else 0.785}
    return {"decal": {"symbol": "rect", "symbolSize": 1, "color": "rgba(255,255,255,0.45)", **strokes}}


def reference(axis: str, values: Sequence[float], colour: str) -> Option:
    """Return a series' markLine: dotted lines at these values of an axis."""
    style = {"type": "dotted", "width": 1.5, "color": colour}
    return {**_FIXED["reference"], "lineStyle": style, "data": [{axis: value} for value in values]}


def line_series(name: str, colour: str, **more: Any) -> Option:
    return {"type": "line", "name": name, "symbol": "none", "color": colour, "emphasis": {"disabled": True}, **more}


def _series(line: DrawnLine, number: int, clock: str, alone: bool) -> Option:
    style = {"width": 0 if line.stacked else 1.8, "type": _DASHES.get(line.dash, [2, 3])}
    one = line_series(line.name, line.colour, encode={"x": clock, "y": f"v{number}"}, lineStyle=style)
    if line.stacked:
        return one | {"stack": "all", "areaStyle": {"opacity": 1}, "itemStyle": decal(line.pattern)}
    return one | ({"areaStyle": {"opacity": 0.12}} if alone else {})
