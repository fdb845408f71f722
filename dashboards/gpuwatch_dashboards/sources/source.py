"""What a page may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpuwatch.api import Finding, Run, Series, Steps
from gpuwatch.tools.reports import RunReport
from gpuwatch_dashboards.model import Growth, Node, Scope, Span
from gpuwatch_dashboards.query.evaluate import Query


class Source(Protocol):
    """A source of numbers. Every method raises SourceError when it does not answer, or not as agreed."""

    label: str
    """For people: "agent at http://127.0.0.1:9478"."""

    def runs(self, node: str | None = None, run: str | None = None) -> Sequence[Run]:
        """Return the runs that are known, the most recently active first; of a source for a site those of a node, or that run."""

    def kept_runs(self) -> Sequence[Run]:
        """Return the same with those that ended before and whose account is kept; of a source for a site the same."""

    def node(self, run: Run | None, node: str | None = None) -> Node:
        """Return what is known of the node that is named, else of the run's; an agent knows one."""

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        """Return the lines of each query, in the queries' order; none where nothing was measured."""

    def growth(self, query: Query, scope: Scope, span: Span) -> list[Growth]:
        """Return by how much a counter grew over the span, by the query's labels (`over` is left out of account)."""

    def steps(self, run: Run, points: int, start_s: float | None = None, end_s: float | None = None) -> Steps:
        """Return the steps of a run's rank that began in a stretch of time; none where none are kept."""

    def past_findings(self, run: Run) -> list[Finding]:
        """Return what is and was found of a run's rank, oldest first; of a source without a memory for it: nothing."""

    def report(self, run: Run) -> RunReport:
        """Return the account of a run with all its ranks, from its first second to now."""
