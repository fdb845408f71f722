"""Numbers from Prometheus (or any store with its HTTP API), by the metrics that agents export."""

import re
import time
from collections.abc import Callable, Sequence

from gpuwatch.api import Run, Series
from gpuwatch.api.client import TIMEOUT_S, Client, Get, Params, Prometheus, Vector
from gpuwatch_dashboards.launch import DEFAULT_AGENT_URL
from gpuwatch_dashboards.panels import Panel
from gpuwatch_dashboards.query import Line, Node, Query, Scope, Span, filled, render
from gpuwatch_dashboards.sources.scraped import MOST_RUNS, names_of, scraped_gpus, scraped_runs

SITE_TIMEOUT_S = 15.0  # for queries about a whole site over weeks
ENDED_HOLD_S = 30.0  # ended runs are asked for again after so long, and at once when a run is no longer served
SCRAPES_PER_WINDOW = 4  # a rate over fewer scrapes is empty whenever one of them is missed


class PrometheusSource:
    """A Prometheus that scrapes agents, as a source. It has no evidence of findings, and of steps only a histogram."""

    def __init__(
        self,
        url: str,
        get: Get | None = None,
        scrape_interval_s: float = 15.0,
        now: Callable[[], float] = time.time,
        agent_url: str = DEFAULT_AGENT_URL,
    ) -> None:
        self._api = Prometheus(url, get)
        self._scrape_interval_s, self._window_s = scrape_interval_s, SCRAPES_PER_WINDOW * scrape_interval_s
        self._now = now
        self._agents: dict[str, Client] = {}
        self._ended: dict[tuple[str | None, str | None], tuple[float, set[str], list[Run]]] = {}
        self._agent_url = agent_url  # its scheme, user and password are those of all agents
        self.label = f"Prometheus at {self._api.url}"

    def runs(self, node: str | None = None, run: str | None = None, kept: bool = False) -> Sequence[Run]:
        now_s, current = self._now(), names_of(self.instant, node, False)
        until_s, served, ended = self._ended.get((node, run), (now_s, set(), []))
        if now_s >= until_s or (len(current) < MOST_RUNS and served - {*current}):
            names = [*([run] if run else ()), *names_of(self.instant, node, True)]
            names = [name for name in dict.fromkeys(names) if name not in current][: max(1, MOST_RUNS - len(current))]
            ended = scraped_runs(self.instant, names, True, self._window_s, now_s)
            self._ended = {key: value for key, value in self._ended.items() if value[0] > now_s}
            self._ended[node, run] = now_s + ENDED_HOLD_S, {*current}, ended
        found = scraped_runs(self.instant, {*current}, False, self._window_s, now_s)
        found += [one for one in ended if one.run not in current]
        return sorted(found, key=lambda one: (-round(one.watermark_s), one.run, one.rank))

    def node(self, run: Run | None, node: str | None = None) -> Node:
        """Return the named node, or the run's; without either only Prometheus's own name is known."""
        name = node or (run.instance if run is not None else None)
        if name is None:
            return Node(self.label, ())
        return Node(name, (), instance=name, gpus=scraped_gpus(self.instant, name, self._window_s))

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        step_s, window = self._resolution(span)
        return [
            [
                Series({**dict.fromkeys(query.by, ""), **series.labels}, series.points)  # Prometheus drops empty labels
                for series in self.range(render(query, scope, window), span, step_s, TIMEOUT_S)
            ]
            for query in queries
        ]

    def answers(self, panel: Panel, scope: Scope, span: Span) -> list[list[Series]]:
        """Return the values of each of a panel's curves: lines over the span, of a stat or table the values at its end."""
        step_s, window = self._resolution(span)
        found = []
        for curve in panel.curves:
            expr = filled(curve.promql, scope, span, window) if curve.promql else render(curve.query, scope, window)
            if panel.kind in ("lines", "stack"):
                found.append(self.range(expr, span, step_s))
            else:
                values = self.instant(expr, span.end_s, SITE_TIMEOUT_S)
                found.append([Series(labels, ((span.end_s, _finite(value)),)) for labels, value in values])
        return found

    def currency(self) -> str:
        """Return the currency of the rules' prices; empty without a price."""
        return next((labels.get("currency", "") for labels, _ in self.instant("site:gpuwatch_currency:info")), "")

    def agent_of(self, run: Run) -> Client:
        where = run.instance or ""
        if where not in self._agents:
            self._agents[where] = Client(re.sub(r"[^/@]+/*$", where, self._agent_url))
        return self._agents[where]

    def instant(self, expr: str, time_s: float | None = None, timeout_s: float = TIMEOUT_S) -> Vector:
        """Return (labels, value) of each series of an expression, now or at a time."""
        return self._api.instant(expr, self._now() if time_s is None else time_s, timeout_s)

    def range(self, expr: str, span: Span, step_s: float, timeout_s: float = SITE_TIMEOUT_S) -> list[Series]:
        """Return the lines of an expression, with all their labels."""
        # multiples of the step: the same times at every refresh, so that lines do not jitter
        start_s = span.start_s // step_s * step_s
        params: Params = {"query": expr, "start": start_s, "end": span.end_s, "step": step_s}
        found = self._api.query("query_range", params, timeout_s)
        lines = ((r.metric, Line.of(tuple((t, _finite(float(v))) for t, v in r.values))) for r in found)
        return [Series(labels, line.points(1.5 * step_s)) for labels, line in lines]

    def _resolution(self, span: Span) -> tuple[float, str]:
        """Return the seconds between two points of a line, and the range of rates."""
        step_s = max(self._scrape_interval_s, (span.end_s - span.start_s) / max(1, span.points - 1))
        return step_s, f"{max(self._window_s, step_s):.0f}s"


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
