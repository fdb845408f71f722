"""Where the pages' numbers come from: a node's agent, or Prometheus. What each of them answers, and the shared cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gpuwatch.api import Finding, Run, Series, Steps
from gpuwatch.tools.reports.model import RunReport
from gpuwatch_dashboards.model import Growth, Node, Scope, Span
from gpuwatch_dashboards.once import Once
from gpuwatch_dashboards.query import Query

STEPS_HOLD_S, REPORT_HOLD_S, ENDED_HOLD_S = 5.0, 15.0, 300.0
HOLD_FACTOR = 10.0
"""Reading a million steps takes an agent a second or two: an answer is kept for ten times as long as it took."""


class Source(Protocol):
    """A source of numbers. Every method raises SourceError when it does not answer, or not as expected."""

    label: str
    """For people: "agent at http://127.0.0.1:9478"."""

    def runs(self, node: str | None = None, run: str | None = None) -> Sequence[Run]:
        """Return the known runs, the most recently active first. Prometheus: those of the node, `run` among them."""

    def kept_runs(self) -> Sequence[Run]:
        """Return the same, with ended runs that only the agent's history has. Prometheus: the same as `runs`."""

    def node(self, run: Run | None, node: str | None = None) -> Node:
        """Return what is known of the named node, else of the run's; an agent knows only its own."""

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        """Return the lines of each query, in the queries' order; none where nothing was measured."""

    def growth(self, query: Query, scope: Scope, span: Span) -> list[Growth]:
        """Return a counter's growth over the span, by the query's labels (`over` is ignored)."""

    def steps(self, run: Run, points: int, start_s: float | None = None, end_s: float | None = None) -> Steps:
        """Return the steps of a run's rank that began in a time range; empty where none are kept."""

    def past_findings(self, run: Run) -> list[Finding]:
        """Return every finding of a run's rank, active or past, oldest first."""

    def report(self, run: Run) -> RunReport:
        """Return the report of a run with all its ranks, from its first second until now."""


class SharedSource:
    """A Source that caches another one: all viewers share one request per second, and slow answers are kept longer."""

    def __init__(self, source: Source, once: Once | None = None) -> None:
        self._source = source
        self._once = once or Once()
        self.label = source.label

    def runs(self, node: str | None = None, run: str | None = None) -> Sequence[Run]:
        return self._once.get(("runs", node, run), lambda: self._source.runs(node, run))

    def kept_runs(self) -> Sequence[Run]:
        return self._once.get(("kept runs",), self._source.kept_runs)

    def node(self, run: Run | None, node: str | None = None) -> Node:
        key = ("node", None if run is None else _key(run), node)
        return self._once.get(key, lambda: self._source.node(run, node))

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        key = ("evaluate", tuple(queries), scope, span)
        return self._once.get(key, lambda: self._source.evaluate(queries, scope, span))

    def growth(self, query: Query, scope: Scope, span: Span) -> list[Growth]:
        return self._once.get(("growth", query, scope, span), lambda: self._source.growth(query, scope, span))

    def steps(self, run: Run, points: int, start_s: float | None = None, end_s: float | None = None) -> Steps:
        key = ("steps", _key(run), run.status, points, start_s, end_s)
        return self._once.get(key, lambda: self._source.steps(run, points, start_s, end_s), _hold(run, STEPS_HOLD_S))

    def past_findings(self, run: Run) -> list[Finding]:
        return self._once.get(("past", _key(run)), lambda: self._source.past_findings(run), lambda _: STEPS_HOLD_S)

    def report(self, run: Run) -> RunReport:
        key = ("report", _key(run), run.status)
        return self._once.get(key, lambda: self._source.report(run), _hold(run, REPORT_HOLD_S))


def _key(run: Run) -> tuple[str, int, str | None]:
    return run.run, run.rank, run.instance


def _hold(run: Run, least_s: float) -> Callable[[float], float]:
    """Return what turns the seconds that an answer took into those for which it is kept."""
    return lambda took_s: ENDED_HOLD_S if run.status != "running" else max(least_s, HOLD_FACTOR * took_s)
