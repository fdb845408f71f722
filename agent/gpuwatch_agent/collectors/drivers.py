"""Shared by the GPU collectors: what a GPU is, and a collector of GPUs through a driver's library.

The library is called in two threads with a deadline, as a driver may hang: one for every tick, one for the slow tier.
GPUs are known by UUID, and enumerated again when one is lost or missing.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import median
from typing import Any, Literal, NamedTuple

from gpuwatch.errors import GpuwatchError, NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.deadline import DeadlineThread

log = logging.getLogger(__name__)

Value = tuple[str, float, tuple[str, ...]]  # A metric, its value, and the labels it has beyond gpu and UUID


def values(*labels: str, **by_name: float | None) -> list[Value]:
    """Return values by metric, without the prefix "gpuwatch_gpu_" and without those that are None."""
    return [(f"gpuwatch_gpu_{name}", value, labels) for name, value in by_name.items() if value is not None]


@dataclass(frozen=True)
class GpuDevice:
    """A GPU, or a MIG instance, as the driver lists it."""

    index: int | str
    """NVML's (PCI order), not CUDA's or the minor number; an earlier GPU's loss moves it. "0:1": device 1 of GPU 0."""
    uuid: str
    name: str
    pci_bus_id: str  # with a domain of eight digits, as in "00000000:3B:00.0"
    minor: int | None  # the N of /dev/nvidiaN. None where there is none (WSL, some virtual GPUs, instances).
    instance: tuple[str, str] = ("", "")
    """Of a MIG instance: GPU instance id, and profile: "3g.40gb"; "1c.3g.40gb" for one of several compute instances."""
    size_ratio: float = 1.0
    """An instance's share of its GPU, by compute slices; of a split GPU the share that is in no instance."""
    handle: Any = field(default=None, compare=False)  # the library's, as long as the GPU answers
    driver: str = field(default="", compare=False)  # the driver's version
    parent: Any = field(default=None, compare=False)  # of a MIG instance: its GPU's handle

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.uuid})"

    @property
    def is_part_of_instance(self) -> bool:
        """Whether it is one of several compute instances, whose activity is measured together."""
        return "c." in self.instance[1]

    def samples(self, values: Iterable[Value]) -> list[Sample]:
        """Return these values, and what the GPU is, with its labels."""
        model = self.name.partition(" MIG ")[0]
        about: list[Value] = [("gpuwatch_gpu_info", 1, (model, self.pci_bus_id, self.driver))]
        if self.size_ratio < 1 or self.parent is not None:
            about.append(("gpuwatch_gpu_mig_ratio", self.size_ratio, self.instance))
        key = str(self.index), self.uuid
        return [Sample(metric, value, (*key, *more)) for metric, value, more in (*about, *values)]


BUDGET_RATIO = 0.01
"""Share of one core's time that a kind of call may take, all GPUs together. A more expensive one is made less often."""
_LONGEST_S = 300.0
_ROUNDS, _ROUNDS_TO_JUDGE = 5, 3
_SLACK_S = 0.25  # A tick may begin a little early
_GOOD_FOR_INTERVALS = 3
_FAST_EVERY_S, _SLOW_EVERY_S = 1.0, 10.0
Read = Callable[[GpuDevice], list[Value]]
Reads = Mapping[str, Read]
Clock = Callable[[], float]  # in seconds


class Timing(NamedTuple):
    """By which clocks a driver is read, and how long its answers are waited for."""

    clock: Clock = time.monotonic
    wall_clock: Clock = time.time
    deadline_s: float = 2.0  # a tick is abandoned after that
    slow_wait_s: float = 0.25  # a tick waits that long for the slow tier


TIMING = Timing()


@dataclass
class Reading:
    """Something that is read of every GPU, and what that costs."""

    read: Read
    planned_s: float  # its interval while it is cheap
    interval_s: float  # now, by the median: one call that hung does not predict the next one
    spent_s: float = 0.0
    rounds_s: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    due_s: float = -math.inf

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.due_s - _SLACK_S

    def done(self, now_s: float, seconds: float) -> None:
        """Record the duration of a round over all GPUs, and schedule the next one."""
        self.rounds_s.append(seconds)
        self.spent_s += seconds
        median_s = median(self.rounds_s) if len(self.rounds_s) >= _ROUNDS_TO_JUDGE else 0.0
        self.interval_s = min(_LONGEST_S, max(self.planned_s, median_s / BUDGET_RATIO))
        self.due_s = now_s + self.interval_s


Fate = Literal["lost", "doubtful", "absent", "failed"]
"""What a failed call means: the GPU does not answer until GPUs are enumerated again; enumerating may repair this value;
this GPU has no such value; none of these."""

PROCESSES = "processes"
_OF_INSTANCES = (PROCESSES, "memory", "gpm")
"""What is read of a MIG instance. Its errors do not concern its GPU: instances are listed again every ten seconds."""
_RETRY_FIRST_S = 10.0
_RETRY_MOST_S = 60.0
"""Between enumerations while a GPU is missing: they may start the driver, which takes a lock and up to seconds."""


