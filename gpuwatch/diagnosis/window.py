"""What a diagnosis sees: facts about a run and its node over a stretch of time. No I/O, no clock.

Every field that was not measured is None (or absent from its mapping); it is never 0 instead. Times in seconds, ratios
0–1, sizes in bytes. A `Window` is made by the hook for its own verdict and by the agent for every run on the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import msgspec

from gpuwatch.diagnosis.input_wait import InputWait, steady_input_wait
from gpuwatch.ledger.states import INPUT_WAIT, shares
from gpuwatch.wire import Loader, WorkerDeath

ASYNCHRONOUS = {"jax": "JAX", "tensorflow": "TensorFlow"}
"""Frameworks that return from a computation before the device has run it, by the first word of `Window.device`."""


class StepColumns(msgspec.Struct, frozen=True):
    """Training steps, oldest first; all columns of the same length [n_steps].

    By the device's timeline where it measured them: then `data_wait_s` is what the device felt of the wait, and `compute_s` is the
    device's own, with what it waited for the host.
    """

    data_wait_s: tuple[float, ...] = ()
    transfer_s: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()
    epoch_start: tuple[bool, ...] = ()
    """True for the first batch of an iterator."""
    hidden_wait_s: tuple[float, ...] = ()
    """The part of the wait that was hidden behind the device's work; empty where only the host's clock measured."""

    def __len__(self) -> int:
        return len(self.data_wait_s)


class HostFacts(msgspec.Struct, frozen=True):
    """The node, as means over the window. None: not measured."""

    cpu_cores: int | None = None
    """Cores that the training process may use (affinity, cgroup quota)."""
    cpu_busy_ratio: float | None = None
    """Busy share of all of the node's cores."""
    cpu_pressure_ratio: float | None = None
    """Share of time in which some task waited for a CPU (PSI some)."""
    cpu_quota_cores: float | None = None
    """What the training's control group may use in all; None: no quota."""
    cpu_throttled_ratio: float | None = None
    """Share of the quota's periods (100 ms) in which it was used up and held the training back."""
    io_pressure_ratio: float | None = None
    """Share of time in which some task waited for I/O (PSI some)."""
    disk_busy_ratio: float | None = None
    """Share of time in which the busiest disk had work."""
    disk_read_bytes_per_s: float | None = None
    """Of all disks."""
    network_receive_bytes_per_s: float | None = None
    """As the training process's network namespace sees it, the loopback included."""
    memory_available_bytes: int | None = None
    shm_size_bytes: int | None = None
    """/dev/shm as the training process sees it."""
    shm_used_bytes: int | None = None


class MemoryTrend(msgspec.Struct, frozen=True):
    """A GPU's used memory over a longer time than the window, looked at once a minute."""

    span_s: float
    rises: int
    falls: int
    growth_bytes: int
    total_bytes: int


class GpuFacts(msgspec.Struct, frozen=True):
    """One GPU, as means over the window. None: not supported or not measured."""

    gpu: str
    uuid: str
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    process_count: int | None = None
    idle_s: float | None = None
    """For how long a process has held the GPU with no work on it and no training step; None: it is not idle."""
    owner: str | None = None
    """User and process, for people: "alice, pid 4711 (python)"."""
    throttled: Mapping[str, float] | None = None
    """Share of time in which its clocks were held down, by reason: power, thermal, hardware."""
    power_watts: float | None = None
    power_usual_watts: float | None = None
    """What it drew while this run made steps."""
    memory_trend: MemoryTrend | None = None


class RankFacts(msgspec.Struct, frozen=True):
    """One rank of a distributed run: means over the same stretch of time for all ranks, in seconds a step."""

    rank: int
    steps: int
    data_wait_s: float
    transfer_s: float
    compute_s: float
    """With what the rank waited for the others."""
    comm_wait_s: float | None = None
    """That wait alone; None: not measured."""

    @property
    def step_s(self) -> float:
        return self.data_wait_s + self.transfer_s + self.compute_s


class MemoryKills(msgspec.Struct, frozen=True):
    """The kernel's kills for lack of memory between the last sign of life of a run and its loss."""

    where: Literal["group", "around", "node"]
    """Whose count it is: of the run's own control group, of one that it is in (with all groups within that), of the whole node."""
    kills: int
    limit_bytes: int | None = None
    """What the control group that left the run the least might have. None: it had no limit, or none that was seen; so for all below."""
    used_bytes: int | None = None
    """Most that was seen used of it in that time, pages of files included."""
    peak_bytes: int | None = None
    """Most that it ever used, by the kernel."""
    resident_bytes: int | None = None
    """Most that the training process itself was seen to have in that time."""


