"""Numbers from Prometheus (or any store that has its HTTP API), by the metrics that agents export."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpuwatch.api import Finding, Recent, Run, RunStatus, Series, Steps
from gpuwatch.diagnosis.diagnose import in_order
from gpuwatch.http import Get, JsonServer, Params
from gpuwatch.tools.reports import RunReport
from gpuwatch_dashboards.model import Growth, Node, Scope, Span
from gpuwatch_dashboards.panels.panel import Panel
from gpuwatch_dashboards.query.evaluate import Match, Query
from gpuwatch_dashboards.query.line import Line
from gpuwatch_dashboards.query.promql import INSTANCE, filled, of_a_run, render, selector
from gpuwatch_dashboards.sources.agent import AgentSource
from gpuwatch_dashboards.sources.prometheus_answer import Answer, Result, value_of
from gpuwatch_dashboards.sources.prometheus_gpus import scraped_gpus
from gpuwatch_dashboards.sources.prometheus_verdict import finding_of, verdict_of

REMEDY = "check the URL given with --prometheus and that Prometheus is running"
LOOKBACK = "6h"
"""Runs that were seen within this time are listed."""
MOST_RUNS = 100
SITE_TIMEOUT_S = 15.0
"""Of questions about a whole site over weeks."""
SCRAPES_PER_WINDOW = 4
"""A rate over fewer scrapes is empty whenever one of them is missed."""

RunKey = tuple[str, str]
"""(run, rank)"""


class ScrapedRun(Run, frozen=True):
    """A run as its node's agent exported it."""

    instance: str | None = None


