"""Reads everything that the screen shows from one source, and no more often than it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gpuwatch.api import Run
from gpuwatch.http import Get
from gpuwatch_dashboards.model import Scope
from gpuwatch_dashboards.selection import key_of, select
from gpuwatch_dashboards.sources import AgentSource, PrometheusSource, Source
from gpuwatch_dashboards.terminal import gpus
from gpuwatch_dashboards.terminal.facts import Facts, Strands
from gpuwatch_dashboards.terminal.gpu_curves import GpuCurves, read_gpu_curves
from gpuwatch_dashboards.terminal.strands import read_strands

STRANDS_EVERY_S = 3.0
"""Series are sampled once a second and drawn in columns of several seconds: to ask for them more often shows nothing new."""


class Reader:
    """One source of facts."""

    def __init__(self, source: Source, now: Callable[[], float] = time.time) -> None:
        self.source = source
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
        node = self.source.node(run)
        found = tuple(sorted(gpus.scraped(node), key=lambda gpu: gpus.by_number((gpu.gpu, gpu.uuid))))
        if found and stale:
            self._shares = gpus.ledgers(self.source, scope, now_s)
        found = gpus.with_ledgers(found, self._shares)
        if stale and found:
            self._curves = read_gpu_curves(self.source, scope, now_s)
        return Facts(
            label=self.source.label,
            time_s=now_s,
            host=node.host,
            runs=tuple(runs),
            selected=key or None,
            strands=self._strands,
            gpus=found,
            gpus_known=node.gpus is not None,
            gpu_curves=self._curves if found else GpuCurves(),
            gpu_findings=node.findings,
            collectors=tuple(node.collectors),
            history_failures=node.history_failures,
        )


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Return runs as they stay in place from second to second: those that run first, the newest first, ranks together."""
    started = {run.run: min(r.started_s for r in runs if r.run == run.run) for run in runs}
    return sorted(runs, key=lambda run: (run.status != "running", -started[run.run], run.run, run.rank))


def open_reader(agent_url: str, prometheus_url: str | None, get: Get | None = None) -> Reader:
    """Return a reader of Prometheus where its URL is given, else of an agent."""
    return Reader(PrometheusSource(prometheus_url, get) if prometheus_url else AgentSource(agent_url, get))
