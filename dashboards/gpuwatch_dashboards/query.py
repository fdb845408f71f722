"""A panel's question to the numbers, said once: evaluated here over an agent's samples, in promql.py as PromQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.model import Points, Trace

GAP_FACTOR = 3.0
"""A spacing of more than so many usual spacings is a gap: nothing was sampled there, so nothing is drawn."""


@dataclass(frozen=True)
class Match:
    """A condition on a label, as PromQL has it; regular expressions match the whole value."""

    label: str
    op: Literal["=", "!=", "=~", "!~"]
    value: str

    def __call__(self, labels: Mapping[str, str]) -> bool:
        actual = labels.get(self.label, "")
        equal = re.fullmatch(self.value, actual) is not None if "~" in self.op else actual == self.value
        return equal != self.op.startswith("!")


@dataclass(frozen=True)
class Query:
    """A metric summed by labels: of a counter the rate per second, of a gauge the value; divided by another, if any."""

    metric: str
    by: tuple[str, ...] = ()
    where: tuple[Match, ...] = ()
    over: Query | None = None
    """The divisor; its `by` are among this one's. A share is a query over itself with fewer labels."""

    @property
    def is_rate(self) -> bool:
        return BY_NAME[self.metric].kind == "counter"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of all metrics that it reads."""
        return (self.metric, *(self.over.metrics if self.over else ()))


def evaluate(query: Query, raw: Mapping[str, Sequence[Trace]]) -> list[Trace]:
    """Return a query's lines over raw samples by metric name (of counters: as counted). Missing metrics give no lines.

    Where a divisor is 0 (no step ended in an interval) there is no value; the line goes on from the next one.
    """
    groups = _grouped(query, raw)
    if query.over:
        divisors = _grouped(query.over, raw)
        groups = {key: _divided(values, divisors.get(_subkey(query, key), {})) for key, values in groups.items()}
    return [
        Trace(dict(zip(query.by, key, strict=True)), with_gaps(tuple(sorted(values.items()))))
        for key, values in groups.items()
        if values
    ]


def _grouped(query: Query, raw: Mapping[str, Sequence[Trace]]) -> dict[tuple[str, ...], dict[float, float]]:
    groups: dict[tuple[str, ...], dict[float, float]] = {}
    for series in raw.get(query.metric, ()):
        if not all(match(series.labels) for match in query.where):
            continue
        group = groups.setdefault(tuple(series.labels.get(label, "") for label in query.by), {})
        for time_s, value in rates(series.points) if query.is_rate else series.points:
            if value is not None:
                group[time_s] = group.get(time_s, 0.0) + value
    return groups


def _subkey(query: Query, key: tuple[str, ...]) -> tuple[str, ...]:
    assert query.over is not None
    by_label = dict(zip(query.by, key, strict=True))
    return tuple(by_label[label] for label in query.over.by)


def _divided(values: Mapping[float, float], divisors: Mapping[float, float]) -> dict[float, float]:
    return {time_s: value / divisors[time_s] for time_s, value in values.items() if divisors.get(time_s, 0.0) > 0.0}


def rates(points: Points) -> Points:
    """Return the rate per second of a counter at the end of each interval between samples.

    A counter that went back was reset: it grew by what it now says. An interval over a gap has no rate.
    """
    longest_s = _longest_spacing_s([time_s for time_s, _ in points])
    result: list[tuple[float, float | None]] = []
    for (before_s, before), (time_s, value) in pairwise(points):
        elapsed_s = time_s - before_s
        if before is None or value is None or not 0.0 < elapsed_s <= longest_s:
            continue
        result.append((time_s, (value - before if value >= before else value) / elapsed_s))
    return tuple(result)


def with_gaps(points: Points) -> Points:
    """Return the points with a None wherever nothing was sampled for longer than usual."""
    longest_s = _longest_spacing_s([time_s for time_s, _ in points])
    result: list[tuple[float, float | None]] = []
    for time_s, value in points:
        if result and time_s - result[-1][0] > longest_s:
            result.append(((result[-1][0] + time_s) / 2, None))
        result.append((time_s, value))
    return tuple(result)


def _longest_spacing_s(times_s: Sequence[float]) -> float:
    spacings_s = [after - before for before, after in pairwise(times_s)]
    return GAP_FACTOR * median(spacings_s) if spacings_s else float("inf")
