"""NVIDIA GPUs through NVML: gpuwatch_gpu_*, GPUs seen and expected, and the processes on each.

NVML is called in two threads with a deadline, as a driver may hang: one for what is read in every tick, one for the slow tier. GPUs are
known by UUID, enumerated again when one is lost or missing, and each is read separately.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable

import pynvml

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
from gpuwatch_agent.collectors.nvml import (
    ABSENT,
    DOUBTFUL,
    LINK_READINGS,
    LOST,
    NO_DRIVER,
    READINGS,
    describe,
    why,
)
from gpuwatch_agent.collectors.nvml_readers import Gpm, SlowTier, XidWatch

log = logging.getLogger(__name__)

_RETRY_FIRST_S = 10.0
_RETRY_MOST_S = 60.0
"""Between enumerations while a GPU is missing: nvmlInit may start the driver, which takes a lock and up to seconds."""


class GpuCollector:
    """Samples of all GPUs, once a tick; process lists, which cost a thousand times more, every `process_interval_s`.

    A tick is abandoned after `deadline_s`; it waits `slow_wait_s` for the slow tier, whose later results the next tick takes. `readings`
    and `links` are what each tier reads. Only GPUs that the agent may use are expected; their number never falls while it runs.
    """

    name = "gpu"

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        deadline_s: float = 2.0,
        slow_wait_s: float = 0.25,
        process_interval_s: float = 10.0,
        readings: tuple[Reading, ...] | None = None,
        links: tuple[Reading, ...] = LINK_READINGS,
    ) -> None:
        self._clock = clock
        self._thread = DeadlineThread("NVML", deadline_s)
        self._slow = SlowTier(clock, deadline_s, slow_wait_s, process_interval_s, links)
        self._costs = CallCosts(clock)
        self._gpm = Gpm()
        self._xids = XidWatch(wall_clock)
        self._readings = (*READINGS, Reading("gpm", self._read_gpm, 1.0)) if readings is None else readings
        # written by the NVML thread; replaced whole, never changed
        self._gpus: tuple[Gpu, ...] = ()
        self._values: dict[tuple[str, str], list[Value]] = {}
        self._driver = ""
        self._expected = 0
        self._initialised = False
        self._failure: pynvml.NVMLError | None = None
        self._retry_due_s = -math.inf
        self._retry_s = _RETRY_FIRST_S
        self._warn = WarnOnce()

    def collect(self) -> Iterable[Sample]:
        """Return samples of every GPU that answers.

        A driver that was unloaded since GPUs were seen is not NoData: then 0 of the expected GPUs are seen.

        Raises: NoData where there is no driver or no GPU; TimeoutError while NVML does not answer; GpuwatchError for a failing driver.
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
        found = {gpu.device.uuid: self._slow.processes(gpu) for gpu in self._gpus}
        return {uuid: known[1] for uuid, known in found.items() if known is not None}

    def process_list_age_s(self, uuid: str) -> float:
        """Return how old a GPU's process list is, 0 where there is none."""
        known = next((self._slow.processes(gpu) for gpu in self._gpus if gpu.device.uuid == uuid), None)
        return 0.0 if known is None else max(0.0, self._clock() - known[0])

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

    def _nothing(self) -> GpuwatchError:
        """Return the error for no GPU at all."""
        if self._failure is None:
            return NoData("the NVIDIA driver lists no GPU that the agent may use")
        if self._failure.value in NO_DRIVER:
            return NoData(NO_DRIVER[self._failure.value])
        return GpuwatchError(f"NVML does not start: {why(self._failure)}")

    def _enumerate(self) -> None:
        """Start NVML again and list the GPUs: handles from before a loss or a reload of the driver are invalid."""
        before = len(self._gpus)
        self._gpus, self._failure, self._values = (), None, {}
        self._slow.forget()
        self._gpm.reset()
        self._costs.forget_due_times()
        if self._initialised:
            self._initialised = False
            self._xids.close()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        try:
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
            self._initialised = True
            self._driver = pynvml.nvmlSystemGetDriverVersion()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self._failure = error
            if self._expected:
                self._warn(f"NVML does not start: {why(error)}")
            return
        gpus, silent = [], []
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(Gpu(describe(index, handle), handle))
            except pynvml.NVMLError_NoPermission:
                count -= 1  # another container's
            except pynvml.NVMLError as error:
                silent.append(f"GPU {index} is listed but does not answer: {why(error)}")
        self._gpus = tuple(gpus)
        self._expected = max(self._expected, count)
        self._xids.register(gpus)
        if len(gpus) > before:
            log.info("NVML lists %s GPUs, driver %s", len(gpus), self._driver)
            self._warn.clear()  # later failures are logged again
        for message in silent:
            self._warn(message)

    def _poll(self) -> tuple[list[Sample], bool]:
        """Return samples of every GPU, and whether all expected ones are healthy. Removes lost ones from the list."""
        readings = [reading for reading in self._readings if self._costs.due(reading.name, reading.interval_s)]
        spent_s = {reading.name: 0.0 for reading in readings}
        samples, alive, well = [], [], True
        with contextlib.suppress(pynvml.NVMLError), self._costs.calling("events"):
            self._xids.poll()
        for gpu in self._gpus:
            try:
                well = self._read(gpu, readings, spent_s) and well
            except pynvml.NVMLError as error:
                self._warn(f"{gpu} is lost: {why(error)}")
                continue
            alive.append(gpu)
            info = (gpu.device.name, gpu.device.pci_bus_id, self._driver)
            values: list[Value] = [("gpuwatch_gpu_info", 1, info), *self._xids.values(gpu)]
            for reading in self._readings:
                values += self._values.get((gpu.device.uuid, reading.name), ())
            samples += gpu_samples(gpu.device, values)
        self._gpus = tuple(alive)
        if alive:
            for name, seconds in spent_s.items():
                self._costs.done(name, seconds)
        return samples, well and 0 < len(alive) >= self._expected

    def _read(self, gpu: Gpu, readings: list[Reading], spent_s: dict[str, float]) -> bool:
        """Read what is due of a GPU; return False for a doubtful answer. Raises: NVMLError if the GPU is lost."""
        sound = True
        for reading in readings:
            key = (gpu.device.uuid, reading.name)
            with self._costs.calling(f"{reading.name} of GPU {gpu.device.index}") as took:
                try:
                    self._values[key] = reading.read(gpu)
                except pynvml.NVMLError as error:
                    self._values.pop(key, None)
                    sound = self._excuse(error, gpu, reading.name) and sound
            spent_s[reading.name] += took[0]
        return sound

    def _read_gpm(self, gpu: Gpu) -> list[Value]:
        values = self._gpm.read(gpu)
        for metric, _, labels in self._slow.values(gpu):
            if metric == "gpuwatch_gpu_mig_info":
                values += self._gpm.read_instance(gpu, int(labels[0]))
        return values

    def _excuse(self, error: pynvml.NVMLError, gpu: Gpu, what: str) -> bool:
        """Return whether a GPU is healthy despite a failed value. Raises: the error itself, if the GPU is lost."""
        if error.value in LOST:
            raise error
        if error.value not in ABSENT:
            self._warn(f"{gpu}: no {what}: {why(error)}")
        return error.value not in DOUBTFUL
