"""Numbers from a node's agent, by its JSON API (docs/api.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.model import Collector, Gpu, Node, Run, Scope, Span, Trace
from gpuwatch_dashboards.query import Query, evaluate
from gpuwatch_dashboards.sources.http import JsonApi

REMEDY = "start it with `gpuwatch up` or `gpuwatch agent`"


@dataclass(frozen=True)
class _Runs:
    runs: list[Run]


@dataclass(frozen=True)
class _Series:
    series: list[Trace]


@dataclass(frozen=True)
class _History:
    failures: int = 0


@dataclass(frozen=True)
class _Status:
    host: str
    collectors: tuple[Collector, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    history: _History = _History()


class AgentSource:
    """A Source: one node's agent."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self._api = JsonApi("the agent", url, REMEDY, transport)
        self.label = f"agent at {self._api.url}"

    def runs(self) -> list[Run]:
        return self._api.get("/api/v1/runs", _Runs).runs

    def node(self, run: Run | None) -> Node:
        status = self._api.get("/api/v1/status", _Status)
        return Node(status.host, status.collectors, status.gpus, status.history.failures)

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Trace]]:
        """Fetch each metric once, whatever number of queries read it."""
        metrics = dict.fromkeys(metric for query in queries for metric in query.metrics)
        raw = {metric: self._samples(metric, scope, span) for metric in metrics}
        return [evaluate(query, raw) for query in queries]

    def close(self) -> None:
        self._api.close()

    def _samples(self, metric: str, scope: Scope, span: Span) -> list[Trace]:
        params: dict[str, str | int | float] = {
            "metric": metric,
            "start": span.start_s,
            "end": span.end_s,
            "points": span.points,
        }
        labels = BY_NAME[metric].labels
        if scope.run is not None and "run" in labels:
            params["run"] = scope.run
        if scope.rank is not None and "rank" in labels:
            params["rank"] = scope.rank
        return self._api.get("/api/v1/series", _Series, params).series
