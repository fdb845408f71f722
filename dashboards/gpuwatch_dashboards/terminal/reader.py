"""Reads everything that the screen shows from one source, and no more often than it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import httpx

from gpuwatch_dashboards.model import Run, Scope
from gpuwatch_dashboards.selection import key_of, select
from gpuwatch_dashboards.sources import AgentSource, PrometheusSource, Source
from gpuwatch_dashboards.sources.agent import REMEDY
from gpuwatch_dashboards.sources.http import JsonApi
from gpuwatch_dashboards.terminal import gpus
from gpuwatch_dashboards.terminal.facts import Facts, Strands
from gpuwatch_dashboards.terminal.gpu_curves import GpuCurves, read_gpu_curves
from gpuwatch_dashboards.terminal.strands import read_strands

STRANDS_EVERY_S = 3.0
"""Series are sampled once a second and drawn in columns of several seconds: to ask for them more often shows nothing new."""


class Reader:
    """One source of facts. `api` is the agent's own API, which says more of GPUs than metrics; None with Prometheus."""

    def __init__(self, source: Source, api: JsonApi | None, now: Callable[[], float] = time.time) -> None:
        self.source = source
        self._api = api
        self._now = now
        self._strands, self._strands_read_s = Strands(), 0.0
        self._shares: dict[tuple[str, str], dict[str, float]] = {}
        self._curves = GpuCurves()

    def read(self, wanted: str | None = None) -> Facts:
        """Return what is known now, with `wanted` (a run's key) in detail, else the newest running. Raises SourceError."""
        runs = in_order(self.source.runs())
        chosen = next((run for run in runs if key_of(run) == wanted), None)
        run = select(runs, chosen, self._strands.key)
        return self._facts(runs, run)

    def _facts(self, runs: Sequence[Run], run: Run | None) -> Facts:
        now_s = self._now()
        key = key_of(run) if run is not None else ""
        stale = key != self._strands.key or not 0 <= now_s - self._strands_read_s < STRANDS_EVERY_S
        scope = Scope(instance=run.instance if run is not None else None)
        if stale:
            self._strands, self._strands_read_s = read_strands(self.source, run, now_s), now_s
        if self._api is not None:
            status = self._api.get("/api/v1/status", gpus.Status)
            found = tuple(sorted(status.gpus or (), key=lambda gpu: gpus.by_number((gpu.gpu, gpu.uuid))))
            known, findings = status.gpus is not None, gpus.read_findings(self._api) if found else ()
            if found and stale:
                self._shares = gpus.ledgers(self.source, scope, now_s)
            found = gpus.with_ledgers(found, self._shares)
            host, collectors, failures = status.host, status.collectors, status.history.failures
        else:
            node = self.source.node(run)
            found = gpus.scraped(node)
            found = gpus.with_ledgers(found, gpus.ledgers(self.source, scope, now_s))
            known, findings = node.gpus is not None, ()
            host, collectors, failures = node.host, node.collectors, node.history_failures
        if stale and found:
            self._curves = read_gpu_curves(self.source, scope, now_s)
        return Facts(
            label=self.source.label,
            time_s=now_s,
            host=host,
            runs=tuple(runs),
            selected=key or None,
            strands=self._strands,
            gpus=found,
            gpus_known=known,
            gpu_curves=self._curves if found else GpuCurves(),
            gpu_findings=findings,
            collectors=collectors,
            history_failures=failures,
        )


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Return runs as they stay in place from second to second: those that run first, the newest first, ranks together."""
    started = {run.run: min(r.started_s for r in runs if r.run == run.run) for run in runs}
    return sorted(runs, key=lambda run: (run.status != "running", -started[run.run], run.run, run.rank))


def open_reader(agent_url: str, prometheus_url: str | None, transport: httpx.BaseTransport | None = None) -> Reader:
    """Return a reader of Prometheus where its URL is given, else of an agent."""
    if prometheus_url:
        return Reader(PrometheusSource(prometheus_url, transport), None)
    return Reader(AgentSource(agent_url, transport), JsonApi("the agent", agent_url, REMEDY, transport))
