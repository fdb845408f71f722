"""Where the pages' numbers come from: a node's agent, or Prometheus. What each answers, and the shared cache."""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from gpuwatch.api import Finding, Findings, Run, Series, Steps
from gpuwatch.api.client import Client, Get, Params
from gpuwatch.errors import GpuwatchError, SourceError
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports.gather import gather
from gpuwatch.tools.reports.model import RunReport
from gpuwatch_dashboards.panels import Panel
from gpuwatch_dashboards.query import Answers, Node, Query, Scope, Span, by_number, evaluate
from gpuwatch_dashboards.sources.prometheus import PrometheusSource

T = TypeVar("T")
HOLD_S = 1.0
STEPS_HOLD_S, REPORT_HOLD_S, ENDED_HOLD_S, CURRENCY_HOLD_S = 5.0, 15.0, 300.0, 300.0
HOLD_FACTOR = 10.0
"""Reading a million steps takes an agent a second or two: an answer is kept for ten times as long as it took."""
Request = tuple[str, tuple[str, ...] | None]
"""A metric and the labels to keep; None: all of them, and of each interval its smallest and largest sample."""


class AgentSource:
    """One node's agent as a source, by its JSON API (docs/reference/api.md)."""

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
    asked: Params = {"metric": metric, "start": span.start_s, "end": span.end_s, "points": span.points}
    labels = {"pick": "extremes"} if by is None else {"by": ",".join(by)}
    return {**asked, **scope.labels_of(metric), **labels}


def _requests(query: Query, scope: Scope) -> list[Request]:
    """Return what a query needs: only the labels that it reads, and the extremes of a gauge that is drawn unchanged.

    Extremes of two series lie at different times, so they cannot be summed or divided.
    """
    is_one = set(BY_NAME[query.metric].labels) <= {*scope.labels_of(query.metric), *query.by}
    if not query.over and not query.is_rate and is_one:
        return [(query.metric, None)]
    read: dict[str, set[str]] = {}
    for part in (query, query.over) if query.over else (query,):
        read.setdefault(part.metric, set()).update(part.by, (match.label for match in part.where))
    return [(metric, tuple(of for of in BY_NAME[metric].labels if of in labels)) for metric, labels in read.items()]


class Once:
    """Values by key, each held for a while. Thread-safe: a second caller waits for the value that is being made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Hashable, tuple[float, Future[Any]]] = {}  # until when, by time.monotonic()

    def get(self, key: Hashable, make: Callable[[], T], hold_s: float = HOLD_S, factor: float = 0.0) -> T:
        """Return what `make` returned for this key, now or up to `hold_s` ago. Raises what it raised, for a second.

        It is held for at least `factor` times as long as it took to make.
        """
        begin_s = time.monotonic()
        with self._lock:
            self._held = {name: held for name, held in self._held.items() if held[0] > begin_s}
            is_new = key not in self._held
            _, made = self._held.setdefault(key, (float("inf"), Future()))
        if is_new:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
                hold_s, factor = HOLD_S, 0.0
            end_s = time.monotonic()
            with self._lock:
                self._held[key] = (end_s + max(hold_s, factor * (end_s - begin_s)), made)
        if (failure := made.exception()) is not None:
            raise failure.with_traceback(None)  # without the frames of an earlier caller: they would pile up on it
        value: T = made.result()
        return value


class SharedSource:
    """An agent or a Prometheus for all viewers: they share one request per second, and slow answers are kept longer.

    What only agents keep (steps, past findings, reports) the agent of the run's node is asked for. Lines of queries and
    panels are not held here: pages hold what they draw of them in `once`, as long as its time range stays. Every method
    raises SourceError when the source does not answer, or not as expected.
    """

    def __init__(self, source: AgentSource | PrometheusSource) -> None:
        self._source, self.evaluate, self.once = source, source.evaluate, Once()
        self.prometheus = source if isinstance(source, PrometheusSource) else None
        self.label = source.label  # for people: "agent at http://127.0.0.1:9478"

    def runs(self, node: str | None = None, run: str | None = None, kept: bool = False) -> Sequence[Run]:
        """Return the known runs, the most recently active first.

        Prometheus: those of the node, and `run`. An agent, with `kept`: also ended runs that only its history has.
        """
        return self.once.get(("runs", node, run, kept), lambda: self._source.runs(node, run, kept))

    def node(self, run: Run | None, node: str | None = None) -> Node:
        """Return what is known of the named node, else of the run's; an agent knows only its own."""
        key = ("node", None if run is None else _key(run), node)
        return self.once.get(key, lambda: self._source.node(run, node))

    def answers(self, panels: Sequence[Panel], scope: Scope, span: Span) -> list[tuple[Panel, Answers]]:
        """Return the panels that the source can answer, with the lines of their curves."""
        if self.prometheus is not None:
            return [(panel, self.prometheus.answers(panel, scope, span)) for panel in panels]
        live = [panel for panel in panels if panel.is_live]
        lines = iter(self.evaluate([curve.query for panel in live for curve in panel.curves], scope, span))
        return [(panel, [next(lines) for _ in panel.curves]) for panel in live]

    def currency(self) -> str:
        """Return the currency of Prometheus's costs; empty: none are recorded."""
        return "" if self.prometheus is None else self.once.get("currency", self.prometheus.currency, CURRENCY_HOLD_S)

    def steps(self, run: Run, points: int, start_s: float | None = None, end_s: float | None = None) -> Steps:
        """Return the steps of a run's rank that began in a time range; empty where none are kept."""
        asked = (run.run, run.rank, points, start_s, end_s)
        key, hold = ("steps", run.instance, run.status, *asked), _hold(run, STEPS_HOLD_S)
        return self.once.get(key, lambda: self._source.agent_of(run).steps(*asked) or Steps(), *hold)

    def past_findings(self, run: Run) -> list[Finding]:
        """Return every finding of a run's rank, active or past, oldest first."""
        found = self.once.get(("past", _key(run)), lambda: self._source.agent_of(run).findings(run.run), STEPS_HOLD_S)
        return [finding for finding in found if finding.rank == run.rank]

    def report(self, run: Run) -> RunReport:
        """Return the report of a run with all its ranks, from its first second until now."""
        key, hold = ("report", _key(run), run.status), _hold(run, REPORT_HOLD_S)
        try:
            return self.once.get(key, lambda: gather(self._source.agent_of(run), run.run, time.time()), *hold)
        except SourceError:
            raise
        except GpuwatchError as error:  # the agent has just evicted it
            raise SourceError(f"the agent has no report of {run.name or run.run}", str(error)) from error


def _key(run: Run) -> tuple[str, int, str | None]:
    return run.run, run.rank, run.instance


def _hold(run: Run, least_s: float) -> tuple[float, float]:
    return (least_s, HOLD_FACTOR) if run.status == "running" else (ENDED_HOLD_S, 0.0)
