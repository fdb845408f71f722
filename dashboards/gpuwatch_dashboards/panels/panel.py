"""What a panel is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.query import Query

PanelUnit = Literal["s", "ratio", "bytes", "bytes/s", "1/s", "watts", "1"]


@dataclass(frozen=True)
class Curve:
    """One query of a panel; it gives a line for each value of its labels."""

    query: Query
    legend: str
    """With labels in braces: "read {device}". A label of `palette.LOOKS` is shown by its look's name."""
    dashed: bool = False
    """For a limit that other lines are read against."""
    over_stack: bool = False
    """A line over the panel's stack, not a part of it."""


@dataclass(frozen=True)
class Threshold:
    value: float
    severity: Literal["warning", "critical"]


@dataclass(frozen=True)
class Panel:
    """One chart: everything that Streamlit and Grafana need to draw it."""

    key: str
    title: str
    question: str
    """What it answers, for somebody who has never seen it."""
    unit: PanelUnit
    curves: tuple[Curve, ...]
    stacked: bool = False
    maximum: float | None = None
    """Upper end of the axis; None: by the data. The lower end is always 0."""
    thresholds: tuple[Threshold, ...] = ()
    empty: str = "No samples in this time range."
    """Said in the panel's place when there is nothing to draw: why, or what to do."""


def unit_of(query: Query) -> PanelUnit:
    """Return the unit of a query's values by the catalogue. Raises KeyError for one that no panel can have."""
    unit: str = BY_NAME[query.metric].unit
    if query.over is not None:
        divisor = BY_NAME[query.over.metric].unit
        of_same_kind = query.is_rate == query.over.is_rate
        if unit == divisor and of_same_kind:
            return "ratio"
        if divisor == "count" and of_same_kind:
            return {"seconds": "s", "bytes": "bytes", "count": "1"}[unit]  # type: ignore[return-value]
        return {("seconds", "count"): "ratio"}[(unit, divisor)]  # type: ignore[return-value]
    if query.is_rate:
        return {"seconds": "ratio", "bytes": "bytes/s", "count": "1/s", "joules": "watts"}[unit]  # type: ignore[return-value]
    return {"seconds": "s", "bytes": "bytes", "ratio": "ratio", "watts": "watts", "count": "1"}[unit]  # type: ignore[return-value]
