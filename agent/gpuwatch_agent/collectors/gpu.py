"""GPUs through NVML: gpuwatch_gpu_*, gpus seen and expected, and who holds which GPU.

The NVML calls are made in one thread of their own, which is given up on when the driver hangs. GPUs are known by
their UUID, enumerated again when one is lost or missing, and each is read apart from the others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pynvml

from gpuwatch.errors import GpuwatchError, NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.deadline import DeadlineThread
from gpuwatch_agent.collectors.nvml import (
    READINGS,
    GpuDevice,
    GpuProcess,
    Handle,
    compute_processes,
    describe,
)

log = logging.getLogger(__name__)

_ABSENT = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_NOT_READY,
}
"""This GPU does not tell this value: leave it out."""

_LOST = {
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
}
"""Nothing can be had of this GPU until the devices are enumerated anew."""

_DOUBTFUL = {
    pynvml.NVML_ERROR_UNKNOWN,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,  # the handle may be of an earlier enumeration
}
"""This value is left out, and a new enumeration may mend it."""

_NO_DRIVER = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: there is no NVIDIA driver here,"
    " or this container was started without its GPU runtime",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
}
"""What makes a node one without GPUs, in words."""

_RETRY_FIRST_S = 10.0
_RETRY_MOST_S = 60.0
"""Between enumerations while a GPU is missing: nvmlInit may start the driver, which takes a lock and up to seconds."""


@dataclass(frozen=True)
class _Gpu:
    device: GpuDevice
    handle: Handle


class GpuCollector:
    """Samples of all GPUs, once a turn; process lists every `process_interval_s`, for they cost a thousand times more.

    `deadline_s` is how long a turn may take before it is given up on. Only GPUs that the agent may use are expected;
    the number of them never goes down while it runs.
    """

    name = "gpu"

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = 2.0,
        process_interval_s: float = 10.0,
    ) -> None:
        self._clock = clock
        self._thread = DeadlineThread("NVML", deadline_s)
        self._process_interval_s = process_interval_s
        # written by the NVML thread (and the processes by `collect`, on a timeout); replaced whole, never changed
        self._gpus: tuple[_Gpu, ...] = ()
        self._processes: Mapping[str, tuple[GpuProcess, ...]] = {}
        self._processes_due_s = -math.inf
        self._driver = ""
        self._expected = 0
        self._initialised = False
        self._failure: pynvml.NVMLError | None = None
        self._retry_due_s = -math.inf
        self._retry_s = _RETRY_FIRST_S
        self._warned: set[str] = set()

    def collect(self) -> Iterable[Sample]:
        """Return samples of every GPU that answers.

        A driver that has gone since GPUs were seen is no lack of data: 0 GPUs are seen then, of those expected.

        Raises: NoData where there is no driver or no GPU; TimeoutError while NVML does not answer; GpuwatchError for a
        driver that refuses to work.
        """
        try:
            return self._thread.call(self._turn)
        except TimeoutError:
            # who held a GPU before the driver hung is not known to hold it still
            self._processes, self._processes_due_s = {}, -math.inf
            raise

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that answered in the last turn that came back, by index. Empty before the first."""
        return tuple(gpu.device for gpu in self._gpus)

    def processes(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Return the compute processes on each GPU by UUID, as of the last poll, by pid.

        An empty tuple: no process holds the GPU. A UUID that is absent: not known (lost, not supported, NVML hangs).
        """
        return dict(self._processes)

    def _turn(self) -> list[Sample]:
        now_s = self._clock()
        samples, healthy = self._poll(now_s)
        if not healthy and now_s >= self._retry_due_s:
            self._retry_due_s, self._retry_s = now_s + self._retry_s, min(2 * self._retry_s, _RETRY_MOST_S)
            self._enumerate()
            samples, healthy = self._poll(now_s)
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
        """Return the error that says why there is not one GPU."""
        if self._failure is None:
            return NoData("the NVIDIA driver lists no GPU that the agent may use")
        if self._failure.value in _NO_DRIVER:
            return NoData(_NO_DRIVER[self._failure.value])
        return GpuwatchError(f"NVML does not start: {_why(self._failure)}")

    def _enumerate(self) -> None:
        """Start NVML anew and list the GPUs: handles from before a loss or a reload of the driver are no good."""
        before = len(self._gpus)
        self._gpus, self._failure, self._processes_due_s = (), None, -math.inf
        if self._initialised:
            self._initialised = False
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
                self._warn(f"NVML does not start: {_why(error)}")
            return
        gpus, silent = [], []
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_Gpu(describe(index, handle), handle))
            except pynvml.NVMLError_NoPermission:
                count -= 1  # another container's
            except pynvml.NVMLError as error:
                silent.append(f"GPU {index} is listed but does not answer: {_why(error)}")
        self._gpus = tuple(gpus)
        self._expected = max(self._expected, count)
        if len(gpus) > before:
            log.info("NVML lists %s GPUs, driver %s", len(gpus), self._driver)
            self._warned.clear()  # what befalls them from now on is news
        for message in silent:
            self._warn(message)

    def _poll(self, now_s: float) -> tuple[list[Sample], bool]:
        """Return samples of every GPU, and whether all that are expected are well. Drops lost ones from the list."""
        polled = now_s >= self._processes_due_s
        samples, alive, processes, well = [], [], {}, True
        for gpu in self._gpus:
            uuid = gpu.device.uuid
            try:
                values, sound = self._read(gpu)
                held = self._list_processes(gpu) if polled else self._processes.get(uuid)
            except pynvml.NVMLError as error:
                self._warn(f"GPU {gpu.device.index} ({uuid}) is lost: {_why(error)}")
                continue
            alive.append(gpu)
            well = well and sound
            samples += values
            if held is not None:
                processes[uuid] = held
                samples.append(Sample("gpuwatch_gpu_processes", len(held), _labels(gpu)))
        self._gpus, self._processes = tuple(alive), processes
        if polled:
            self._processes_due_s = now_s + self._process_interval_s
        return samples, well and 0 < len(alive) >= self._expected

    def _read(self, gpu: _Gpu) -> tuple[list[Sample], bool]:
        """Return a GPU's samples, and whether the driver knew its answers. Raises: NVMLError if the GPU is lost."""
        device, labels, sound = gpu.device, _labels(gpu), True
        samples = [Sample("gpuwatch_gpu_info", 1, (*labels, device.name, device.pci_bus_id, self._driver))]
        for reading in READINGS:
            try:
                samples += [Sample(metric, value, (*labels, *more)) for metric, value, more in reading(gpu.handle)]
            except pynvml.NVMLError as error:
                sound = self._excuse(error, gpu, reading.__name__) and sound
        return samples, sound

    def _list_processes(self, gpu: _Gpu) -> tuple[GpuProcess, ...] | None:
        """Return a GPU's processes, or None where the driver does not tell. Raises: NVMLError if the GPU is lost."""
        try:
            return compute_processes(gpu.handle)
        except pynvml.NVMLError as error:
            self._excuse(error, gpu, "processes")
            return None

    def _excuse(self, error: pynvml.NVMLError, gpu: _Gpu, what: str) -> bool:
        """Return whether a value that failed leaves the GPU sound. Raises: the error itself, if the GPU is lost."""
        if error.value in _LOST:
            raise error
        if error.value not in _ABSENT:
            self._warn(f"GPU {gpu.device.index} ({gpu.device.uuid}): no {what}: {_why(error)}")
        return error.value not in _DOUBTFUL

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)


def _labels(gpu: _Gpu) -> tuple[str, str]:
    return str(gpu.device.index), gpu.device.uuid


def _why(error: pynvml.NVMLError) -> str:
    """Return an NVML error in words, with the remedy for the one that only people can mend."""
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return f"{error} The driver was replaced while it was loaded: reboot, or reload it and restart the agent"
    return str(error)
