"""A panel's lines as an ECharts option (https://echarts.apache.org/en/option.html), which `st.echarts_chart` draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log10
from typing import Any

from gpuwatch.api import Epoch, Finding, Series
from gpuwatch.tools.reports.display import SEVERITIES, STATES, VERMILLION, Scale, scale_for
from gpuwatch_dashboards.panels import Panel
from gpuwatch_dashboards.query import Span
from gpuwatch_dashboards.render.charts import DrawnLine

Option = dict[str, Any]
"""Plain data, as JSON has it."""

DIGITS = 5
"""Of a chart's top: more cannot be seen."""
LEAST_TOP_RATIO = 0.1
"""An axis of a share never ends below this: a tenth of a per cent must not look like a mountain."""
GRID = {"left": 64, "right": 12, "top": 8, "bottom": 22, "outerBoundsMode": "none"}
"""The same for all, so that charts below each other have their moments below each other."""
PICKS = 60
"""A click on a chart finds the nearest of so many moments."""
_DASHES = {"solid": "solid", "dot": [2, 3], "dash": [8, 4], "dashdot": [10, 3, 2, 3], "longdash": [14, 5]}
_DECALS: dict[str, Option] = {
    "/": {"dashArrayX": [1, 0], "dashArrayY": [4, 3], "rotation": 0.785},
    ".": {"dashArrayX": [1, 0], "dashArrayY": [4, 3], "rotation": 0.785},
    "x": {"dashArrayX": [1, 0], "dashArrayY": [4, 3], "rotation": -0.785},
}
"""Hatching by a look's pattern."""

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


def line_option(
    panel: Panel, lines: Sequence[DrawnLine], span: Span, marks: Sequence[Mark] = (), pick: bool = False
) -> Option:
    """Return the chart over a stretch of time; with `pick` a click on it selects one of `PICKS` moments (see `picked`).

    Times are Unix ms, which ECharts shows in the reader's own time zone. Lines with the same times share them.
    """
    areas = [line for line in lines if line.stacked]
    others = [line for line in lines if not line.stacked]
    lines = [*areas, *others]
    times_s, values = _on_common_times(areas, True)
    more_times_s, more_values = _on_common_times(others, False)
    peak = max(_height(values), max((v for of_line in more_values for v in of_line if v is not None), default=0.0))
    times_s, values = [*times_s, *more_times_s], [*values, *more_values]
    top = _top(panel, peak) or 1.0
    scale = scale_for(panel.unit, peak)
    digits = max(0, DIGITS - ceil(log10(top * scale.factor)))
    columns: dict[str, Sequence[float | None]] = {}
    series = []
    for number, (line, times, of_line) in enumerate(zip(lines, times_s, values, strict=True)):
        clock = f"t{next(n for n in range(number + 1) if times_s[n] is times)}"
        columns.setdefault(clock, [round(1e3 * time_s) for time_s in times])
        columns[f"v{number}"] = [None if v is None else round(v * scale.factor, digits) for v in of_line]
        series.append(_series(line, number, clock, alone=len(lines) == 1))
    if series:
        series[0] |= lines_and_bands(marks, span.start_s, span.end_s)
        if panel.thresholds:
            series[-1]["markLine"] = reference(
                "yAxis", [each.value * scale.factor for each in panel.thresholds], VERMILLION
            )
    return {
        "animation": False,
        "grid": GRID,
        "tooltip": tooltip(scale),
        "xAxis": [time_axis(span), *([_pick_axis()] if pick else [])],
        "yAxis": value_axis(scale, top, whole=panel.unit == "ratio" and panel.maximum == 1.0),
        "dataset": {"source": columns},
        "series": [*series, *([_pickable(top * scale.factor)] if pick else [])],
    }


def picked(number: int, start_s: float, end_s: float) -> float:
    """Return the moment of a click's bar."""
    return start_s + (number + 0.5) / PICKS * (end_s - start_s)


def tooltip(scale: Scale) -> Option:
    """Return the text at the moment under the pointer: each line's value with its unit."""
    suffix = scale.suffix.replace("%", "%%")
    return {"trigger": "axis", "confine": True, "valueFormatter": f"%.3g{suffix}", "transitionDuration": 0}


