"""What a diagnosis reads: facts about a run and its node over a stretch of time. No I/O, no clock.

What was not measured is None (or absent from its mapping), never 0. Times in seconds, ratios 0–1, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from gpuwatch.host.frames import Place
from gpuwatch.ledger.states import EVAL, INPUT_WAIT, OTHER, PAUSE, STARTUP, shares
from gpuwatch.wire import Flops, Loader, Standstill, WorkerDeath

if TYPE_CHECKING:
    from gpuwatch.diagnosis.finding import RankSummary

ASYNCHRONOUS = {"jax": "JAX", "tensorflow": "TensorFlow"}
"""Frameworks that return from a computation before the device has run it, by the first word of `Window.device`."""


T = TypeVar("T")


class StepColumns(msgspec.Struct, frozen=True):
    """Training steps, oldest first; all columns of the same length [n_steps].

    On the device timeline where it was measured: `data_wait_s` is then the part of the wait in which the device idled,
    and `compute_s` includes what the device waited for the host.
    """

    data_wait_s: Sequence[float] = ()
    transfer_s: Sequence[float] = ()
    compute_s: Sequence[float] = ()
    epoch_start: Sequence[bool] = ()  # True for the first batch of an iterator
    hidden_wait_s: Sequence[float] = ()  # part of the wait hidden by the device's work; empty or 0 by the host clock

    def __len__(self) -> int:
        return len(self.data_wait_s)

    @property
    def step_s(self) -> list[float]:
        """Return how long each step took, with the wait for its batch."""
        return [*map(sum, zip(self.data_wait_s, self.transfer_s, self.compute_s, strict=True))]

    @property
    def mean_pass_s(self) -> float | None:
        """Return the mean time of a pass; None with fewer than two first batches."""
        firsts = sum(self.epoch_start)
        return sum(self.step_s) / firsts if firsts > 1 else None

    def mean(self, part: slice = slice(None)) -> MeanStep:
        """Return the mean of these steps but first batches, whose wait is the start of the pass."""
        count = len(self.data_wait_s[part]) - sum(self.epoch_start[part])
        columns = (self.data_wait_s, self.transfer_s, self.compute_s, self.hidden_wait_s)
        return MeanStep(count, *(sum(self.later(column, part)) / max(1, count) for column in columns))

    def later(self, column: Sequence[T], part: slice = slice(None)) -> Sequence[T]:
        """Return the values of these steps but first batches in a column."""
        firsts = self.epoch_start[part]
        return [*compress(column[part], map(not_, firsts))] if any(firsts) else column[part]


class MeanStep(NamedTuple):
    """The mean of all steps except first batches, in seconds."""

    steps: int
    wait_s: float
    copy_s: float
    compute_s: float  # with the wait for other ranks
    hidden_s: float = 0.0  # wait that cost nothing, because the device was at work

    @property
    def rest_s(self) -> float:
        """Transfer and compute: the step without any wait."""
        return self.copy_s + self.compute_s

    @property
    def whole_s(self) -> float:
        return self.wait_s + self.rest_s


class HostFacts(msgspec.Struct, frozen=True):
    """The node, as means over the window. None: not measured."""

    cpu_cores: int | None = None  # cores that the training process may use (affinity, cgroup quota)
    cpu_busy_ratio: float | None = None
    cpu_pressure_ratio: float | None = None  # share of time in which some task waited for a CPU (PSI some)
    cpu_quota_cores: float | None = None  # CPU quota of the training's control group; None: no quota
    cpu_throttled_ratio: float | None = None  # share of the quota's periods (100 ms) in which it was used up
    io_pressure_ratio: float | None = None  # share of time in which some task waited for I/O (PSI some)
    disk_busy_ratio: float | None = None  # share of time in which the busiest disk had I/O in progress
    disk_read_bytes_per_s: float | None = None
    network_receive_bytes_per_s: float | None = None  # in the training's network namespace, with the loopback
    memory_available_bytes: int | None = None  # to the training: the node's, within its control group's limit
    shm_size_bytes: int | None = None  # /dev/shm as the training process sees it
    shm_used_bytes: int | None = None


class MemoryTrend(msgspec.Struct, frozen=True):
    """A GPU's used memory over a longer time than the window, sampled once a minute."""

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
    idle_s: float | None = None  # how long a process has held it with no work and no training step; None: not idle
    owner: str | None = None  # user and process, for people: "alice, pid 4711 (python)"
    throttled: Mapping[str, float] | None = None  # share of time throttled, by reason: power, thermal, hardware
    power_watts: float | None = None
    power_usual_watts: float | None = None
    memory_trend: MemoryTrend | None = None
    mfu_ratio: float | None = None  # by the tensor cores' activity and their clock while the run made steps
    peak_flops: float | None = None  # dense, in 16-bit formats
    minute_ratio: float | None = None  # its utilisation over the run's states; None: `utilization_ratio` is


