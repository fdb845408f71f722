"""`gpuwatch top`: the facts that it shows, read here; `sections` and `pages` draw them as lines of text.

`app` (Textual) and `--once` show the pages. Times are Unix seconds, ratios 0–1; None or absent: not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuwatch.api import Gpu, Run, Series
from gpuwatch_dashboards.panels import GPU_STATES, live_panels
from gpuwatch_dashboards.query import Node, Query, Scope, Span, shares_by
from gpuwatch_dashboards.selection import in_order, key_of, select
from gpuwatch_dashboards.sources import AgentSource
from gpuwatch_dashboards.sources.prometheus import PrometheusSource

SPAN_S, POINTS = 300.0, 100
RECENT_S = 60.0
SERIES_EVERY_S = 3.0  # a column of a curve is several seconds: reading more often would show nothing new
SHOWN = (
    "ledger", "cpu", "pressure", "shm", "node_shm", "memory", "network", "disk",
    "gpu_utilization", "gpu_memory", "gpu_power", "gpu_temperature",
)  # fmt: skip
"""Panels that are read for the other pages than the one with every panel."""
_STEPS, _PHASES = "gpuwatch_steps_total", "gpuwatch_step_phase_seconds_total"
OWN_QUERIES: dict[str, dict[str, Query]] = {
    "run": {"step": Query(_PHASES, over=Query(_STEPS)), "steps": Query(_STEPS), "phases": Query(_PHASES, ("phase",))},
    "gpu": {"gpu states": GPU_STATES},
}
"""What no panel asks, by group."""


def queries(*groups: str, every: bool = False) -> dict[str, Query]:
    """Return these groups' queries, those of panels by panel key and curve legend: of every panel, or of SHOWN."""
    panels = [panel for panel in live_panels(*groups) if every or panel.key in SHOWN]
    found = {f"{panel.key} {curve.legend}": curve.query for panel in panels for curve in panel.curves}
    return found | {name: query for group in groups for name, query in OWN_QUERIES.get(group, {}).items()}


@dataclass(frozen=True)
class Sampled:
    """Series of one run and its node over the last minutes, by the names of the queries above."""

    run: str = ""  # the key of the run; empty without any
    start_s: float = 0.0
    end_s: float = 0.0
    traces: Mapping[str, Sequence[Series]] = field(default_factory=dict)

    def of_node_only(self) -> Sampled:
        of_run = queries("run", every=True)
        return replace(self, run="", traces={name: t for name, t in self.traces.items() if name not in of_run})

    def first(self, name: str, **labels: str) -> Series:
        """Return the first series with these labels; one without points if there is none."""
        return next((t for t in self.traces.get(name, ()) if labels.items() <= t.labels.items()), Series({}, ()))

    def phases_s(self) -> dict[str, float]:
        """Return seconds by phase of the last minute's mean step, without empty phases."""
        steps_per_s = sum(self._recent("steps", "").values())
        return {phase: rate / steps_per_s for phase, rate in self._recent("phases", "phase").items() if steps_per_s}

    def gpu_shares(self, gpu: Gpu) -> dict[str, float]:
        """Return a GPU's shares of the last minute by state; empty: not known."""
        return self._recent("gpu states", "state", gpu=gpu.gpu, UUID=gpu.uuid)

    def shm(self, name: str = "node_shm ") -> Series:
        """Return the share in use of the fullest /dev/shm (the node's, or a run's own), or another series of it."""
        fullest = max(self.traces.get("node_shm ", ()), key=lambda mount: mount.last or 0.0, default=Series({}, ()))
        return self.first(name, **fullest.labels)

    def _recent(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the shares of the last minute by a label of the series with these labels, without zeros."""
        since_s, traces = self.end_s - RECENT_S, self.traces.get(name, ())
        recent = [Series(each.labels, tuple(point for point in each.points if point[0] > since_s)) for each in traces]
        return shares_by(label, [each for each in recent if labels.items() <= each.labels.items()])


@dataclass(frozen=True)
class Facts:
    label: str
    time_s: float
    runs: tuple[Run, ...] = ()
    node: Node = field(default_factory=lambda: Node("", ()))
    series: Sampled = Sampled()

    @property
    def gpus(self) -> Sequence[Gpu]:
        return self.node.gpus or ()


class Reader:
    def __init__(self, source: AgentSource | PrometheusSource, now: Callable[[], float] = time.time) -> None:
        self._source, self._now = source, now
        self._series = Sampled()

    def read(self, wanted: str | None = None, panels: bool = False) -> Facts:
        """Return facts, detailed for run `wanted` (a key) or the newest running; `panels`: all. Raises: SourceError."""
        runs = in_order(self._source.runs())
        name, _, rank = (wanted or "").rpartition("/")
        run = select(runs, self._series.run, name, rank)
        node = self._source.node(run)
        groups = [*(["run"] if run is not None else []), *(["gpu"] if node.gpus else []), "node", "agent"]
        needed = queries(*groups, every=panels)
        now_s, key, held = self._now(), key_of(run) if run is not None else "", self._series
        is_fresh = 0 <= now_s - held.end_s < SERIES_EVERY_S and key == held.run
        if not (is_fresh and needed.keys() == held.traces.keys()):
            scope = Scope(run.run, str(run.rank), run.instance) if run is not None else Scope()
            found = self._source.evaluate(list(needed.values()), scope, Span(now_s - SPAN_S, now_s, POINTS))
            self._series = Sampled(key, now_s - SPAN_S, now_s, dict(zip(needed, found, strict=True)))
        return Facts(self._source.label, now_s, tuple(runs), node, self._series)