def time_axis(span: Span) -> Option:
    return {
        "type": "time",
        "min": 1e3 * span.start_s,
        "max": 1e3 * span.end_s,
        "splitNumber": 4,
        "splitLine": {"show": False},
        "axisTick": {"show": True},
        "axisLabel": {
            "hideOverlap": True,
            "alignMinLabel": "left",
            "alignMaxLabel": "right",
            "formatter": {"day": "{MMM} {d}"},
        },
    }


def value_axis(scale: Scale, top: float, whole: bool = False) -> Option:
    """Return an axis from 0 to `top` (in the base unit); of a `whole` the ticks are quarters."""
    axis: Option = {
        "type": "value",
        "min": 0,
        "max": round(top * scale.factor, 6),
        "splitNumber": 3,
        "axisLabel": {"formatter": f"{{value}}{scale.suffix}", "showMaxLabel": whole},
    }
    return axis | ({"interval": 25} if whole else {})


def decal(pattern: str) -> Option:
    """Return the item style that hatches an area; nothing for a look without a pattern."""
    if not pattern:
        return {}
    return {"decal": {"symbol": "rect", "symbolSize": 1, "color": "rgba(255,255,255,0.45)", **_DECALS[pattern]}}


def _series(line: DrawnLine, number: int, clock: str, alone: bool) -> Option:
    one: Option = {
        "type": "line",
        "name": line.name,
        "encode": {"x": clock, "y": f"v{number}"},
        "symbol": "none",
        "color": line.colour,
        "emphasis": {"disabled": True},
        "lineStyle": {"width": 0 if line.stacked else 1.8, "type": _DASHES[line.dash]},
    }
    if line.stacked:
        return one | {"stack": "all", "areaStyle": {"opacity": 1}, "itemStyle": decal(line.pattern)}
    return one | ({"areaStyle": {"opacity": 0.12}} if alone else {})


def reference(axis: str, values: Sequence[float], colour: str) -> Option:
    """Return a series' markLine: dotted lines at these values of an axis."""
    return {
        "symbol": "none",
        "silent": True,
        "label": {"show": False},
        "lineStyle": {"type": "dotted", "width": 1.5, "color": colour},
        "data": [{axis: value} for value in values],
    }


def _pick_axis() -> Option:
    return {"type": "category", "show": False, "data": list(range(PICKS)), "axisPointer": {"show": False}}


def _pickable(top: float) -> Option:
    """Return unseen bars that fill the chart: ECharts reports which data was clicked, not which place of an axis."""
    unseen = {"itemStyle": {"color": "transparent", "borderWidth": 0}}
    return {
        "type": "bar",
        "xAxisIndex": 1,
        "barWidth": "100%",
        "data": [top] * PICKS,
        "selectedMode": "single",
        "select": unseen,
        "emphasis": {"itemStyle": {"color": "rgba(128,128,128,0.18)"}},
        "tooltip": {"show": False},
        "z": 10,
        **unseen,
    }


def _on_common_times(lines: Sequence[DrawnLine], stacked: bool) -> tuple[list[list[float]], list[list[float | None]]]:
    """Return each line's times and values. Lines of a stack get the times of all of them; equal times are one list."""
    each = [[time_s for time_s, _ in line.points] for line in lines]
    if stacked and each and any(times != each[0] for times in each[1:]):
        merged = sorted({time_s for times in each for time_s in times})
        known = [dict(line.points) for line in lines]
        return [merged] * len(lines), [[values.get(time_s) for time_s in merged] for values in known]
    shared = [next(times for times in each if times == own) for own in each]
    return shared, [[value for _, value in line.points] for line in lines]


def _height(values: Sequence[Sequence[float | None]]) -> float:
    """Return the greatest height of a stack."""
    return max((sum(value or 0.0 for value in column) for column in zip(*values, strict=True)), default=0.0)


def _top(panel: Panel, peak: float) -> float:
    if panel.maximum is not None:
        return panel.maximum
    if panel.unit == "ratio":
        return max(peak * 1.15, LEAST_TOP_RATIO)
    return peak * 1.15 or 1.0
