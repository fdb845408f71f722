"""What a page may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpuwatch_dashboards.model import Node, Run, Scope, Span, Trace
from gpuwatch_dashboards.query import Query


class Source(Protocol):
    """A source of numbers. Every method raises SourceError when it does not answer, or not as agreed."""

    label: str
    """For people: "agent at http://127.0.0.1:9478"."""

    def runs(self) -> list[Run]:
        """Return the runs that are known, the most recently active first."""

    def node(self, run: Run | None) -> Node:
        """Return what is known of the run's node."""

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Trace]]:
        """Return the lines of each query, in the queries' order; none where nothing was measured."""