class PrometheusSource:
    """A Source: a Prometheus that scrapes agents. Findings have no evidence there, and steps only a histogram."""

    def __init__(
        self,
        url: str,
        get: Get | None = None,
        scrape_interval_s: float = 15.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._api = JsonServer(url, "Prometheus", REMEDY, get)
        self._window_s = SCRAPES_PER_WINDOW * scrape_interval_s
        self._scrape_interval_s = scrape_interval_s
        self._now = now
        self._agents: dict[str, AgentSource] = {}
        self.label = f"Prometheus at {self._api.url}"

    def runs(self, node: str | None = None, run: str | None = None) -> Sequence[Run]:
        """Return at most `MOST_RUNS` of the runs, `run` among them: a site has thousands."""
        where = self._where(node, run)
        if where is None:
            return []
        infos = self._instant(f"last_over_time(gpuwatch_run_info{where}[{LOOKBACK}])")
        window = f"{self._window_s:g}s"
        up = self._by_run(f"gpuwatch_run_up{where}")
        steps = self._by_run(f"last_over_time(gpuwatch_steps_total{where}[{LOOKBACK}])")
        watermarks = self._by_run(f"last_over_time(gpuwatch_ledger_watermark_timestamp_seconds{where}[{LOOKBACK}])")
        states = self._states(f"last_over_time(gpuwatch_run_seconds_total{where}[{LOOKBACK}])")
        recent_states = self._states(f"increase(gpuwatch_run_seconds_total{where}[{window}])")
        phases = self._states(f"increase(gpuwatch_step_phase_seconds_total{where}[{window}])", "phase")
        last_steps = self._by_run(f"gpuwatch_last_step_timestamp_seconds{where}")
        steps_per_s = self._by_run(f"rate(gpuwatch_steps_total{where}[{window}])")
        samples_per_s = self._by_run(f"rate(gpuwatch_samples_total{where}[{window}])")
        buckets = f"sum by (run, rank, le) (rate(gpuwatch_step_seconds_bucket{where}[{window}]))"
        p50 = self._by_run(f"histogram_quantile(0.5, {buckets})")
        p95 = self._by_run(f"histogram_quantile(0.95, {buckets})")
        findings = self._findings(where)
        runs: dict[RunKey, Run] = {}
        for info in infos:
            labels = info.metric
            key = _run_key(labels)
            recent = Recent(
                duration_s=self._window_s,
                states=recent_states.get(key, {}),
                step_s_p50=_finite(p50.get(key)),
                step_s_p95=_finite(p95.get(key)),
                steps_per_s=steps_per_s.get(key),
                samples_per_s=samples_per_s.get(key) or None,  # a batch that does not tell its size counts none
            )
            found = findings.get(labels.get("run", ""), ())
            whole = states.get(key, {})
            watermark_s = watermarks.get(key, self._now())
            runs[key] = ScrapedRun(
                run=key[0],
                rank=int(key[1]) if key[1].isdigit() else 0,
                name=labels.get("name") or key[0],
                status=_status(up.get(key)),
                started_s=watermark_s - sum(whole.values()),
                watermark_s=watermark_s,
                last_message_s=watermark_s,
                host=labels.get(INSTANCE, ""),
                user=labels.get("user", ""),
                device=labels.get("device", ""),
                timeline=labels.get("timeline", ""),
                world_size=int(labels["world_size"]) if labels.get("world_size", "").isdigit() else 1,
                steps=int(steps.get(key, 0)),
                states=whole,
                recent=recent,
                verdict=verdict_of(
                    recent,
                    whole,
                    phases.get(key, {}),
                    found,
                    labels,
                    self._now() - last_steps[key] if key in last_steps else None,
                ),
                findings=found,
                instance=labels.get(INSTANCE),
            )
        return sorted(runs.values(), key=lambda run: (-round(run.watermark_s), run.run, run.rank))

    def kept_runs(self) -> Sequence[Run]:
        return self.runs()

    def node(self, run: Run | None, node: str | None = None) -> Node:
        """Return the named node, or the run's; without either, what is known is only Prometheus's own name."""
        name = node or (run.instance if run is not None else None)
        if name is None:
            return Node(host=self.label)
        return Node(host=name, instance=name, gpus=scraped_gpus(self._instant, name, f"{self._window_s:g}s"))

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        step_s = max(self._scrape_interval_s, (span.end_s - span.start_s) / max(1, span.points - 1))
        window = f"{max(self._window_s, step_s):.0f}s"
        return [self._range(query, render(query, scope, window), span, step_s) for query in queries]

    def answers(self, panel: Panel, scope: Scope, span: Span) -> list[list[Series]]:
        """Return the values of each of a panel's curves: its lines over the span; of a stat or table those at the end."""
        step_s = max(self._scrape_interval_s, (span.end_s - span.start_s) / span.points)
        window = f"{max(self._window_s, step_s):.0f}s"
        found = []
        for curve in panel.curves:
            expr = filled(curve.promql, scope, span, window) if curve.promql else render(curve.query, scope, window)
            if panel.kind in ("lines", "stack"):
                found.append(self.range(expr, span, step_s))
            else:
                values = self.instant(expr, span.end_s)
                found.append([Series(labels, ((span.end_s, _finite(value)),)) for labels, value in values])
        return found

    def growth(self, query: Query, scope: Scope, span: Span) -> list[Growth]:
        """Return Prometheus's own estimate: it extrapolates to the edges of the span."""
        counted = replace(query, over=None)
        expr = render(counted, scope, f"{max(1.0, span.end_s - span.start_s):.0f}s", "increase")
        answer = self._api.ask("/api/v1/query", Answer, {"query": expr, "time": span.end_s})
        return [Growth({label: r.metric.get(label, "") for label in query.by}, value_of(r)) for r in answer.data.result]

    def steps(self, run: Run, points: int, start_s: float | None = None, end_s: float | None = None) -> Steps:
        """Ask the agent of the run's node: Prometheus keeps no steps."""
        return self._agent_of(run).steps(run, points, start_s, end_s)

    def past_findings(self, run: Run) -> list[Finding]:
        return self._agent_of(run).past_findings(run)

    def report(self, run: Run) -> RunReport:
        return self._agent_of(run).report(run)

    def close(self) -> None:
        self._api.close()
        for agent in self._agents.values():
            agent.close()

    def _agent_of(self, run: Run) -> AgentSource:
        where = run.instance or ""
        if where not in self._agents:
            self._agents[where] = AgentSource(f"http://{where}")
        return self._agents[where]

    def instant(self, expr: str, time_s: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Return (labels, value) of each series of an expression, now or at a time."""
        params: Params = {"query": expr, "time": self._now() if time_s is None else time_s}
        found = self._api.ask("/api/v1/query", Answer, params, SITE_TIMEOUT_S).data.result
        return [(result.metric, value_of(result)) for result in found]

    def range(self, expr: str, span: Span, step_s: float) -> list[Series]:
        """Return the lines of an expression, with all their labels."""
        params: Params = {
            "query": expr,
            "start": span.start_s // step_s * step_s,
            "end": span.end_s,
            "step": step_s,
        }
        found = self._api.ask("/api/v1/query_range", Answer, params, SITE_TIMEOUT_S).data.result
        return [
            Series(r.metric, Line.of(tuple((t, _finite(float(v))) for t, v in r.values)).points(1.5 * step_s))
            for r in found
        ]

    def _where(self, node: str | None, run: str | None) -> str | None:
        """Return the condition for the runs to tell of: those of a node, or the most recently active; None for none."""
        own = "" if node is None else f"{{{selector(Match(INSTANCE, '=', node))}}}"
        heard = f"last_over_time(gpuwatch_ledger_watermark_timestamp_seconds{own}[{LOOKBACK}])"
        found = {labels["run"] for labels, _ in self.instant(f"topk({MOST_RUNS}, {heard})")} | ({run} if run else set())
        if not found:
            return None
        names = "|".join(re.escape(name) for name in sorted(found))
        return f"{{{selector(Match('run', '=~', names))}}}"

    def _instant(self, expr: str) -> list[Result]:
        return self._api.ask("/api/v1/query", Answer, {"query": expr, "time": self._now()}).data.result

    def _range(self, query: Query, expr: str, span: Span, step_s: float) -> list[Series]:
        # whole multiples of the step: the same moments at every refresh, so that drawn lines do not tremble
        start_s = span.start_s // step_s * step_s
        params: Params = {"query": expr, "start": start_s, "end": span.end_s, "step": step_s}
        traces = []
        for result in self._api.ask("/api/v1/query_range", Answer, params).data.result:
            points = tuple((time_s, _finite(float(text))) for time_s, text in result.values)
            labels = {label: result.metric.get(label, "") for label in query.by}
            if not of_a_run(query.metric) and INSTANCE in result.metric:
                labels[INSTANCE] = result.metric[INSTANCE]
            traces.append(Series(labels, Line.of(points).points(1.5 * step_s)))
        return traces

    def _by_run(self, expr: str) -> dict[RunKey, float]:
        return {_run_key(result.metric): value_of(result) for result in self._instant(expr)}

    def _states(self, expr: str, label: str = "state") -> dict[RunKey, dict[str, float]]:
        states: dict[RunKey, dict[str, float]] = {}
        for result in self._instant(expr):
            if (seconds := value_of(result)) > 0.0:
                states.setdefault(_run_key(result.metric), {})[result.metric.get(label, "unknown")] = seconds
        return states

    def _findings(self, where: str) -> dict[str, tuple[Finding, ...]]:
        """Return what is active by run: each root, then its consequences. The share is exported while it is active."""
        findings: dict[str, list[Finding]] = {}
        for result in self._instant(f"gpuwatch_finding_evidence_ratio{where}"):
            found = finding_of(result.metric.get("cause", ""), value_of(result))
            findings.setdefault(result.metric.get("run", ""), []).append(found)
        return {run: tuple(in_order(found)) for run, found in findings.items()}


def _run_key(labels: Mapping[str, str]) -> RunKey:
    return labels.get("run", ""), labels.get("rank", "")


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def _status(up: float | None) -> RunStatus:
    return "running" if up == 1 else "gone"
