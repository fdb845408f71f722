"""The agent's JSON API at /api/v1/…: its structs, declared once. Paths and queries: docs/reference/api.md.

The agent encodes these structs as JSON; reports, pages, `top`, `tune` and `doctor` decode them. Times are Unix seconds,
durations seconds, ratios 0–1; None: not measured, or not known to the server. Fields are only ever added, with a
default, so that a reader and an agent may be a version apart.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gpuwatch.diagnosis import finding
from gpuwatch.diagnosis.finding import Conclusion, Verdict
from gpuwatch.diagnosis.rates import Cost, Throughput
from gpuwatch.tools.stacks.records import Stacks
from gpuwatch.wire import Loader

RunStatus = Literal["running", "ended", "lost", "gone"]
"""`ended`: it sent its last message. `lost`: its process or messages vanished. `gone`: either, from Prometheus."""
Points = tuple[tuple[float, float | None], ...]  # (Unix time, value), oldest first. None: a gap.


class Finding(finding.Finding, frozen=True):
    """A finding over time. In a list of several ranks' findings, `rank` is the rank that has the finding."""

    since_s: float | None = None  # When it was first seen.
    seen_s: float | None = None  # When it was last seen; None for an active one.
    stacks: Stacks | None = None  # Stacks of the processes when it began; None: not sampled.
    run: str | None = None  # None: about a GPU without a known run, or in the run's own list.
    name: str | None = None  # The run's display name.


class Recent(Throughput, frozen=True):
    """The last minute of a run."""

    duration_s: float = 0.0
    states: Mapping[str, float] = {}  # Seconds by state.
    step_s_p50: float | None = None
    step_s_p95: float | None = None
    data_wait_s_p50: float | None = None
    steps_per_s: float | None = None
    mfu_estimated_ratio: float | None = None  # MFU estimated from the tensor cores' activity.


class Owner(msgspec.Struct, frozen=True):
    """The job, container and pod of a run's process. None: none, or not visible."""

    job: str | None = None
    step: str | None = None
    container_id: str | None = None
    pod_uid: str | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None


class Run(msgspec.Struct, frozen=True):
    """One training process: a rank of a run."""

    run: str  # Id, shared by all ranks.
    rank: int
    name: str
    status: RunStatus
    started_s: float
    watermark_s: float  # Time up to which `states` are final.
    last_message_s: float
    job: str = ""
    host: str = ""
    pid: int | None = None  # In the process's own pid namespace.
    host_pid: int | None = None  # In the agent's /proc; None: vanished, or not visible.
    user: str = ""
    owner: Owner | None = None
    world_size: int = 1
    timeline: str = ""  # The clock of `states`: host or device.
    device: str = ""
    steps: int = 0
    samples: int | None = None
    tokens: int | None = None
    records_lost: int = 0  # Step records that did not arrive; `states` includes their time.
    activity: str | None = None  # What it does now: step, a phase, silent …; None after its end.
    states: Mapping[str, float] = {}  # Seconds by state over the whole run.
    phases: Mapping[str, float] = {}
    """Seconds of the state `other` in declared phases, by name; after eight names, the others are "rest"."""
    breakdown: Mapping[str, float] = {}  # On request: seconds of compute by section, of the measured steps.
    energy_joules: Mapping[str, float] = {}  # Of its GPUs (its share, if shared), by state; empty: not measured.
    attempts: int = 1  # Number of attempts of its job, including this one.
    goodput_ratio: float | None = None  # Goodput of its job, as in `Job`.
    goodput_is_exact: bool = True  # False: an upper bound, because the global step is not known.
    gpus: tuple[str, ...] = ()  # Models of the GPUs that the rank holds, or held last.
    gpu_share: float = 1.0  # Its share of these GPUs' time; below 1 if other processes used them too.
    cost: Cost | None = None  # Cost of its share of the GPUs; None without a price or a GPU.
    recent: Recent | None = None  # None if there was no step in the last minute.
    verdict: Verdict | None = None
    """The verdict on the last minute; after the end, that of `conclusion`. None until the first steps."""
    findings: tuple[Finding, ...] = ()  # Active findings: each root, followed by its consequences.
    conclusion: Conclusion | None = None
    """About the whole run, as its process printed it; None if it did not arrive or the run had several processes."""
    loader: Loader | None = None
    versions: Mapping[str, str] = {}
    tags: Mapping[str, str] = {}

    @property
    def instance(self) -> str | None:
        """Return Prometheus's label for the node's agent; None from an agent, which knows one node only."""
        return None


class Gpu(msgspec.Struct, frozen=True):
    """The current state of a GPU."""

    gpu: str  # Index.
    uuid: str
    name: str = ""
    state: str | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    run: str | None = None  # The run that holds it, "shared" for several.
    owner: str | None = None  # Its processes and their users, as text.
    energy_joules: Mapping[str, float] = {}  # By state, since the agent first read the counter; empty: no counter.


class Collector(msgspec.Struct, frozen=True):
    name: str
    success: bool | None = None  # None: nothing to measure on this node.
    message: str | None = None  # Why it failed, or why there is nothing to measure.
    duration_s: float | None = None


class HistoryFile(msgspec.Struct, frozen=True):
    path: str | None = None
    bytes: int | None = None
    failures: int = 0  # Failed commits.


class Status(msgspec.Struct, frozen=True):
    """/api/v1/status: the agent itself."""

    host: str
    collectors: tuple[Collector, ...]
    version: str = "?"
    time_s: float | None = None  # The agent's clock.
    sampled_s: float | None = None  # When it last processed the messages, by its clock.
    started_s: float | None = None
    history: HistoryFile = HistoryFile()
    gpus: tuple[Gpu, ...] | None = None
    listen: tuple[str, ...] = ()  # Endpoints that training processes send to.