class RankFacts(msgspec.Struct, frozen=True):
    """One rank of a distributed run, over the same stretch of time for all ranks."""

    rank: int
    step: MeanStep
    comm_wait_s: float | None = None  # the part of its compute that waits for other ranks; None: not measured
    standstill: Standstill | None = None  # None: it makes progress
    cores: frozenset[int] = frozenset()  # that it may run on; empty: not known
    group: str = ""  # control group that limits its CPU, and memory too; empty: none, the node's are all ranks'


class MemoryKills(msgspec.Struct, frozen=True):
    """The kernel's out-of-memory kills between the last message of a run and its loss. None: no limit, or not seen."""

    where: Literal["group", "around", "node"]  # whose counter rose: the run's own group's, a parent's, the node's
    kills: int
    limit_bytes: int | None = None  # limit of the control group that left the run the least
    used_bytes: int | None = None  # highest use of that group seen in that time, page cache included
    peak_bytes: int | None = None  # highest use ever, by the kernel's count
    resident_bytes: int | None = None  # highest resident memory of the training process itself seen in that time


class JobFacts(msgspec.Struct, frozen=True):
    """What a job's attempts have shown of interruptions and checkpoints, in all its time."""

    interruptions: int
    alive_s: float  # time in which an attempt was alive
    trained_s: float  # the part of it after each attempt's begin, without checkpoints
    saves: int
    save_s: float
    restart_s: float  # to come back after an interruption, with the time in which no attempt was alive
    repeated_s: float | None  # steps that were redone or are lost; None: not known
    attempts: int = 1
    steps: int = 0
    goodput_ratio: float | None = None

    @property
    def interval_s(self) -> float:
        """Return the mean time between two saves: an interruption comes in the middle of one, on average."""
        return self.trained_s / (self.saves + self.interruptions / 2)


