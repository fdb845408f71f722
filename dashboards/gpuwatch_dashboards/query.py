"""A panel's query, over which scope and span: evaluated here over an agent's samples, or rendered as PromQL."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gpuwatch.api import Finding, Gpu, Points, Series, Status
from gpuwatch.metrics import BY_NAME

GAP_FACTOR = 3.0
"""Samples further apart than this multiple of the median interval have a gap between them, where nothing is drawn."""
INSTANCE = "instance"
"""Prometheus's label of a node's agent. Kept for metrics without a run label, so that nodes are never summed."""
Floats = NDArray[np.float64]
Answers = Sequence[Sequence[Series]]  # the lines of each of a panel's curves


class Node(Status, frozen=True):
    """The node of a run, with its agent's status. `gpus` is None where they are not known, empty without any."""

    findings: tuple[Finding, ...] = ()  # findings about GPUs that no run explains
    instance: str | None = None  # Prometheus's name of its agent; None with an agent as source


def by_number(gpu: Gpu) -> tuple[list[int], str, str]:
    """Return a sort key that puts GPU 2 before GPU 10, and MIG instances after their GPU."""
    return ([int(n) for n in gpu.gpu.split(":") if n.isdigit()] or [sys.maxsize], gpu.gpu, gpu.uuid)


@dataclass(frozen=True)
class Scope:
    """Whose numbers a query is about. Metrics of a node or a GPU ignore the run, those of a run ignore the node."""

    run: str | None = None
    rank: str | None = None
    instance: str | None = None
    gpu: str | None = None  # index of one GPU; None: all of them

    def labels_of(self, metric: str) -> dict[str, str]:
        """Return the labels of a metric that it fixes, with their values."""
        named = {"run": self.run, "rank": self.rank, INSTANCE: self.instance, "gpu": self.gpu}
        known = (*BY_NAME[metric].labels, INSTANCE)
        return {label: value for label, value in named.items() if value is not None and label in known}


@dataclass(frozen=True)
class Span:
    start_s: float
    end_s: float
    points: int = 300  # at most so many points a series


@dataclass(frozen=True)
class Match:
    """A condition on a label, as in PromQL; a regular expression matches the whole value."""

    label: str
    op: Literal["=", "!=", "=~", "!~"]
    value: str

    def __call__(self, labels: Mapping[str, str]) -> bool:
        actual = labels.get(self.label, "")
        equal = re.fullmatch(self.value, actual) is not None if "~" in self.op else actual == self.value
        return equal != self.op.startswith("!")

    def __str__(self) -> str:
        return f"{self.label}{self.op}{json.dumps(self.value, ensure_ascii=False)}"  # quoted as in PromQL


@dataclass(frozen=True)
class Query:
    """A metric summed by labels: the rate per second of a counter, the value of a gauge; optionally a quotient."""

    metric: str
    by: tuple[str, ...] = ()
    where: tuple[Match, ...] = ()
    over: Query | None = None
    """The divisor; its `by` is a subset of this one's. A share is a query over itself with fewer labels."""
    greatest: bool = False  # take the maximum of several series instead of their sum
    total: bool = False  # take a counter's value instead of its rate

    @property
    def is_rate(self) -> bool:
        return BY_NAME[self.metric].kind == "counter" and not self.total

    @property
    def of_a_run(self) -> bool:
        return "run" in BY_NAME[self.metric].labels


@dataclass(frozen=True, eq=False)
class Line:
    """Values at times, both [n], oldest first, without None. Arrays: an hour of eight GPUs is redrawn every second."""

    times_s: Floats
    values: Floats

    @staticmethod
    def of(points: Points) -> Line:
        """Return the points whose value is known."""
        table = np.array(points, dtype=np.float64).reshape(-1, 2)  # None becomes nan
        known = table[~np.isnan(table[:, 1])]
        return Line(known[:, 0], known[:, 1])

    def rates(self) -> Line:
        """Return the rate per second of a counter at the end of each interval between samples.

        A counter that decreased was reset: it grew by its new value. An interval over a gap has no rate.
        """
        elapsed_s = np.diff(self.times_s)
        grown = np.diff(self.values)
        grown = np.where(grown < 0.0, self.values[1:], grown)
        counts = (elapsed_s > 0.0) & (elapsed_s <= _longest_s(elapsed_s))
        return Line(self.times_s[1:][counts], grown[counts] / elapsed_s[counts])

    def merged(self, other: Line, both: np.ufunc) -> Line:
        """Return `both` (np.add, np.maximum) of the values; where only one is known, that one."""
        if np.array_equal(self.times_s, other.times_s):  # as a rule: in a quarter of the time
            return Line(self.times_s, both(self.values, other.values))
        times_s = np.concatenate((self.times_s, other.times_s))
        order = np.argsort(times_s, kind="stable")
        first = np.flatnonzero(np.diff(times_s[order], prepend=-np.inf))  # of each time
        return Line(times_s[order][first], both.reduceat(np.concatenate((self.values, other.values))[order], first))

    def over(self, divisor: Line) -> Line:
        """Return the quotient where both are known and the divisor is above 0."""
        times_s, own, others = np.intersect1d(self.times_s, divisor.times_s, return_indices=True)
        values, divisors = self.values[own], divisor.values[others]
        counts = divisors > 0.0
        return Line(times_s[counts], values[counts] / divisors[counts])

    def points(self, longest_s: float | None = None) -> Points:
        """Return the points, with a None in each gap: an interval over `longest_s`, by GAP_FACTOR if that is None."""
        elapsed_s = np.diff(self.times_s)
        gaps = np.nonzero(elapsed_s > (_longest_s(elapsed_s) if longest_s is None else longest_s))[0]
        known: list[tuple[float, float | None]] = list(zip(self.times_s.tolist(), self.values.tolist(), strict=True))
        for before in reversed(gaps.tolist()):
            known.insert(before + 1, ((known[before][0] + known[before + 1][0]) / 2, None))
        return tuple(known)