class Tier:
    """Readings of all GPUs, in one thread. A value is kept until it is read again, for three intervals at most."""

    def __init__(self, collector: DriverCollector, readings: Reads, every_s: float) -> None:
        self.thread = DeadlineThread(collector.library, collector.timing.deadline_s)
        self.current = ""  # the call in progress, for a timeout's message
        self._collector, self._clock = collector, collector.clock
        self._readings = {name: Reading(read, every_s, every_s) for name, read in readings.items()}
        # written by the thread entry by entry; an entry is replaced whole, never changed
        self._values: dict[tuple[str, str], tuple[float, list[Value]]] = {}

    def is_due(self) -> bool:
        """Return whether there is something to read, or to take of an earlier round."""
        return self.thread.pending is not None or any(each.is_due(self._clock()) for each in self._readings.values())

    def round(self, gpus: Sequence[GpuDevice]) -> tuple[dict[str, Exception], bool]:
        """Read what is due of every GPU; return lost GPUs' errors by UUID, and whether no answer was doubtful."""
        lost: dict[str, Exception] = {}
        sound = True
        for name, reading in self._readings.items() if gpus else ():
            if not reading.is_due(self._clock()):
                continue
            begin_s = time.perf_counter()
            for gpu in (each for each in self._collector.parts(gpus) if each.uuid not in lost):
                if gpu.parent is not None and name not in _OF_INSTANCES:
                    continue
                key, self.current = (gpu.uuid, name), f"{name} of GPU {gpu.index}"
                try:
                    self._values[key] = (self._clock(), reading.read(gpu))
                except Exception as error:
                    self._values.pop(key, None)
                    fate = self._collector.fate(error) if gpu.parent is None else "absent"
                    if fate == "lost":
                        lost[gpu.uuid] = error
                    elif fate != "absent":
                        self._collector.warn(f"{gpu}: no {name}: {self._collector.why(error)}")
                    sound = sound and fate != "doubtful"
            reading.done(self._clock(), time.perf_counter() - begin_s)
        self.current = ""
        return lost, sound

    def values(self, gpu: GpuDevice) -> list[Value]:
        """Return a GPU's values that are not too old."""
        found = [self.taken(gpu.uuid, name) for name in self._readings]
        return [value for taken in found if taken is not None for value in taken[1]]

    def taken(self, uuid: str, name: str) -> tuple[float, list[Value]] | None:
        """Return (when it was read, its values); None where that was not, or too long ago."""
        taken = self._values.get((uuid, name))
        lifetime_s = _GOOD_FOR_INTERVALS * self._readings[name].interval_s
        return taken if taken is not None and self._clock() - taken[0] <= lifetime_s else None

    def costs(self) -> Iterator[Sample]:
        """Yield the time spent in each kind of call."""
        for name, reading in self._readings.items():
            if reading.spent_s:
                yield Sample("gpuwatch_nvml_call_seconds_total", reading.spent_s, (name,))

    def forget(self) -> None:
        """Drop all results: the GPUs are listed again, or the driver hangs."""
        self._values.clear()
        for reading in self._readings.values():
            reading.due_s = -math.inf