class Window(msgspec.Struct, frozen=True, dict=True):
    """All facts that a rule can read."""

    duration_s: float
    states_s: Mapping[str, float] = {}  # seconds by state; their sum is the time that the window explains
    declared_s: Mapping[str, float] = {}  # by name, of declared phases that are no states themselves: a part of `other`
    is_short: bool = False  # the run has too few steps for a prediction, by `short_run_s` and `short_run_steps`
    timeline: str = "host"  # where the states come from: "host", its clock, or "device", timing events there
    coverage: float = 0.0  # share of the steps that the device timeline measured
    unverified_ratio: float = 0.0  # share of steps with work on another device or stream: input wait not certain
    device: str = "cpu"
    """"cpu", "cuda" … of torch; "jax:cuda", "jax:cpu" …; "tensorflow", where its device is not the CPU alone."""
    steps: StepColumns = StepColumns()
    drained_ratio: float | None = None  # share of steps that ended with an idle device; None: not measured
    kept_up_ratio: float | None = None  # share of steps in which each kernel ran as soon as launched; None as above
    first_step_s: Mapping[str, float] = {}  # by state, of a first step that took out of proportion: no share counts it
    end_s: float = 0.0  # the wait at the end of a run's only pass, in no step: no share counts it either
    read_back_ratio: float | None = None  # share of steps in which the host waited for a result (`.item()`, `.cpu()`)
    fetch_cpu_ratio: float | None = None  # share of a fetch with the training thread on a CPU or in the run queue
    ready_batches: float | None = None  # mean number of batches ready when one was requested; None without workers
    empty_fetch_ratio: float | None = None  # share of the fetches at which none was ready
    out_of_order_ratio: float | None = None  # share of those fetches at which others had later batches ready
    loader: Loader = Loader()
    bounded_by_optimizer: bool = False
    """Steps last from one optimizer step to the next, as no loader is watched: waits end at the next forward pass."""
    untrained_s: Mapping[str, float] = {}  # by state, of passes before any optimizer step: no share counts them
    first_place: Place | None = None  # where the training thread was while the first batch was waited for
    fetch_place: Place | None = None  # the user's code in which the training thread most often waited for a batch
    around_place: Place | None = None  # the same without what the loader's own fetch calls, such as its dataset
    step_place: Place | None = None  # the same for the rest of the step
    python_place: Place | None = None  # the same for Python code in it that is not torch's; the ratio is of the step
    eval_wait_ratio: float | None = None  # share of evaluation that waits for data; None: its loader is not watched
    gaps_s: float = 0.0
    """From a forward pass without gradients to the next pass, without a watched loader: e.g. an environment's time."""
    gap_place: Place | None = None  # where most of that was spent, in the user's own code
    between_place: Place | None = None  # the same for the time outside of steps and phases
    step_idle_ratio: float | None = None  # share of compute, at least, in which no thread of the process had work
    process_cores: float | None = None
    """CPU time of the training process's threads, with its own fetches and the run queue, as a multiple of compute."""
    worker_cpu_ratios: tuple[float, ...] | None = None  # CPU use of each loader worker, 1.0 = one core busy
    worker_busy_ratios: tuple[float, ...] | None = None  # the same with time in the run queue: more on a full node
    worker_waits: Mapping[str, float] | None = None  # share of samples blocked on each of `host.blocked.WAITS`; sum 1
    worker_place: Place | None = None  # the user's code that the workers' fetches are most often in
    worker_private_bytes: int | None = None  # memory of one loader worker that it shares with no other process
    host: HostFacts = HostFacts()
    gpus: tuple[GpuFacts, ...] = ()
    flops: Flops | None = None  # as declared
    mfu_ratio: float | None = None  # by what is declared
    local_world_size: int = 1
    rank: int = 0
    world_size: int = 1
    ranks: tuple[RankFacts, ...] = ()
    """The run's ranks that train now, with this one: those on this node, or all rank 0 knows of. Empty for one rank."""
    summaries: Mapping[int, RankSummary] = {}  # on rank 0, by rank: what the others report, without an agent
    worker_deaths: tuple[WorkerDeath, ...] = ()  # loader workers killed by a signal, in the whole run
    oom: MemoryKills | None = None  # of a lost run, if the kernel has killed for lack of memory since its last message
    job: JobFacts | None = None  # None: the run belongs to no job, or that has one attempt
    activity: str | None = None
    stalled_s: float | None = None  # time since the last step, if the run is stalled now
    standstill: Standstill | None = None  # where it is, if it makes no progress
    may_wait_for_phase: bool = False  # a rank of the run is in a declared phase, an evaluation or a checkpoint

    def share(self, *states: str) -> float:
        """Return these states' share of the time, 0–1, without an atypical first step or start-up that steps follow."""
        return sum(self._shares.get(state, 0.0) for state in states)

    @cached_property
    def declared(self) -> Mapping[str, float]:
        """Share of the time, 0–1, by declared phase in `declared_s`, largest first; together no more than `other`."""
        spent_s = {name: seconds for name, seconds in self.declared_s.items() if name != PAUSE}
        other, found, whole = self.share(OTHER), shares(spent_s), sum(self._counted_s.values())
        part = min(other, sum(spent_s.values()) / whole) if whole > 0 else 0.0
        return {name: share * part for name, share in found.items()}

    @property
    def may_roll_out(self) -> bool:
        """Whether evaluation may be a rollout: several passes without gradients in a row, and no watched loader."""
        return self.bounded_by_optimizer and self.gaps_s > 0

    @property
    def evaluation(self) -> str:
        return "evaluation, or a rollout," if self.may_roll_out else "evaluation"

    @property
    def gap_share(self) -> float:
        """Return the share of the window's time in gaps, 0–1, a part of what counts as evaluation."""
        evaluated_s = self.states_s.get(EVAL, 0.0)
        return self.share(EVAL) * min(1.0, self.gaps_s / evaluated_s) if evaluated_s else 0.0

    @property
    def waits_hidden_in(self) -> str | None:
        """The framework whose queue may hide any of the waits, measured by the host clock; None where they are known.

        torch's waits count even on a device that is not measured, and the verdict says so.
        """
        return None if self.timeline == "device" else ASYNCHRONOUS.get(self.device.partition(":")[0])

    @property
    def workers(self) -> int | None:
        """The loader's number of workers; None where that is not known."""
        return self.loader.num_workers

    @property
    def busy_ratios(self) -> tuple[float, ...]:
        """Share of time in which each worker had work for a CPU, as far as the kernel shows it; empty: not measured."""
        return self.worker_busy_ratios or self.worker_cpu_ratios or ()

    @property
    def utilization(self) -> float | None:
        """The lowest utilisation of the run's GPUs over the window, by the driver; None where it reports none."""
        of_gpus = (gpu.utilization_ratio if gpu.minute_ratio is None else gpu.minute_ratio for gpu in self.gpus)
        return min((ratio for ratio in of_gpus if ratio is not None), default=None)

    @property
    def mfu_estimate(self) -> float | None:
        """The MFU of a rank's one GPU by its tensor cores' activity; None where that is not measured."""
        return self.gpus[0].mfu_ratio if len(self.gpus) == 1 else None

    @cached_property
    def mean_step(self) -> MeanStep:
        return self.steps.mean()

    @property
    def startup_s(self) -> float:
        """Return the time of start-up once there are steps, which no share counts then: it passes."""
        return self.states_s.get(STARTUP, 0.0) if len(self.steps) else 0.0

    @cached_property
    def _shares(self) -> Mapping[str, float]:
        return shares(self._counted_s)

    @cached_property
    def _counted_s(self) -> Mapping[str, float]:
        before = dict(self.untrained_s or self.first_step_s)  # which is one of their steps
        before[STARTUP] = self.startup_s
        before[INPUT_WAIT] = before.get(INPUT_WAIT, 0.0) + self.end_s
        before[OTHER] = before.get(OTHER, 0.0) + self.declared_s.get(PAUSE, 0.0)
        return {state: max(0.0, spent - before.get(state, 0.0)) for state, spent in self.states_s.items()}


