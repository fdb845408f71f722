"""Numbers from a node's agent, by its JSON API (docs/reference/api.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpuwatch.api import Client, Finding, Run, Series, Steps
from gpuwatch.errors import GpuwatchError, SourceError
from gpuwatch.http import Get, Params
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports import RunReport, gather
from gpuwatch_dashboards.model import Growth, Node, Scope, Span
from gpuwatch_dashboards.query.evaluate import Query, evaluate, grown

EDGE_S = 5.0
"""Each edge of a stretch is looked for within so many seconds: the agent samples every second."""


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
        return Node(status.host, status.collectors, status.gpus, status.history.failures, own)

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        """Fetch each metric once, whatever number of queries read it."""
        asked = dict.fromkeys(part for query in queries for part in _parts(query, scope))
        raw = dict(zip(asked, self._client.many_series([_params(ask, scope, span) for ask in asked]), strict=True))
        return [evaluate(query, {ask.metric: raw[ask] for ask in _parts(query, scope)}) for query in queries]

    def growth(self, query: Query, scope: Scope, span: Span) -> list[Growth]:
        """Ask for the two edges of the span only; where the agent was away at its begin, for some points between."""
        ask = _Ask(query.metric, _kept(query))
        if span.end_s - span.start_s > 3 * EDGE_S:
            begin = Span(span.start_s, span.start_s + EDGE_S, int(EDGE_S))
            end = Span(span.end_s - EDGE_S, span.end_s, int(EDGE_S))
            before, after = self._client.many_series([_params(ask, scope, edge) for edge in (begin, end)])
            if before:
                return grown(query, [_first(before), after])
        return grown(query, self._client.many_series([_params(ask, scope, span)]))

    def steps(self, run: Run, points: int, start_s: float | None = None, end_s: float | None = None) -> Steps:
        return self._client.steps(run.run, run.rank, points, start_s, end_s) or Steps()

    def past_findings(self, run: Run) -> list[Finding]:
        return [finding for finding in self._client.findings(run.run) if finding.rank == run.rank]

    def report(self, run: Run) -> RunReport:
        try:
            return gather(self._client, run.run, time.time())
        except SourceError:
            raise
        except GpuwatchError as error:  # it has just been forgotten
            what = f"{self.label} has no report of {run.name or run.run}"
            raise SourceError(what, self._client.url, str(error)) from error

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True)
class _Ask:
    """What is asked of the agent for one metric of a query."""

    metric: str
    by: tuple[str, ...] | None = None
    """Labels that are kept; None: all of them."""
    extremes: bool = False


def _params(ask: _Ask, scope: Scope, span: Span) -> Params:
    """Return one query of /api/v1/series."""
    params: dict[str, str | float] = {
        "metric": ask.metric,
        "start": span.start_s,
        "end": span.end_s,
        "points": span.points,
    }
    labels = BY_NAME[ask.metric].labels
    named = {"run": scope.run, "rank": scope.rank, "gpu": scope.gpu}
    params |= {label: value for label, value in named.items() if label in labels and value is not None}
    if ask.by is not None:
        params["by"] = ",".join(ask.by)
    if ask.extremes:
        params["pick"] = "extremes"
    return params


def _parts(query: Query, scope: Scope) -> list[_Ask]:
    """Return what a query needs: as few labels as it reads, and of a gauge that is drawn as it is its extremes.

    Extremes of two series lie at different times, so that nothing can be summed or divided by them.
    """
    kept = _kept(query)
    if query.over is None:
        fixed = {"run", "rank"} if scope.run is not None else set()
        alone = not query.is_rate and set(BY_NAME[query.metric].labels) - fixed <= set(query.by)
        return [_Ask(query.metric, None if alone else kept, alone)]
    asks = [_Ask(query.metric, kept)]
    return asks + ([] if query.over.metric == query.metric else _parts(query.over, Scope()))


def _kept(query: Query) -> tuple[str, ...]:
    """Return the labels of a query's metric that it groups or filters by."""
    labels = BY_NAME[query.metric].labels
    return tuple(label for label in labels if any(label in part.by or _names(part, label) for part in _chain(query)))


def _chain(query: Query) -> list[Query]:
    """Return the parts of a query that read the same metric."""
    own = [query]
    if query.over is not None and query.over.metric == query.metric:
        own += _chain(query.over)
    return own


def _names(query: Query, label: str) -> bool:
    return any(match.label == label for match in query.where)


def _first(series: Sequence[Series]) -> list[Series]:
    return [Series(trace.labels, trace.points[:1]) for trace in series]
