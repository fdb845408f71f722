"""Numbers from a node's agent, by its JSON API (docs/reference/api.md)."""

from collections.abc import Sequence

import msgspec

from gpuwatch.api import Findings, Run, Series
from gpuwatch.api.client import Client, Get, Params
from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.query import Node, Query, Scope, Span, by_number, evaluate

Request = tuple[str, tuple[str, ...] | None]
"""A metric and the labels to keep; None: all of them, and of each interval its smallest and largest sample."""


class AgentSource:
    """One node's agent, as a source."""

    def __init__(self, url: str, get: Get | None = None) -> None:
        self.client = Client(url, get=get)
        self.label = f"agent at {self.client.url}"

    def runs(self, node: str | None = None, run: str | None = None, kept: bool = False) -> Sequence[Run]:
        return self.client.runs(kept)

    def node(self, run: Run | None, node: str | None = None) -> Node:
        status = self.client.status()
        found = self.client.ask("/api/v1/findings", Findings).findings if status.gpus else ()
        own = tuple(finding for finding in found if finding.run is None)
        gpus = status.gpus and tuple(sorted(status.gpus, key=by_number))
        return Node(**{**msgspec.structs.asdict(status), "gpus": gpus}, findings=own)

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        """Fetch each metric once, however many queries read it."""
        requests = dict.fromkeys(part for query in queries for part in _requests(query, scope))
        answers = self.client.many_series([_params(request, scope, span) for request in requests])
        raw = dict(zip(requests, answers, strict=True))
        return [evaluate(query, {part[0]: raw[part] for part in _requests(query, scope)}) for query in queries]

    def agent_of(self, run: Run) -> Client:
        """Return the agent of the run's node."""
        return self.client


def _params(request: Request, scope: Scope, span: Span) -> Params:
    metric, by = request
    return {
        "metric": metric,
        "start": span.start_s,
        "end": span.end_s,
        "points": span.points,
        **scope.labels_of(metric),
        **({"pick": "extremes"} if by is None else {"by": ",".join(by)}),
    }


def _requests(query: Query, scope: Scope, divides: bool = False) -> list[Request]:
    """Return what a query needs: only the labels that it reads, and the extremes of a gauge that is drawn unchanged.

    Extremes of two series lie at different times, so they cannot be summed or divided.
    """
    labels, over = BY_NAME[query.metric].labels, query.over
    fixed = {"run", "rank"} if scope.run is not None else set()
    if over is None and not divides and not query.is_rate and set(labels) - fixed <= set(query.by):
        return [(query.metric, None)]
    of_itself = over is not None and over.metric == query.metric
    parts = [query, over] if over is not None and of_itself else [query]
    read = {label for part in parts for label in (*part.by, *(match.label for match in part.where))}
    kept = (query.metric, tuple(label for label in labels if label in read))
    return [kept] if over is None or of_itself else [kept, *_requests(over, Scope(), True)]
