"""Numbers from a node's agent, by its JSON API (docs/reference/api.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gpuwatch.api import Finding, Run, Series, Steps
from gpuwatch.api.client import Client, Get, Params
from gpuwatch.errors import GpuwatchError, SourceError
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports.gather import gather
from gpuwatch.tools.reports.model import RunReport
from gpuwatch_dashboards.query import Node, Query, Scope, Span, evaluate


class AgentSource:
    """A Source: one node's agent."""

    def __init__(self, url: str, get: Get | None = None) -> None:
        self._client = Client(url, get=get)
        self.label = f"agent at {self._client.url}"

    def runs(self, node: str | None = None, run: str | None = None) -> Sequence[Run]:
        return self._client.runs()

    def kept_runs(self) -> Sequence[Run]:
        return self._client.runs(kept=True)

    def node(self, run: Run | None, node: str | None = None) -> Node:
        status = self._client.status()
        found = self._client.active_findings() if status.gpus else ()
        own = tuple(finding for finding in found if finding.run is None)
        return Node(**msgspec.structs.asdict(status), findings=own)

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        """Fetch each metric once, however many queries read it."""
        requests = dict.fromkeys(part for query in queries for part in _requests(query, scope))
        answers = self._client.many_series([_params(request, scope, span) for request in requests])
        raw = dict(zip(requests, answers, strict=True))
        return [evaluate(query, {part.metric: raw[part] for part in _requests(query, scope)}) for query in queries]

    def steps(self, run: Run, points: int, start_s: float | None = None, end_s: float | None = None) -> Steps:
        return self._client.steps(run.run, run.rank, points, start_s, end_s) or Steps()

    def past_findings(self, run: Run) -> list[Finding]:
        return [finding for finding in self._client.findings(run.run) if finding.rank == run.rank]

    def report(self, run: Run) -> RunReport:
        try:
            return gather(self._client, run.run, time.time())
        except SourceError:
            raise
        except GpuwatchError as error:  # the agent has just evicted it
            what = f"{self.label} has no report of {run.name or run.run}"
            raise SourceError(what, self._client.url, str(error)) from error

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True)
class _Request:
    """What is requested of one metric."""

    metric: str
    by: tuple[str, ...] | None = None
    """Labels to keep; None: all of them."""
    extremes: bool = False
    """Of each interval its smallest and largest sample, instead of its last."""


def _params(request: _Request, scope: Scope, span: Span) -> Params:
    """Return one query of /api/v1/series."""
    labels = BY_NAME[request.metric].labels
    named = {"run": scope.run, "rank": scope.rank, "gpu": scope.gpu}
    return {
        "metric": request.metric,
        "start": span.start_s,
        "end": span.end_s,
        "points": span.points,
        **{label: value for label, value in named.items() if label in labels and value is not None},
        **({} if request.by is None else {"by": ",".join(request.by)}),
        **({"pick": "extremes"} if request.extremes else {}),
    }


def _requests(query: Query, scope: Scope) -> list[_Request]:
    """Return what a query needs: only the labels that it reads, and the extremes of a gauge that is drawn unchanged.

    Extremes of two series lie at different times, so they cannot be summed or divided.
    """
    kept = _labels(query)
    if query.over is None:
        fixed = {"run", "rank"} if scope.run is not None else set()
        alone = not query.is_rate and set(BY_NAME[query.metric].labels) - fixed <= set(query.by)
        return [_Request(query.metric, None if alone else kept, alone)]
    return [
        _Request(query.metric, kept),
        *(_requests(query.over, Scope()) if query.over.metric != query.metric else ()),
    ]


def _labels(query: Query) -> tuple[str, ...]:
    """Return the labels of its metric that a query, or its divisor of the same metric, groups or filters by."""
    parts = [query]
    if query.over is not None and query.over.metric == query.metric:
        parts.append(query.over)
    read = {label for part in parts for label in (*part.by, *(match.label for match in part.where))}
    return tuple(label for label in BY_NAME[query.metric].labels if label in read)
