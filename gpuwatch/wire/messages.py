"""The messages between the hook and the agent, as msgspec structs. No I/O, no clock.

Every message carries who sent it and the sender's cumulative totals, because PUSH/PULL loses what a killed receiver had
queued: the agent books differences of totals, so that any later message explains the time that a lost one described.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PROTOCOL_VERSION = 1

STEP_BUCKETS_S = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
"""Upper bounds of the step time histogram, in seconds; +Inf is the eighth bucket."""


class Totals(msgspec.Struct, frozen=True):
    """What the sender has booked since it started, all cumulative. Times in ns of the sender's monotonic clock."""

    start_ns: int
    watermark_ns: int
    states_ns: dict[str, int]
    phases_ns: dict[str, int]
    """Host timeline: data_wait, transfer, compute of training steps."""
    steps: int
    samples: int
    """-1 while no batch told its size."""
    step_histogram: list[int]
    """Steps per bucket of STEP_BUCKETS_S (not cumulative over buckets), +Inf last."""
    records_dropped: int
    """Step records that the hook itself let go because no agent took them."""
    overhead_ns: int
    """What the hook cost the training process so far: CPU time of its background thread, and what it metered in the training thread."""
    hidden_ns: int = 0
    """Data wait that was hidden behind the device's work, in the `device_steps`."""
    device_steps: int = 0
    """Training steps that the device's timeline measured."""
    tokens: int = -1
    """-1 while nobody counted any."""
    comm_steps: int = 0
    """Training steps whose wait for other ranks was measured."""
    drained_steps: int = 0
    """Of the `device_steps` those at whose end the device had nothing left to do."""
    kept_up_steps: int = 0
    """Of the `device_steps` those in which the device ran each kernel as it was launched: it had no work queued."""
    read_back_steps: int = 0
    """Of the `device_steps` those in which a result was read back from the device, for which the host waits."""
    unverified_steps: int = 0
    """Training steps in which work on another device or stream was seen, so that their input wait is not certain."""
    fetches_sampled: int = 0
    """Fetches whose CPU time was looked at."""
    worker_fetches: int = 0
    """Batches asked for from a loader with workers."""
    ready_batches: int = 0
    """Batches that were ready at these, summed."""
    empty_fetches: int = 0
    """Those of `worker_fetches` at which no batch was ready."""


class Origin(msgspec.Struct, frozen=True):
    """Who sends, and when by its clocks."""

    version: int
    sender: str
    seq: int
    boot_id: str
    monotonic_ns: int
    time_ns: int


class LoaderSettings(msgspec.Struct, frozen=True):
    """Settings of the loader that feeds the training steps. None: not known."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    batch_bytes: int | None = None
    batches: int | None = None
    """Batches an epoch, `len(loader)`."""


class Loader(LoaderSettings, frozen=True):
    """The same with its processes."""

    worker_pids: tuple[int, ...] = ()

    def settings(self) -> LoaderSettings:
        return LoaderSettings(*(getattr(self, name) for name in LoaderSettings.__struct_fields__))


class WorkerDeath(msgspec.Struct, frozen=True):
    """A loader worker that a signal has killed."""

    pid: int
    signal: int
    out_of_memory: bool | None = None
    """Of SIGKILL: whether the kernel has killed for lack of memory meanwhile. None: not known."""
    oom_kills: int | None = None
    """Of SIGKILL: how many it has killed for that, in the run's control group where it tells, else on the node. None: not known."""
    memory_limit_bytes: int | None = None
    """What the control group may have, where it has killed. None: it has no limit of its own, or that is not known."""
    shm_size_bytes: int | None = None
    """Of SIGBUS: the size of the run's own /dev/shm, which nobody can ask after the run any more. None: not known."""
    shm_free_bytes: int | None = None
    """What was free in it right after."""


class Flops(msgspec.Struct, frozen=True):
    """Floating-point operations as the user declares them, of one rank. None: not declared."""

    per_step: float | None = None
    per_sample: float | None = None
    per_token: float | None = None
    peak: float | None = None
    """What the rank's device can do in a second, at the precision that is trained in."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who the run is. Repeated every second, so that a late or restarted agent learns it."""

    origin: Origin
    run: str
    name: str
    job: str
    rank: int
    local_rank: int
    world_size: int
    pid: int
    process_start_ticks: int
    pid_namespace: int
    host: str
    timeline: str
    """"host" or "device": which clock the states come from."""
    device: str
    """"cpu", "cuda" …, "jax:cuda" …, "tensorflow": what the training works on, as far as known; see `gpuwatch.diagnosis.window.Window.device`."""
    loader: Loader | None
    versions: dict[str, str]
    tags: dict[str, str]
    device_uuids: tuple[str, ...] = ()
    flops: Flops | None = None
    worker_deaths: tuple[WorkerDeath, ...] = ()


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Step records since the last message, possibly none: then it is a heartbeat."""

    origin: Origin
    run: str
    rank: int
    totals: Totals
    activity: str
    """What the training thread does now: "startup", "data_wait", "step", "between_steps", or the declared phase."""
    first_step: int
    """Index of the first record, counted from 0 over the sender's life."""
    columns: dict[str, bytes]
    fetch_cpu_ratio: float | None = None
    """Share of the fetches since the last message in which the training thread was on a CPU or in the queue for one;
    None: not sampled."""


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """A declared phase began (`seconds` None) or ended."""

    origin: Origin
    run: str
    rank: int
    totals: Totals
    name: str
    start_ns: int
    seconds: float | None
    time_to_live_s: float


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The run ends here; its totals are complete."""

    origin: Origin
    run: str
    rank: int
    totals: Totals
    reason: str


Message: TypeAlias = Hello | Steps | Phase | Bye
