"""The slow tier of the GPU collector: processes, links, memory errors. In a thread of its own, which nobody waits for.

What it finds is kept, and given with every turn's samples until it is found anew; what is too old is absent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import pynvml

from gpuwatch_agent.collectors.call_costs import CallCosts
from gpuwatch_agent.collectors.driver_calls import DeadlineThread
from gpuwatch_agent.collectors.nvml import Gpu, GpuProcess, Reading, Value, compute_processes
from gpuwatch_agent.collectors.nvml_errors import ABSENT, LOST, why

log = logging.getLogger(__name__)

PROCESSES = "processes"
_GOOD_FOR_INTERVALS = 3


class SlowTier:
    """What is asked of the driver every ten seconds or more seldom.

    `driver` is held while a round is under way: NVML must not be shut down then.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        deadline_s: float,
        wait_s: float,
        process_interval_s: float,
        links: tuple[Reading, ...],
    ) -> None:
        self._links = links
        self._clock = clock
        self._wait_s = wait_s
        self._process_interval_s = process_interval_s
        self._thread = DeadlineThread("NVML", deadline_s)
        self.driver = threading.Lock()
        self.costs = CallCosts(clock)
        # written by the thread entry by entry; an entry is replaced whole, never changed
        self._values: dict[tuple[str, str], tuple[float, list[Value]]] = {}
        self._processes: dict[str, tuple[float, tuple[GpuProcess, ...]]] = {}
        self._warned: set[str] = set()

    def turn(self, gpus: Sequence[Gpu]) -> None:
        """Begin a round if something is due and none is under way, and wait for it a moment."""
        try:
            self._thread.offer(lambda: self._round(gpus), self._wait_s)
        except TimeoutError as error:
            self._warn(f"{error} ({self.costs.current}); the other values are read as usual")

    def values(self, gpu: Gpu) -> list[Value]:
        """Return what is known of a GPU and not too old."""
        now_s, found = self._clock(), []
        for (uuid, name), (taken_s, values) in list(self._values.items()):
            if uuid == gpu.device.uuid and now_s - taken_s <= self._lifetime_s(name):
                found += values
        return found

    def processes(self, gpu: Gpu) -> tuple[float, tuple[GpuProcess, ...]] | None:
        """Return (when they were listed, the processes on a GPU); None where that is not known, or too long ago."""
        known = self._processes.get(gpu.device.uuid)
        return known if known is not None and self._clock() - known[0] <= self._lifetime_s(PROCESSES) else None

    def forget(self) -> None:
        """Drop all that is known: the GPUs are listed anew, or the driver hangs."""
        self._values.clear()
        self._processes.clear()
        self.costs.forget_dues()

    def _lifetime_s(self, name: str) -> float:
        cost = self.costs.calls.get(name)
        return _GOOD_FOR_INTERVALS * (cost.interval_s if cost is not None else self._process_interval_s)

    def _round(self, gpus: Sequence[Gpu]) -> None:
        with self.driver:
            readings = [reading for reading in self._readings() if self.costs.due(reading.name, reading.interval_s)]
            for reading in readings:
                spent_s = 0.0
                for gpu in gpus:
                    with self.costs.calling(f"{reading.name} of GPU {gpu.device.index}") as took:
                        self._read(reading, gpu)
                    spent_s += took[0]
                self.costs.done(reading.name, spent_s)

    def _readings(self) -> list[Reading]:
        return [Reading(PROCESSES, self._list_processes, self._process_interval_s), *self._links]

    def _list_processes(self, gpu: Gpu) -> list[Value]:
        listed = compute_processes(gpu.handle)
        self._processes[gpu.device.uuid] = (self._clock(), listed)
        return [("gpuwatch_gpu_processes", len(listed), ())]

    def _read(self, reading: Reading, gpu: Gpu) -> None:
        """Read one value of one GPU; one that fails is absent from now on. A lost GPU is the fast tier's to notice."""
        key = (gpu.device.uuid, reading.name)
        try:
            values = reading.read(gpu)
        except pynvml.NVMLError as error:
            self._values.pop(key, None)
            if reading.name == PROCESSES:
                self._processes.pop(gpu.device.uuid, None)
            if error.value not in ABSENT | LOST:
                self._warn(f"GPU {gpu.device.index} ({gpu.device.uuid}): no {reading.name}: {why(error)}")
            return
        self._values[key] = (self._clock(), values)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)