def make_window(duration_ns: int, states_ns: Mapping[str, int], now: Any, then: Any = None, **facts: Any) -> Window:
    """Return the window between two moments, by the counters of both, as in `wire.Totals`, and by measured facts.

    The hook makes one for its own verdict, from the run's start (`then` is None); the agent one for every run here.
    """

    def per(of: str, name: str) -> float | None:
        whole = getattr(now, of) - getattr(then, of, 0)
        return (getattr(now, name) - getattr(then, name, 0)) / whole if whole > 0 else None

    eval_wait_ns, before = now.eval_wait_ns - getattr(then, "eval_wait_ns", 0), getattr(then, "declared_ns", {})
    declared_ns = {name: ns - before.get(name, 0) for name, ns in now.declared_ns.items()}
    return Window(
        duration_s=duration_ns / 1e9,
        states_s={state: ns / 1e9 for state, ns in states_ns.items()},
        declared_s={name: ns / 1e9 for name, ns in declared_ns.items() if ns > 0},
        eval_wait_ratio=min(1.0, eval_wait_ns / states_ns[EVAL]) if eval_wait_ns and states_ns.get(EVAL) else None,
        coverage=per("steps", "device_steps") or 0.0,
        unverified_ratio=per("steps", "unverified_steps") or 0.0,
        drained_ratio=per("device_steps", "drained_steps"),
        kept_up_ratio=per("device_steps", "kept_up_steps"),
        read_back_ratio=per("device_steps", "read_back_steps"),
        ready_batches=per("worker_fetches", "ready_batches"),
        empty_fetch_ratio=per("worker_fetches", "empty_fetches"),
        **{name: fact for name, fact in facts.items() if fact is not None},
    )
