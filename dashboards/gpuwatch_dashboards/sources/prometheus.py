"""Numbers from Prometheus (or any store that has its HTTP API), by the metrics that agents export."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import httpx

from gpuwatch import diagnosis
from gpuwatch.verdict import give_verdict
from gpuwatch.window import StepColumns, Window
from gpuwatch_dashboards.model import Finding, Gpu, Node, Recent, Run, Scope, Span, Status, Trace, Verdict
from gpuwatch_dashboards.promql import INSTANCE, of_a_run, render, selector
from gpuwatch_dashboards.query import Match, Query, with_gaps
from gpuwatch_dashboards.sources.http import JsonApi

REMEDY = "check the URL given with --prometheus and that Prometheus is running"
LOOKBACK = "6h"
"""Runs that were seen within this time are listed."""
SCRAPES_PER_WINDOW = 4
"""A rate over fewer scrapes is empty whenever one of them is missed."""

RunKey = tuple[str, str]
"""(run, rank)"""


@dataclass(frozen=True)
class _Result:
    metric: dict[str, str]
    value: tuple[float, str] | None = None
    values: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class _Data:
    result: list[_Result]


@dataclass(frozen=True)
class _Answer:
    data: _Data


class PrometheusSource:
    """A Source: a Prometheus that scrapes agents. Findings have no evidence there, and steps only a histogram."""

    def __init__(
        self,
        url: str,
        transport: httpx.BaseTransport | None = None,
        scrape_interval_s: float = 15.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._api = JsonApi("Prometheus", url, REMEDY, transport)
        self._window_s = SCRAPES_PER_WINDOW * scrape_interval_s
        self._scrape_interval_s = scrape_interval_s
        self._now = now
        self.label = f"Prometheus at {self._api.url}"

    def runs(self) -> list[Run]:
        infos = self._instant(f"last_over_time(gpuwatch_run_info[{LOOKBACK}])")
        if not infos:
            return []
        window = f"{self._window_s:g}s"
        up = self._by_run("gpuwatch_run_up")
        steps = self._by_run(f"last_over_time(gpuwatch_steps_total[{LOOKBACK}])")
        watermarks = self._by_run(f"last_over_time(gpuwatch_ledger_watermark_timestamp_seconds[{LOOKBACK}])")
        states = self._states(f"last_over_time(gpuwatch_run_seconds_total[{LOOKBACK}])")
        recent_states = self._states(f"increase(gpuwatch_run_seconds_total[{window}])")
        phases = self._states(f"increase(gpuwatch_step_phase_seconds_total[{window}])", "phase")
        last_steps = self._by_run("gpuwatch_last_step_timestamp_seconds")
        steps_per_s = self._by_run(f"rate(gpuwatch_steps_total[{window}])")
        samples_per_s = self._by_run(f"rate(gpuwatch_samples_total[{window}])")
        buckets = f"sum by (run, rank, le) (rate(gpuwatch_step_seconds_bucket[{window}]))"
        p50 = self._by_run(f"histogram_quantile(0.5, {buckets})")
        p95 = self._by_run(f"histogram_quantile(0.95, {buckets})")
        findings = self._findings()
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
            runs[key] = Run(
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
                verdict=_verdict(
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

    def node(self, run: Run | None) -> Node:
        """Return the run's node; without a run, what is known is only Prometheus's own name."""
        if run is None or run.instance is None:
            return Node(host=self.label)
        where = selector(Match(INSTANCE, "=", run.instance))
        seen = self._instant(f"gpuwatch_gpus_seen{{{where}}}")
        utilization = self._instant(f"gpuwatch_gpu_utilization_ratio{{{where}}}")
        gpus = tuple(
            Gpu(r.metric.get("gpu", ""), r.metric.get("UUID", ""), utilization_ratio=_value(r)) for r in utilization
        )
        none_there = bool(seen) and _value(seen[0]) == 0
        return Node(host=run.instance, gpus=gpus if gpus or none_there else None)

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Trace]]:
        step_s = max(self._scrape_interval_s, (span.end_s - span.start_s) / max(1, span.points - 1))
        window = f"{max(self._window_s, step_s):.0f}s"
        return [self._range(query, render(query, scope, window), span, step_s) for query in queries]

    def close(self) -> None:
        self._api.close()

    def _instant(self, expr: str) -> list[_Result]:
        return self._api.get("/api/v1/query", _Answer, {"query": expr, "time": self._now()}).data.result

    def _range(self, query: Query, expr: str, span: Span, step_s: float) -> list[Trace]:
        # whole multiples of the step: the same moments at every refresh, so that drawn lines do not tremble
        start_s = span.start_s // step_s * step_s
        params: dict[str, str | int | float] = {"query": expr, "start": start_s, "end": span.end_s, "step": step_s}
        traces = []
        for result in self._api.get("/api/v1/query_range", _Answer, params).data.result:
            points = tuple((time_s, _finite(float(text))) for time_s, text in result.values)
            labels = {label: result.metric.get(label, "") for label in query.by}
            if not of_a_run(query.metric) and INSTANCE in result.metric:
                labels[INSTANCE] = result.metric[INSTANCE]
            traces.append(Trace(labels, with_gaps(points)))
        return traces

    def _by_run(self, expr: str) -> dict[RunKey, float]:
        return {_run_key(result.metric): _value(result) for result in self._instant(expr)}

    def _states(self, expr: str, label: str = "state") -> dict[RunKey, dict[str, float]]:
        states: dict[RunKey, dict[str, float]] = {}
        for result in self._instant(expr):
            if (seconds := _value(result)) > 0.0:
                states.setdefault(_run_key(result.metric), {})[result.metric.get(label, "unknown")] = seconds
        return states

    def _findings(self) -> dict[str, tuple[Finding, ...]]:
        """Return what is active by run, the largest share first."""
        ratios = {
            (r.metric.get("run", ""), r.metric.get("cause", "")): _value(r)
            for r in self._instant("gpuwatch_finding_evidence_ratio")
        }
        findings: dict[str, list[Finding]] = {}
        for result in self._instant("gpuwatch_finding_active == 1"):
            run, cause = result.metric.get("run", ""), result.metric.get("cause", "")
            findings.setdefault(run, []).append(replace(_finding(cause), ratio=ratios.get((run, cause))))
        return {run: tuple(sorted(found, key=lambda f: -(f.ratio or 0.0))) for run, found in findings.items()}


def _verdict(
    recent: Recent,
    whole_s: Mapping[str, float],
    phases_s: Mapping[str, float],
    findings: Sequence[Finding],
    info: Mapping[str, str],
    since_step_s: float | None,
) -> Verdict | None:
    """Return what the agent would say, from what it exported: the last minute decides, of a run that is over the whole.

    Of the steps only that there are any is known; their mean stands for them.
    """
    states_s = recent.states or whole_s
    if not states_s:
        return None
    mean_step = StepColumns(
        (phases_s.get("data_wait", 0.0),), (phases_s.get("transfer", 0.0),), (phases_s.get("compute", 0.0),), (False,)
    )
    stalled = any(finding.cause == "stalled" for finding in findings)
    window = Window(
        duration_s=sum(states_s.values()),
        states_s=states_s,
        timeline=info.get("timeline", "host"),
        device=info.get("device", "cpu"),
        steps=mean_step if phases_s or not recent.states else StepColumns(),
        stalled_s=since_step_s if stalled else None,
    )
    known = [diagnosis.Finding(f.cause, f.severity, f.title, f.ratio or 0.0, (), f.advice) for f in findings]
    verdict = give_verdict(window, known)
    return Verdict(verdict.state, verdict.sentence, verdict.ratio)


def _finding(cause: str) -> Finding:
    return Finding(
        cause=cause,
        severity="info" if cause.endswith("saturated") else "warning",
        title=cause.replace("_", " "),
        advice="Prometheus has the share only: evidence and advice are on the node's own page (`gpuwatch dashboard`).",
    )


def _run_key(labels: Mapping[str, str]) -> RunKey:
    return labels.get("run", ""), labels.get("rank", "")


def _value(result: _Result) -> float:
    return float(result.value[1]) if result.value else float("nan")


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def _status(up: float | None) -> Status:
    return "running" if up == 1 else "gone"
