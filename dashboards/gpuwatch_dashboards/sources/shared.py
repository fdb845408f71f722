"""A source whose answers are shared by all who ask the same within a second."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.api import Finding, Run, Series, Steps
from gpuwatch.tools.reports import RunReport
from gpuwatch_dashboards.model import Growth, Node, Scope, Span
from gpuwatch_dashboards.once import Once
from gpuwatch_dashboards.query.evaluate import Query
from gpuwatch_dashboards.sources.source import Source

STEPS_HOLD_S, STEPS_HOLD_FACTOR, REPORT_HOLD_S, OVER_HOLD_S = 5.0, 10.0, 15.0, 300.0
"""A million steps take an agent a second or two: they are asked for again after ten times as long, of a run that is over
after five minutes."""


class SharedSource:
    """A Source: another one, asked once a second."""

    def __init__(self, source: Source, once: Once | None = None) -> None:
        self._source = source
        self._once = once or Once()
        self.label = source.label

    def runs(self, node: str | None = None, run: str | None = None) -> Sequence[Run]:
        return self._once.get(("runs", node, run), lambda: self._source.runs(node, run))

    def kept_runs(self) -> Sequence[Run]:
        return self._once.get(("kept runs",), self._source.kept_runs)

    def node(self, run: Run | None, node: str | None = None) -> Node:
        where = None if run is None else (run.run, run.rank, run.instance)
        return self._once.get(("node", where, node), lambda: self._source.node(run, node))

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        key = ("evaluate", tuple(queries), scope, span)
        return self._once.get(key, lambda: self._source.evaluate(queries, scope, span))

    def growth(self, query: Query, scope: Scope, span: Span) -> list[Growth]:
        return self._once.get(("growth", query, scope, span), lambda: self._source.growth(query, scope, span))

    def steps(self, run: Run, points: int, start_s: float | None = None, end_s: float | None = None) -> Steps:
        over = run.status != "running"
        return self._once.get(
            ("steps", run.run, run.rank, run.instance, points, start_s, end_s, over),
            lambda: self._source.steps(run, points, start_s, end_s),
            lambda took_s: OVER_HOLD_S if over else max(STEPS_HOLD_S, STEPS_HOLD_FACTOR * took_s),
        )

    def past_findings(self, run: Run) -> list[Finding]:
        key = ("past", run.run, run.rank, run.instance)
        return self._once.get(key, lambda: self._source.past_findings(run), lambda _: STEPS_HOLD_S)

    def report(self, run: Run) -> RunReport:
        over = run.status != "running"
        key = ("report", run.run, run.instance, over)
        return self._once.get(
            key,
            lambda: self._source.report(run),
            lambda took_s: OVER_HOLD_S if over else max(REPORT_HOLD_S, STEPS_HOLD_FACTOR * took_s),
        )
