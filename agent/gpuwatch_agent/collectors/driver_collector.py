"""A collector of GPUs through a driver's library: what each tier reads, GPUs seen and expected, and the processes on each.

The library is called in two threads with a deadline, as a driver may hang: one for what is read in every tick, one for the slow tier.
GPUs are known by UUID, enumerated again when one is lost or missing, and each is read separately.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from gpuwatch.errors import GpuwatchError, NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.drivers import (
    CallCosts,
    DeadlineThread,
    Gpu,
    GpuDevice,
    GpuProcess,
    Reading,
    Value,
    WarnOnce,
    gpu_samples,
)

log = logging.getLogger(__name__)

Fate = Literal["lost", "doubtful", "absent", "failed"]
"""What a failed call means: the GPU does not answer until the GPUs are enumerated again; enumerating may repair this value; this GPU has
no such value; none of these."""

PROCESSES = "processes"
_GOOD_FOR_INTERVALS = 3
_RETRY_FIRST_S = 10.0
_RETRY_MOST_S = 60.0
"""Between enumerations while a GPU is missing: starting the library may start the driver, which takes a lock and up to seconds."""


class DriverCollector:
    """Samples of all GPUs, once a tick; process lists, which cost a thousand times more, every `process_interval_s`.

    A tick is abandoned after `deadline_s`; it waits `slow_wait_s` for the slow tier, whose later results the next tick takes. Only GPUs
    that the agent may use are expected; their number never falls while it runs. A subclass calls its library: `start`,
    `list_processes`, `fate`.
    """

    name: str
    library: str
    """Its name, for messages."""
    error: type[Exception]
    """What its functions raise."""

    def __init__(
        self,
        clock: Callable[[], float],
        deadline_s: float,
        slow_wait_s: float,
        process_interval_s: float,
        fast: Sequence[Reading],
        slow: Sequence[Reading],
    ) -> None:
        self._clock = clock
        self._thread = DeadlineThread(self.library, deadline_s)
        processes = Reading(PROCESSES, self._count_processes, process_interval_s)
        self._slow = _SlowTier(self, clock, deadline_s, slow_wait_s, (processes, *slow))
        self._costs = CallCosts(clock)
        self._readings = tuple(fast)
        # written by the library's thread; replaced whole, never changed
        self._gpus: tuple[Gpu, ...] = ()
        self._values: dict[tuple[str, str], list[Value]] = {}
        self._expected = 0
        self._failure: Exception | None = None
        self._retry_due_s = -math.inf
        self._retry_s = _RETRY_FIRST_S
        self._warn = WarnOnce()
        self._processes: dict[str, tuple[GpuProcess, ...]] = {}

    # the library ----------------------------------------------------------------------------------------------------------

    def start(self) -> Iterator[Gpu | str]:
        """Start the library, again if need be, and yield each GPU that the agent may use; why it does not answer, for one that does not.

        Raises: its error; NoData where there is no driver.
        """
        raise NotImplementedError

    def list_processes(self, gpu: Gpu) -> tuple[GpuProcess, ...]:
        """Return the compute processes on a GPU. Raises: the library's error."""
        raise NotImplementedError

    def fate(self, error: Exception) -> Fate:
        """Return what an error means."""
        raise NotImplementedError

    def why(self, error: Exception) -> str:
        """Return an error as text, with the remedy where there is one."""
        return str(error)

    def begin_tick(self) -> None:
        """Called before the GPUs are read. Raises: the library's error, which is ignored."""

    def more_values(self, gpu: Gpu) -> list[Value]:
        """Return values that no call is needed for."""
        return []

    # the collector --------------------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Sample]:
        """Return samples of every GPU that answers.

        A driver that was unloaded since GPUs were seen is not NoData: then 0 of the expected GPUs are seen.

        Raises: NoData where there is no driver or no GPU; TimeoutError while the driver does not answer; GpuwatchError for one that fails.
        """
        try:
            samples = self._thread.call(self._tick)
        except TimeoutError as error:
            # whether a process that held a GPU before the hang still does is not known
            self._slow.forget()
            raise TimeoutError(f"{error} ({self._costs.current or 'listing the GPUs'})") from None
        self._slow.tick(self._gpus)
        for gpu in self._gpus:
            samples += gpu_samples(gpu.device, self._slow.values(gpu))
        return [*samples, *self._costs.samples(), *self._slow.costs.samples()]

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that answered in the last tick that came back, by index. Empty before the first."""
        return tuple(gpu.device for gpu in self._gpus)

    def processes(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Return the compute processes on each GPU by UUID as of the last poll; an absent UUID: not known (lost, not supported, a hang)."""
        known = [gpu for gpu in self._gpus if self._slow.taken_s(gpu, PROCESSES) is not None]
        return {gpu.device.uuid: self._processes[gpu.device.uuid] for gpu in known}

    def process_list_age_s(self, uuid: str) -> float:
        """Return how old a GPU's process list is, 0 where there is none."""
        taken_s = next((self._slow.taken_s(gpu, PROCESSES) for gpu in self._gpus if gpu.device.uuid == uuid), None)
        return 0.0 if taken_s is None else max(0.0, self._clock() - taken_s)

    def slow_values(self, gpu: Gpu) -> list[Value]:
        """Return the slow tier's values of a GPU."""
        return self._slow.values(gpu)

    def _count_processes(self, gpu: Gpu) -> list[Value]:
        listed = self._processes[gpu.device.uuid] = self.list_processes(gpu)
        return [("gpuwatch_gpu_processes", len(listed), ())]

    def _tick(self) -> list[Sample]:
        now_s = self._clock()
        samples, healthy = self._poll()
        if not healthy and now_s >= self._retry_due_s and self._slow.driver.acquire(blocking=False):
            try:
                self._retry_due_s, self._retry_s = now_s + self._retry_s, min(2 * self._retry_s, _RETRY_MOST_S)
                self._enumerate()
            finally:
                self._slow.driver.release()
            samples, healthy = self._poll()
        if healthy:
            self._retry_s = _RETRY_FIRST_S
        if not self._expected:
            raise self._nothing()
        return [
            *samples,
            Sample("gpuwatch_gpus_seen", len(self._gpus)),
            Sample("gpuwatch_gpus_expected", self._expected),
        ]

    def _nothing(self) -> Exception:
        """Return the error for no GPU at all."""
        if self._failure is None:
            return NoData(f"{self.library} lists no GPU that the agent may use")
        if isinstance(self._failure, NoData):
            return self._failure
        return GpuwatchError(f"{self.library} does not start: {self.why(self._failure)}")

    def _enumerate(self) -> None:
        """Start the library again and list the GPUs: handles from before a loss or a reload of the driver are invalid."""
        before = len(self._gpus)
        self._gpus, self._failure, self._values = (), None, {}
        self._slow.forget()
        self._costs.forget_due_times()
        try:
            found = list(self.start())
        except (self.error, NoData) as error:
            self._failure = error
            if self._expected:
                self._warn(f"{self.library} does not start: {self.why(error)}")
            return
        self._gpus = tuple(gpu for gpu in found if isinstance(gpu, Gpu))
        self._expected = max(self._expected, len(found))
        if len(self._gpus) > before:
            log.info("%s lists %s GPUs, driver %s", self.library, len(self._gpus), self._gpus[0].driver)
            self._warn.clear()  # later failures are logged again
        for silent in found:
            if isinstance(silent, str):
                self._warn(silent)

    def _poll(self) -> tuple[list[Sample], bool]:
        """Return samples of every GPU, and whether all expected ones are healthy. Removes lost ones from the list."""
        readings = [reading for reading in self._readings if self._costs.due(reading.name, reading.interval_s)]
        spent_s = {reading.name: 0.0 for reading in readings}
        samples, alive, well = [], [], True
        with contextlib.suppress(self.error), self._costs.calling("events"):
            self.begin_tick()
        for gpu in self._gpus:
            try:
                well = self._read(gpu, readings, spent_s) and well
            except self.error as error:
                self._warn(f"{gpu} is lost: {self.why(error)}")
                continue
            alive.append(gpu)
            values = [gpu.info, *self.more_values(gpu)]
            for reading in self._readings:
                values += self._values.get((gpu.device.uuid, reading.name), ())
            samples += gpu_samples(gpu.device, values)
        self._gpus = tuple(alive)
        if alive:
            for name, seconds in spent_s.items():
                self._costs.done(name, seconds)
        return samples, well and 0 < len(alive) >= self._expected

    def _read(self, gpu: Gpu, readings: Sequence[Reading], spent_s: dict[str, float]) -> bool:
        """Read what is due of a GPU; return False for a doubtful answer. Raises: the library's error if the GPU is lost."""
        sound = True
        for reading in readings:
            key = (gpu.device.uuid, reading.name)
            with self._costs.calling(f"{reading.name} of GPU {gpu.device.index}") as took:
                try:
                    self._values[key] = reading.read(gpu)
                except self.error as error:
                    self._values.pop(key, None)
                    fate = self.fate(error)
                    if fate == "lost":
                        raise
                    if fate != "absent":
                        self._warn(f"{gpu}: no {reading.name}: {self.why(error)}")
                    sound = sound and fate != "doubtful"
            spent_s[reading.name] += took[0]
        return sound


