"""What the pages show, as plain values: the same whether an agent or Prometheus says it.

Field names are those of the agent's JSON (docs/api.md), which is decoded straight into these. All times are Unix
seconds, durations seconds, ratios 0–1; None: not measured, or this source cannot say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpuwatch.costs import Cost
from gpuwatch.stacks.records import Stacks

Status = Literal["running", "ended", "lost", "gone"]
"""`gone`: no longer seen, and the source cannot tell whether it ended or was lost."""


@dataclass(frozen=True)
class Verdict:
    state: str
    """What decides: input, transfer, compute, eval, checkpoint, startup, host, stalled, other or unknown."""
    sentence: str
    ratio: float | None = None


@dataclass(frozen=True)
class Evidence:
    text: str


@dataclass(frozen=True)
class Finding:
    cause: str
    severity: Literal["info", "warning", "critical"]
    title: str
    ratio: float | None = None
    evidence: tuple[Evidence, ...] = ()
    advice: str = ""
    predicted_speedup: float | None = None
    """Upper bound of the gain in throughput, 1.0 = none."""
    since_s: float | None = None
    gpu: str | None = None
    stacks: Stacks | None = None
    """Where the code was when it began; None: no stacks were read."""
    predicted_range: tuple[float, float] | None = None
    """Lowest and highest gain to expect; None: only the upper bound is known."""
    root: str | None = None
    """The cause that this one is a consequence of; None: it stands for itself."""
    rank: int | None = None
    """The rank that is the cause, for a straggler."""


@dataclass(frozen=True)
class Recent:
    """The last minute of a run."""

    duration_s: float = 0.0
    states: Mapping[str, float] = field(default_factory=dict)
    step_s_p50: float | None = None
    step_s_p95: float | None = None
    data_wait_s_p50: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu_ratio: float | None = None
    """Model FLOPs utilisation, where the user declared a step's operations and the device's peak."""


@dataclass(frozen=True)
class Loader:
    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None
    pin_memory: bool | None = None


@dataclass(frozen=True)
class Run:
    """One training process: a rank of a run."""

    run: str
    rank: int
    name: str
    status: Status
    started_s: float
    watermark_s: float
    last_message_s: float
    host: str = ""
    user: str = ""
    device: str = ""
    timeline: str = ""
    world_size: int = 1
    steps: int = 0
    samples: int | None = None
    records_lost: int = 0
    activity: str | None = None
    states: Mapping[str, float] = field(default_factory=dict)
    recent: Recent | None = None
    verdict: Verdict | None = None
    findings: tuple[Finding, ...] = ()
    loader: Loader | None = None
    cost: Cost | None = None
    """Of the rank's GPUs, where the agent has a price."""
    instance: str | None = None
    """Prometheus's name of the node's agent; None with an agent as source, which knows one node only."""


@dataclass(frozen=True)
class Collector:
    name: str
    success: bool | None = None
    message: str | None = None


@dataclass(frozen=True)
class Gpu:
    gpu: str
    uuid: str
    name: str = ""
    state: str | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    run: str | None = None
    owner: str | None = None
    """Who holds it, for people."""


@dataclass(frozen=True)
class Node:
    """The node that a run is on."""

    host: str
    collectors: tuple[Collector, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    """None: not known. Empty: the node has none."""
    history_failures: int = 0
    findings: tuple[Finding, ...] = ()
    """Findings about GPUs that no run explains."""
    instance: str | None = None
    """Prometheus's name of its agent; None with an agent as source."""


@dataclass(frozen=True)
class Growth:
    """By how much a counter grew over a stretch of time."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Spread:
    """One column of condensed steps: mean, least and greatest of each bucket, in seconds; None: not measured."""

    mean: tuple[float | None, ...]
    min: tuple[float | None, ...]
    max: tuple[float | None, ...]


@dataclass(frozen=True)
class Epoch:
    step: int
    time_s: float


@dataclass(frozen=True)
class Steps:
    """A run's steps, condensed to buckets of `bucket_steps` each, oldest first."""

    steps: int = 0
    bucket_steps: int = 1
    epochs: tuple[Epoch, ...] = ()
    step_s: Mapping[str, float] | None = None
    """Percentiles of the step time: p5, p50, p95, p99."""
    step: tuple[int, ...] = ()
    """Number of a bucket's first step."""
    time_s: tuple[float, ...] = ()
    end_s: tuple[float, ...] = ()
    count: tuple[int, ...] = ()
    columns: Mapping[str, Spread | None] = field(default_factory=dict)
    """By name: data_wait_s, transfer_s, compute_s of the host; input_wait_s, host_wait_s, device_transfer_s and
    device_compute_s of the device, None where nothing was measured."""

    def column(self, name: str) -> Spread | None:
        return self.columns.get(name)


@dataclass(frozen=True)
class PastFinding(Finding):
    """A finding that is or was active."""

    rank: int = 0
    seen_s: float = 0.0
    """Its last sign."""


@dataclass(frozen=True)
class Scope:
    """Whose numbers a query is about. Metrics of a node or a GPU ignore the run, those of a run ignore the node."""

    run: str | None = None
    rank: str | None = None
    instance: str | None = None
    gpu: str | None = None
    """Index of one GPU; None: all of them."""


@dataclass(frozen=True)
class Span:
    start_s: float
    end_s: float
    points: int = 300
    """At most so many points a series."""


Points = tuple[tuple[float, float | None], ...]
"""(Unix time, value), oldest first. A None is a gap: the line is interrupted there."""


@dataclass(frozen=True)
class Trace:
    """One line of a panel."""

    labels: Mapping[str, str]
    points: Points

    @property
    def last(self) -> float | None:
        """Return the last value that is known."""
        return next((value for _, value in reversed(self.points) if value is not None), None)

    @property
    def mean(self) -> float | None:
        values = [value for _, value in self.points if value is not None]
        return sum(values) / len(values) if values else None