class Window(msgspec.Struct, frozen=True, dict=True):
    """Everything a rule may look at."""

    duration_s: float
    states_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Seconds by state over the window: their sum is the time it explains."""
    timeline: str = "host"
    """"host": the states come from the host's clock; "device": from timing events on the device."""
    coverage: float = 0.0
    """Share of the steps that the device's own timeline measured."""
    unverified_ratio: float = 0.0
    """Share of the steps in which work on another device or stream was seen, so that their input wait is not certain."""
    device: str = "cpu"
    """"cpu", "cuda" … of torch; "jax:cuda", "jax:cpu" …; "tensorflow", where its device is not the CPU alone."""
    steps: StepColumns = StepColumns()
    drained_ratio: float | None = None
    """Share of steps at whose end the device had nothing left to do; None where its timeline measured none."""
    kept_up_ratio: float | None = None
    """Share of steps in which the device ran each kernel as it was launched, with no work queued; None as for `drained_ratio`."""
    first_step_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Seconds by state of the run's first step where that is out of proportion: no share counts it. Empty where it is not."""
    read_back_ratio: float | None = None
    """Share of steps in which a result was read back from the device (`.item()`, `.cpu()`), for which the host waits."""
    fetch_cpu_ratio: float | None = None
    """Share of a fetch in which the training thread was on a CPU or in the queue for one."""
    ready_batches: float | None = None
    """Batches that the workers had ready when one was asked for, on average; None without workers."""
    empty_fetch_ratio: float | None = None
    """Share of the fetches at which they had none."""
    loader: Loader | None = None
    worker_cpu_ratios: tuple[float, ...] | None = None
    """CPU use of each loader worker, 1.0 = one core busy."""
    worker_busy_ratios: tuple[float, ...] | None = None
    """Share of time in which each loader worker was on a CPU or in the queue for one: on a full node, more than its CPU use."""
    worker_waits: Mapping[str, float] | None = None
    """Share of the looks at the workers in which they were found at each of `gpuwatch.host.blocked.WAITS`: their sum is 1."""
    worker_private_bytes: int | None = None
    """Memory that a loader worker has of its own, what it shares with the training process left out."""
    host: HostFacts | None = None
    gpus: tuple[GpuFacts, ...] = ()
    local_world_size: int = 1
    """Ranks of the run on this node."""
    rank: int = 0
    world_size: int = 1
    ranks: tuple[RankFacts, ...] = ()
    """The run's ranks on this node that train now, this one included; empty where there is none to compare with."""
    worker_deaths: tuple[WorkerDeath, ...] = ()
    """Loader workers that a signal has killed, in the whole run."""
    oom: MemoryKills | None = None
    """Only of a run that is lost, and only where the kernel has killed meanwhile."""
    activity: str | None = None
    stalled_s: float | None = None
    """For how long the run has been without a step, when it is stalled now."""

    def share(self, *states: str) -> float:
        """Return the share of the window's booked time that these states took together, 0–1; without an odd first step."""
        return sum(self._shares.get(state, 0.0) for state in states)

    @property
    def waits_hidden_in(self) -> str | None:
        """The framework whose queue may hide any part of the waits, as only the host's clock measured them; None where they are known.

        Of torch on a device that is not measured the waits count as felt, with a word of warning.
        """
        return None if self.timeline == "device" else ASYNCHRONOUS.get(self.device.partition(":")[0])

    @cached_property
    def input_wait(self) -> InputWait | None:
        """What the wait for input costs, worked out once for all rules; None when it is not worth a change, or not known."""
        steps = self.steps
        if self.waits_hidden_in is not None:
            return None
        rests = [copy + compute for copy, compute in zip(steps.transfer_s, steps.compute_s, strict=True)]
        share = self.share(INPUT_WAIT)
        return steady_input_wait(share, steps.data_wait_s, rests, steps.epoch_start, steps.hidden_wait_s)

    @cached_property
    def _shares(self) -> Mapping[str, float]:
        first = self.first_step_s
        return shares({state: max(0.0, spent - first.get(state, 0.0)) for state, spent in self.states_s.items()})