def _longest_s(elapsed_s: Floats) -> float:
    return GAP_FACTOR * float(np.median(elapsed_s)) if len(elapsed_s) else float("inf")


def evaluate(query: Query, raw: Mapping[str, Sequence[Series]]) -> list[Series]:
    """Return a query's lines over raw samples by metric name (counters as counted). Missing metrics give no lines.

    There is no value where the divisor is 0 (no step ended in an interval); the line continues with the next value.
    """
    groups = _grouped(query, raw)
    if query.over:
        divisors = _grouped(query.over, raw)
        kept = [query.by.index(label) for label in query.over.by]
        none = Line.of(())
        groups = {key: line.over(divisors.get(tuple(key[at] for at in kept), none)) for key, line in groups.items()}
    return [
        Series(dict(zip(query.by, key, strict=True)), line.points())
        for key, line in groups.items()
        if line.times_s.size
    ]


def _grouped(query: Query, raw: Mapping[str, Sequence[Series]]) -> dict[tuple[str, ...], Line]:
    groups: dict[tuple[str, ...], Line] = {}
    for series in raw.get(query.metric, ()):
        if all(match(series.labels) for match in query.where):
            line = Line.of(series.points)
            line = line.rates() if query.is_rate else line
            key = tuple(series.labels.get(label, "") for label in query.by)
            groups[key] = groups[key].merged(line, np.maximum if query.greatest else np.add) if key in groups else line
    return groups


def render(query: Query, scope: Scope, window: str) -> str:
    """Return the query as one PromQL expression; `window` is the range of a counter's rate, e.g. "1m"."""
    text = _aggregated(query, scope, window)
    if query.over is None:
        return text
    divisor = _aggregated(query.over, scope, window)
    return f"{text} / on ({', '.join(_by(query.over))}) group_left () ({divisor} > 0)"


def _aggregated(query: Query, scope: Scope, window: str) -> str:
    # rank, instance and GPU are regular expressions
    own = [Match(name, "=" if name == "run" else "=~", value) for name, value in scope.labels_of(query.metric).items()]
    matchers = ", ".join(map(str, (*own, *query.where)))
    values = f"{query.metric}{{{matchers}}}"
    values = f"rate({values}[{window}])" if query.is_rate else values
    by = f" by ({', '.join(_by(query))}) " if _by(query) else ""
    return f"{'max' if query.greatest else 'sum'}{by}({values})"


def _by(query: Query) -> tuple[str, ...]:
    return query.by if query.of_a_run else (INSTANCE, *query.by)


def filled(promql: str, scope: Scope, span: Span, window: str) -> str:
    """Return PromQL with Grafana's variables replaced by the scope's values, or by `.*` where the scope has none."""
    values = {name: getattr(scope, name) or ".*" for name in ("run", "rank", "instance", "gpu")}
    texts = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in values.items()}  # in quotes there
    texts |= {"__rate_interval": window, "__range": f"{max(1.0, span.end_s - span.start_s):.0f}s"}
    # pages have no selection of user and job, and do not know the name of the scrape job
    found = re.sub(r"\$(\w+)", lambda name: texts.get(name[1], ".*"), promql)
    return found.replace('job=~"gpuwatch"', 'job=~".*gpuwatch.*"')


def shares_of(lines: Sequence[Series]) -> list[float | None]:
    """Return each state's mean share over the times that any of them has: before its first sample it was 0."""
    times = len({time_s for line in lines for time_s, value in line.points if value is not None})
    known = [[value for _, value in line.points if value is not None] for line in lines]
    return [sum(values) / times if values else None for values in known]


def shares_by(label: str, lines: Sequence[Series]) -> dict[str, float]:
    """Return the states' shares by a label, without zeros."""
    named = zip((line.labels.get(label, "unknown") for line in lines), shares_of(lines), strict=True)
    return {name: share for name, share in named if share}
