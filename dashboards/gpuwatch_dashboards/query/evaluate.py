"""A panel's question to the numbers, said once: evaluated here over an agent's samples, in promql.py as PromQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from gpuwatch.api import Series
from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.model import Growth
from gpuwatch_dashboards.query.line import NOTHING, Line


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

    greatest: bool = False
    """Of several series the greatest value, where their sum would say nothing."""

    @property
    def is_rate(self) -> bool:
        return BY_NAME[self.metric].kind == "counter"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of all metrics that it reads."""
        return (self.metric, *(self.over.metrics if self.over else ()))


def evaluate(query: Query, raw: Mapping[str, Sequence[Series]]) -> list[Series]:
    """Return a query's lines over raw samples by metric name (of counters: as counted). Missing metrics give no lines.

    Where a divisor is 0 (no step ended in an interval) there is no value; the line goes on from the next one.
    """
    groups = _grouped(query, raw)
    if query.over:
        divisors = _grouped(query.over, raw)
        groups = {key: line.over(divisors.get(_subkey(query, key), NOTHING)) for key, line in groups.items()}
    return [
        Series(dict(zip(query.by, key, strict=True)), line.points())
        for key, line in groups.items()
        if len(line.times_s)
    ]


def _grouped(query: Query, raw: Mapping[str, Sequence[Series]]) -> dict[tuple[str, ...], Line]:
    groups: dict[tuple[str, ...], Line] = {}
    for series in raw.get(query.metric, ()):
        if not all(match(series.labels) for match in query.where):
            continue
        line = Line.of(series.points)
        line = line.rates() if query.is_rate else line
        key = tuple(series.labels.get(label, "") for label in query.by)
        together = Line.greatest if query.greatest else Line.plus
        groups[key] = together(groups[key], line) if key in groups else line
    return groups


def _subkey(query: Query, key: tuple[str, ...]) -> tuple[str, ...]:
    assert query.over is not None
    by_label = dict(zip(query.by, key, strict=True))
    return tuple(by_label[label] for label in query.over.by)


def grown(query: Query, samples: Sequence[Sequence[Series]]) -> list[Growth]:
    """Return by how much a counter grew, by the query's labels; `samples` are parts of the same series, one after another.

    A counter that went back was reset: it grew by what it then says. A series that begins later begins at 0.
    """
    series: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for number, part in enumerate(samples):
        for trace in part:
            if all(match(trace.labels) for match in query.where):
                known = series.setdefault(tuple(sorted(trace.labels.items())), [0.0] if number else [])
                known.extend(value for _, value in trace.points if value is not None)
    sums: dict[tuple[str, ...], float] = {}
    for labels, values in series.items():
        key = tuple(dict(labels).get(label, "") for label in query.by)
        growth = sum(after - before if after >= before else after for before, after in pairwise(values))
        sums[key] = sums.get(key, 0.0) + growth
    return [Growth(dict(zip(query.by, key, strict=True)), value) for key, value in sums.items()]