class DriverCollector:
    """Samples of all GPUs, once a tick; process lists, which cost a thousand times more, every ten seconds.

    What the slow tier gives later than a tick waits, the next tick takes. Only GPUs that the agent may use are
    expected; their number never falls while it runs. A subclass calls its library: `start`, `list_processes`, `fate`.
    """

    library: str

    def __init__(self, timing: Timing, fast: Reads, slow: Reads) -> None:
        self.timing, self.clock = timing, timing.clock
        self.fast = Tier(self, fast, _FAST_EVERY_S)
        self.slow = Tier(self, {**slow, PROCESSES: self._count_processes}, _SLOW_EVERY_S)
        self._driver = threading.Lock()  # held during a round of the slow tier: the library must not be restarted in it
        # written by the library's thread; replaced whole, never changed
        self._gpus: tuple[GpuDevice, ...] = ()
        self._instances: dict[str, tuple[float, list[GpuDevice]]] = {}
        """By UUID: the share of a GPU that is in no MIG instance, and its instances. An entry is replaced whole."""
        self._expected = 0
        self._failure: Exception = NoData()
        self._retry_due_s = -math.inf
        self._retry_s = _RETRY_FIRST_S
        self.warn = cache(partial(log.warning, "%s"))  # each message once
        self._processes: dict[str, tuple[int, ...]] = {}
        self.sm_utilization: dict[str, dict[int, float]] = {}
        """By UUID of a GPU with several processes: each working one's share of multiprocessor time at the last poll."""

    def expect(self, count: int) -> None:
        """Expect so many GPUs, as a former agent saw them lately."""
        self._expected = count

    def start(self) -> Iterator[GpuDevice | str]:
        """Start the library, again if need be, and yield each GPU that the agent may use, or why it does not answer.

        Raises: NoData where there is no driver; whatever the library raises.
        """
        raise NotImplementedError

    def list_processes(self, gpu: GpuDevice) -> tuple[int, ...]:
        """Return the pids on the node of processes with a compute context on a GPU. Raises: the library's error."""
        raise NotImplementedError

    def fate(self, error: Exception) -> Fate:
        """Return what an error means."""
        raise NotImplementedError

    def why(self, error: Exception) -> str:
        """Return an error as text, with the remedy where there is one."""
        return str(error)

    def collect(self) -> Iterable[Sample]:
        """Return samples of every GPU that answers.

        A driver that was unloaded since GPUs were seen is not NoData: then 0 of the expected GPUs are seen.

        Raises: NoData without a driver or a GPU; TimeoutError while the driver hangs; GpuwatchError if it fails.
        """
        try:
            self.fast.thread.call(self._tick)
        except TimeoutError as error:
            # whether a process that held a GPU before the hang still does is not known
            self.slow.forget()
            raise TimeoutError(f"{error} ({self.fast.current or 'listing the GPUs'})") from None
        if not self._expected:
            raise copy.copy(self._failure)  # a kept one would keep the frames of all ticks that raised it
        try:
            if self.slow.is_due():
                self.slow.thread.offer(self._slow_round, self.timing.slow_wait_s)
        except TimeoutError as error:
            self.warn(f"{error} ({self.slow.current}); the other values are still read")
        parts = self.parts(self._gpus)
        samples = [s for gpu in parts for s in gpu.samples(self.fast.values(gpu) + self.slow.values(gpu))]
        seen = Sample("gpuwatch_gpus_seen", len(self._gpus)), Sample("gpuwatch_gpus_expected", self._expected)
        return [*samples, *seen, *self.fast.costs(), *self.slow.costs()]

    def parts(self, gpus: Iterable[GpuDevice]) -> list[GpuDevice]:
        """Return the GPUs, each that is split by its size and followed by its MIG instances."""
        found: list[GpuDevice] = []
        for gpu in gpus:
            rest, instances = self._instances.get(gpu.uuid, (1.0, []))
            found += [replace(gpu, size_ratio=rest) if instances else gpu, *instances]
        return found

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that answered in the last complete tick, with their instances, by index. Empty at first."""
        return tuple(self.parts(self._gpus))

    def processes(self) -> dict[str, tuple[int, ...]]:
        """Return compute processes' pids by GPU UUID at the last poll; absent: not known (lost, unsupported, hangs)."""
        known = (gpu.uuid for gpu in self.parts(self._gpus) if self.slow.taken(gpu.uuid, PROCESSES))
        return {uuid: self._processes[uuid] for uuid in known}

    def process_list_age_s(self, uuid: str) -> float:
        """Return how old a GPU's process list is, 0 where there is none."""
        taken = self.slow.taken(uuid, PROCESSES)
        return 0.0 if taken is None else max(0.0, self.clock() - taken[0])

    def _count_processes(self, gpu: GpuDevice) -> list[Value]:
        listed = self._processes[gpu.uuid] = self.list_processes(gpu)
        return values(processes=len(listed))

    def _slow_round(self) -> None:
        with self._driver:
            self.slow.round(self._gpus)  # lost GPUs are detected by the fast tier

    def _tick(self) -> None:
        """Read every GPU; list them again where one is missing, or a handle may be invalid."""
        now_s = self.clock()
        healthy = self._poll()
        if not healthy and now_s >= self._retry_due_s and self._driver.acquire(blocking=False):
            try:
                self._retry_due_s, self._retry_s = now_s + self._retry_s, min(2 * self._retry_s, _RETRY_MOST_S)
                self._enumerate()
            finally:
                self._driver.release()
            healthy = self._poll()
        if healthy:
            self._retry_s = _RETRY_FIRST_S

    def _enumerate(self) -> None:
        """Start the library again and list the GPUs: handles from before a loss or a driver's reload are invalid."""
        before = len(self._gpus)
        self._gpus, self._failure = (), NoData(f"{self.library} lists no GPU that the agent may use")
        self.fast.forget()
        self.slow.forget()
        try:
            found = list(self.start())
        except Exception as error:
            text = f"{self.library} does not start: {self.why(error)}"
            self._failure = error if isinstance(error, NoData) else GpuwatchError(text)
            if self._expected:
                self.warn(text)
            return
        self._gpus = tuple(gpu for gpu in found if isinstance(gpu, GpuDevice))
        self._expected = max(self._expected, len(found))
        if len(self._gpus) > before:
            log.info("%s lists %s GPUs, driver %s", self.library, len(self._gpus), self._gpus[0].driver)
            self.warn.cache_clear()  # later failures are logged again
        for silent in (each for each in found if isinstance(each, str)):
            self.warn(silent)

    def _poll(self) -> bool:
        """Read what is due; return whether all expected GPUs are healthy. Removes lost ones from the list."""
        lost, sound = self.fast.round(self._gpus)
        for gpu in (each for each in self._gpus if each.uuid in lost):
            self.warn(f"{gpu} is lost: {self.why(lost[gpu.uuid])}")
        self._gpus = tuple(gpu for gpu in self._gpus if gpu.uuid not in lost)
        return sound and 0 < len(self._gpus) >= self._expected
