"""What the screen shows at one moment, as plain values. Times are Unix seconds, ratios 0–1; None was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuwatch.api import Collector, Finding, Points, Run, Series
from gpuwatch_dashboards.terminal.gpu_curves import GpuCurves


@dataclass(frozen=True)
class GpuFacts:
    gpu: str
    uuid: str
    name: str | None = None
    state: str | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    owner: str | None = None
    run: str | None = None
    states: Mapping[str, float] = field(default_factory=dict)
    """Share of the last minute by state; empty where it is not known."""


@dataclass(frozen=True)
class Strands:
    """Of the selected run and its node, what was sampled over the last minutes."""

    key: str = ""
    """Whose: the key of a run; empty without any."""
    start_s: float = 0.0
    end_s: float = 0.0
    ledger: tuple[Series, ...] = ()
    """Share of time by state."""
    step_s: Points = ()
    input_ratio: Points = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Of the mean step of the last minute: seconds by phase."""
    cpu_ratio: Points = ()
    shm_ratio: Points = ()
    worker_ratio: Points = ()
    cpu_iowait_ratio: float | None = None
    pressure: Mapping[str, float] = field(default_factory=dict)
    """By resource (the panel's legends)."""
    shm_used_bytes: float | None = None
    shm_size_bytes: float | None = None
    memory_available_bytes: float | None = None
    memory_total_bytes: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes a second by the legends of the panels network and disk: received, sent, read, written."""


@dataclass(frozen=True)
class Facts:
    label: str
    """The source, for people: "agent at http://127.0.0.1:9478"."""
    time_s: float
    host: str = ""
    runs: tuple[Run, ...] = ()
    selected: str | None = None
    """The key of the run in detail; None without runs."""
    strands: Strands = Strands()
    gpus: tuple[GpuFacts, ...] = ()
    gpus_known: bool = True
    gpu_curves: GpuCurves = field(default_factory=GpuCurves)
    gpu_findings: tuple[Finding, ...] = ()
    """Findings about GPUs that no run explains."""
    collectors: tuple[Collector, ...] = ()
    history_failures: int = 0