class Series(msgspec.Struct, frozen=True):
    """A metric's values under one set of labels."""

    labels: Mapping[str, str]
    points: Points

    @property
    def last(self) -> float | None:
        """Return the last known value."""
        return next((value for _, value in reversed(self.points) if value is not None), None)

    @property
    def mean(self) -> float | None:
        values = [value for _, value in self.points if value is not None]
        return sum(values) / len(values) if values else None


class SeriesOf(msgspec.Struct, frozen=True):
    """/api/v1/series: one metric."""

    series: Sequence[Series]
    metric: str = ""
    kind: str = ""
    unit: str = ""


class LastSteps(msgspec.Struct, frozen=True):
    """/api/v1/runs/{run}/steps: single steps as columns of equal length, oldest first."""

    time_s: Sequence[float]  # When each step began.
    data_wait_s: Sequence[float | None]
    transfer_s: Sequence[float | None]
    compute_s: Sequence[float | None]
    """These three on the host's timeline, the next four on the device's; None: not measured."""
    input_wait_s: Sequence[float | None]
    host_wait_s: Sequence[float | None]
    device_transfer_s: Sequence[float | None]
    device_compute_s: Sequence[float | None]
    samples: Sequence[int | None]
    epoch_start: Sequence[int]  # 1 for the first step of a pass over the data.
    run: str = ""
    rank: int = 0
    first_step: int = 0


class Spread(msgspec.Struct, frozen=True):
    """One column of bucketed steps: mean, min and max of each bucket in seconds; None: not measured."""

    mean: Sequence[float | None]
    min: Sequence[float | None]
    max: Sequence[float | None]


class Epoch(msgspec.Struct, frozen=True):
    step: int
    time_s: float


class Steps(msgspec.Struct, frozen=True):
    """The same with `points`: all steps in buckets of `bucket_steps`, as columns of equal length, oldest first."""

    run: str = ""
    rank: int = 0
    steps: int = 0
    bucket_steps: int = 1
    epochs: Sequence[Epoch] = ()
    step_s: Mapping[str, float] | None = None  # p5, p50, p95, p99 of step time on the host; None without steps.
    step: Sequence[int] = ()  # Index of each bucket's first step.
    time_s: Sequence[float] = ()  # When this step began.
    end_s: Sequence[float] = ()  # When the bucket's last step ended.
    count: Sequence[int] = ()
    samples: Sequence[int | None] = ()
    bucket_s: Mapping[str, Sequence[float | None]] = {}
    """p5, p50, p95 of step time on the host in each bucket; None for downsampled steps, of which only sums are kept."""
    columns: Mapping[str, Spread | None] = {}  # By name, as in LastSteps; None: never measured.


class Runs(msgspec.Struct, frozen=True):
    """/api/v1/runs."""

    runs: Sequence[Run]


class Findings(msgspec.Struct, frozen=True):
    """/api/v1/findings, and /api/v1/runs/{run}/findings with `run`."""

    findings: Sequence[Finding]
    run: str | None = None


class Answers(msgspec.Struct, frozen=True):
    """/api/v1/series/many."""

    answers: Sequence[SeriesOf]


class Job(msgspec.Struct, frozen=True):
    """A training over all its attempts on this node, by its lowest rank here."""

    job: str  # The scheduler's job id, GPUWATCH_JOB, or the id of a run that was resumed.
    status: RunStatus  # Status of the last attempt.
    started_s: float
    last_message_s: float
    attempts: int
    interruptions: int
    """Attempts that were killed, ended by an exception, or whose last steps the next attempt did not resume from."""
    states: Mapping[str, float]
    """Seconds by state, which sum to the time from the start of the first attempt to the last message: a run's states,
    and `down` (no attempt was alive), `restart` (a later attempt up to its first step), `redone` (steps that an earlier
    attempt had done) and `lost` (steps that the last attempt did not resume from and has not repeated yet)."""
    goodput_ratio: float | None
    """Share of that time spent on new steps; an upper bound if `redone_steps` is None."""
    steps: int
    redone_steps: int | None  # None: the global step is not known.
    lost_steps: int | None  # None as above.
    numbers: tuple[int, int] | None  # Global numbers of its first step, and of its last step + 1. None as above.
    restart: Mapping[str, float]
    """Parts of the state `restart`, in seconds: imports, rendezvous, checkpoint_load, startup, compile."""
    lost: Mapping[str, float]  # The time in `lost`, by the state in which it was spent.
    findings: tuple[finding.Finding, ...]  # About the job as a whole, such as the interval between saves.
    runs: tuple[str, ...]  # Its runs; that of the last attempt is last.


class Jobs(msgspec.Struct, frozen=True):
    """/api/v1/jobs."""

    jobs: Sequence[Job]


class GpuSeconds(msgspec.Struct, frozen=True):
    gpu: str
    uuid: str = msgspec.field(name="UUID")
    states: Mapping[str, float]
    seconds: float  # The sum of `states`, the divisor of shares.
    energy_joules: Mapping[str, float] = {}  # By state; empty: not measured.


class RunSeconds(msgspec.Struct, frozen=True):
    run: str
    rank: str
    states: Mapping[str, float]
    seconds: float


class LedgerOf(msgspec.Struct, frozen=True):
    """/api/v1/ledger: seconds by state of each GPU and run over a stretch of time."""

    start_s: float
    end_s: float
    gpus: Sequence[GpuSeconds]
    runs: Sequence[RunSeconds]
