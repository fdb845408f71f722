"""`gpuwatch top`: the facts that it shows, read here; `sections` and `pages` draw them as lines of text.

`app` (Textual) and `--once` show the pages. Times are Unix seconds, ratios 0–1; what was not measured is None or absent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from gpuwatch.api import Gpu, Points, Run, Series
from gpuwatch_dashboards.panels import live_panels
from gpuwatch_dashboards.panels.gpu import GPU_STATES
from gpuwatch_dashboards.query import Node, Query, Scope, Span
from gpuwatch_dashboards.selection import in_order, key_of, select
from gpuwatch_dashboards.sources import Source

SPAN_S, POINTS = 300.0, 100
RECENT_S = 60.0
SERIES_EVERY_S = 3.0  # a column of a curve is several seconds: reading more often would show nothing new


def panel_queries() -> dict[str, Query]:
    """Return the queries of all panels that an agent can answer, by panel key and curve legend."""
    return {f"{panel.key} {curve.legend}": curve.query for panel in live_panels() for curve in panel.curves}


_PANEL_QUERIES = panel_queries()
_NODE_PANELS = ("cpu", "pressure", "shm", "memory", "network", "disk")
_GPU_PANELS = ("gpu_utilization", "gpu_memory", "gpu_power", "gpu_temperature")
_STEPS, _PHASES = "gpuwatch_steps_total", "gpuwatch_step_phase_seconds_total"
RUN_QUERIES: dict[str, Query] = {
    "ledger {state}": _PANEL_QUERIES["ledger {state}"],
    "step": Query(_PHASES, over=Query(_STEPS)),
    "steps": Query(_STEPS),
    "phases": Query(_PHASES, by=("phase",)),
}
NODE_QUERIES: dict[str, Query] = {n: q for n, q in _PANEL_QUERIES.items() if n.split()[0] in _NODE_PANELS}
GPU_QUERIES: dict[str, Query] = {
    **{n: q for n, q in _PANEL_QUERIES.items() if n.split()[0] in _GPU_PANELS},
    "gpu states": GPU_STATES,
}


@dataclass(frozen=True)
class Sampled:
    """Series of one run and its node over the last minutes, by the names of the queries above."""

    run: str = ""  # the key of the run; empty without any
    start_s: float = 0.0
    end_s: float = 0.0
    traces: Mapping[str, Sequence[Series]] = field(default_factory=dict)

    def of_node_only(self) -> Sampled:
        return replace(self, run="", traces={name: t for name, t in self.traces.items() if name not in RUN_QUERIES})

    def points(self, name: str, **labels: str) -> Points:
        """Return the points of the first series with these labels."""
        return next((t.points for t in self.traces.get(name, ()) if labels.items() <= t.labels.items()), ())

    def last(self, name: str) -> float | None:
        return last(self.points(name))

    def phases_s(self) -> dict[str, float]:
        """Return seconds by phase of the last minute's mean step, without empty phases."""
        steps_per_s = sum(self._recent("steps", "").values())
        return {phase: rate / steps_per_s for phase, rate in self._recent("phases", "phase").items() if steps_per_s}

    def gpu_shares(self, gpu: Gpu) -> dict[str, float]:
        """Return a GPU's shares of the last minute by state; empty: not known."""
        return self._recent("gpu states", "state", gpu=gpu.gpu, UUID=gpu.uuid)

    def shm_bytes(self) -> tuple[Points, Points]:
        """Return the bytes used of the fullest /dev/shm (the node's, or a run's own), and its size."""
        sizes = {trace.labels.get("mount"): trace for trace in self.traces.get("shm size ({mount})", ())}
        used = [t for t in self.traces.get("shm used ({mount})", ()) if t.labels.get("mount") in sizes]
        pairs = [(trace, sizes[trace.labels.get("mount")]) for trace in used]
        fullest = max(pairs, key=lambda pair: (pair[0].last or 0.0) / (pair[1].last or 1.0), default=None)
        return (fullest[0].points, fullest[1].points) if fullest else ((), ())

    def shm_ratio(self) -> Points:
        used, size = self.shm_bytes()
        sizes = dict(size)
        return tuple((at, None if v is None or not sizes.get(at) else v / (sizes[at] or 1.0)) for at, v in used)

    def _recent(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the means of the last minute by a label of the series with these labels, without zeros."""
        means = {}
        for trace in self.traces.get(name, ()):
            values = [v for at, v in trace.points if v is not None and at > self.end_s - RECENT_S]
            if labels.items() <= trace.labels.items() and any(values):
                means[trace.labels.get(label, "unknown")] = sum(values) / len(values)
        return means


def last(points: Points) -> float | None:
    """Return the latest value that is not None."""
    return next((value for _, value in reversed(points) if value is not None), None)


@dataclass(frozen=True)
class Facts:
    label: str
    time_s: float
    runs: tuple[Run, ...] = ()
    selected: str | None = None  # the key of the run shown in detail; None without runs
    node: Node = field(default_factory=lambda: Node("", ()))
    series: Sampled = Sampled()

    @property
    def gpus(self) -> Sequence[Gpu]:
        return self.node.gpus or ()


class Reader:
    def __init__(self, source: Source, now: Callable[[], float] = time.time) -> None:
        self._source, self._now = source, now
        self._series, self._with = Sampled(), (False, False)

    def read(self, wanted: str | None = None, panels: bool = False) -> Facts:
        """Return the facts, in detail of `wanted` (a run's key), else of the newest running; raises SourceError.

        With `panels` the series of all panels, too.
        """
        runs = in_order(self._source.runs())
        run = select(runs, next((run for run in runs if key_of(run) == wanted), None), self._series.run)
        node = self._source.node(run)
        if node.gpus:
            node = msgspec.structs.replace(node, gpus=tuple(sorted(node.gpus, key=by_number)))
        now_s, key = self._now(), key_of(run) if run is not None else ""
        fresh = 0 <= now_s - self._series.end_s < SERIES_EVERY_S and key == self._series.run
        needed = (bool(node.gpus), panels)
        if not (fresh and needed == self._with):
            self._series, self._with = self._read_series(run, *needed, now_s), needed
        return Facts(self._source.label, now_s, tuple(runs), key or None, node, self._series)

    def _read_series(self, run: Run | None, gpus: bool, panels: bool, now_s: float) -> Sampled:
        queries = {**NODE_QUERIES, **(RUN_QUERIES if run is not None else {}), **(GPU_QUERIES if gpus else {})}
        queries |= panel_queries() if panels else {}
        scope = Scope(run.run, str(run.rank), run.instance) if run is not None else Scope()
        answers = self._source.evaluate(list(queries.values()), scope, Span(now_s - SPAN_S, now_s, POINTS))
        traces = dict(zip(queries, answers, strict=True))
        return Sampled(key_of(run) if run is not None else "", now_s - SPAN_S, now_s, traces)


def by_number(gpu: Gpu) -> tuple[list[int], str, str]:
    """Return a sort key that puts GPU 2 before GPU 10, and MIG instances after their GPU."""
    return ([int(n) for n in gpu.gpu.split(":") if n.isdigit()] or [sys.maxsize], gpu.gpu, gpu.uuid)