class _SlowTier:
    """Reads processes, links and memory errors every ten seconds or less often, in its own thread.

    Results are returned with every tick's samples until the next round; too old ones are absent. `driver` is held during a round, in
    which the library must not be restarted.
    """

    def __init__(
        self,
        collector: DriverCollector,
        clock: Callable[[], float],
        deadline_s: float,
        wait_s: float,
        readings: Sequence[Reading],
    ) -> None:
        self._collector = collector
        self._clock = clock
        self._wait_s = wait_s
        self._readings = {reading.name: reading for reading in readings}
        self._thread = DeadlineThread(collector.library, deadline_s)
        self.driver = threading.Lock()
        self.costs = CallCosts(clock)
        # written by the thread entry by entry; an entry is replaced whole, never changed
        self._values: dict[tuple[str, str], tuple[float, list[Value]]] = {}
        self._warn = WarnOnce()

    def tick(self, gpus: Sequence[Gpu]) -> None:
        """Start a round unless one is running, and wait for it briefly."""
        try:
            self._thread.offer(lambda: self._round(gpus), self._wait_s)
        except TimeoutError as error:
            self._warn(f"{error} ({self.costs.current}); the other values are still read")

    def values(self, gpu: Gpu) -> list[Value]:
        """Return a GPU's values that are not too old."""
        found = []
        for name in self._readings:
            taken = self._values.get((gpu.device.uuid, name))
            if taken is not None and self.taken_s(gpu, name) is not None:
                found += taken[1]
        return found

    def taken_s(self, gpu: Gpu, name: str) -> float | None:
        """Return when a value was read; None where it was not, or too long ago."""
        taken = self._values.get((gpu.device.uuid, name))
        cost = self.costs.calls.get(name)
        lifetime_s = _GOOD_FOR_INTERVALS * (cost.interval_s if cost is not None else self._readings[name].interval_s)
        return taken[0] if taken is not None and self._clock() - taken[0] <= lifetime_s else None

    def forget(self) -> None:
        """Drop all results: the GPUs are listed again, or the driver hangs."""
        self._values.clear()
        self.costs.forget_due_times()

    def _round(self, gpus: Sequence[Gpu]) -> None:
        with self.driver:
            due = [each for each in self._readings.values() if self.costs.due(each.name, each.interval_s)]
            for reading in due:
                spent_s = 0.0
                for gpu in gpus:
                    with self.costs.calling(f"{reading.name} of GPU {gpu.device.index}") as took:
                        self._read(reading, gpu)
                    spent_s += took[0]
                self.costs.done(reading.name, spent_s)

    def _read(self, reading: Reading, gpu: Gpu) -> None:
        """Read one value of one GPU; it is absent after a failure. Lost GPUs are detected by the fast tier."""
        key = (gpu.device.uuid, reading.name)
        try:
            values = reading.read(gpu)
        except self._collector.error as error:
            self._values.pop(key, None)
            if self._collector.fate(error) not in ("absent", "lost"):
                self._warn(f"{gpu}: no {reading.name}: {self._collector.why(error)}")
            return
        self._values[key] = (self._clock(), values)
