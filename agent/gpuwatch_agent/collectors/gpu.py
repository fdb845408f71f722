"""NVIDIA GPUs through NVML: gpuwatch_gpu_*, GPUs seen and expected, and the processes on each; performance monitoring (GPM) and XID events."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.driver_collector import DriverCollector, Fate
from gpuwatch_agent.collectors.drivers import Gpu, GpuProcess, Reading, Value
from gpuwatch_agent.collectors.nvml import (
    ABSENT,
    DOUBTFUL,
    LINK_READINGS,
    LOST,
    NO_DRIVER,
    READINGS,
    compute_processes,
    describe,
)


class GpuCollector(DriverCollector):
    """NVIDIA's GPUs. `readings` and `links` are what each tier reads."""

    name = "gpu"
    library = "NVML"
    error = pynvml.NVMLError

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
        fast = (*READINGS, Reading("gpm", self._read_gpm, 1.0)) if readings is None else readings
        super().__init__(clock, deadline_s, slow_wait_s, process_interval_s, fast, links)
        self._gpm = Gpm()
        self._xids = XidWatch(wall_clock)
        self._initialised = False

    def start(self) -> Iterator[Gpu | str]:
        self._gpm.reset()
        if self._initialised:
            self._initialised = False
            self._xids.close()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        try:
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        except pynvml.NVMLError as error:
            if error.value in NO_DRIVER:
                raise NoData(NO_DRIVER[error.value]) from error
            raise
        self._initialised = True
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(Gpu(describe(index, handle), handle, driver))
            except pynvml.NVMLError_NoPermission:
                continue  # another container's
            except pynvml.NVMLError as error:
                yield f"GPU {index} is listed but does not answer: {self.why(error)}"
        self._xids.register(gpus)
        yield from gpus

    def list_processes(self, gpu: Gpu) -> tuple[GpuProcess, ...]:
        return compute_processes(gpu.handle)

    def fate(self, error: Exception) -> Fate:
        code = getattr(error, "value", None)
        return "lost" if code in LOST else "absent" if code in ABSENT else "doubtful" if code in DOUBTFUL else "failed"

    def why(self, error: Exception) -> str:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return f"{error} The driver was replaced while it was loaded: reboot, or reload it and restart the agent"
        return str(error)

    def begin_tick(self) -> None:
        self._xids.poll()

    def more_values(self, gpu: Gpu) -> list[Value]:
        return self._xids.values(gpu)

    def _read_gpm(self, gpu: Gpu) -> list[Value]:
        values = self._gpm.read(gpu)
        for metric, _, labels in self.slow_values(gpu):
            if metric == "gpuwatch_gpu_mig_info":
                values += self._gpm.read_instance(gpu, int(labels[0]))
        return values


_PERCENT, _MIB = 0.01, float(1 << 20)
METRICS = {
    "gpuwatch_gpu_sm_active_ratio": (pynvml.NVML_GPM_METRIC_SM_UTIL, _PERCENT),
    "gpuwatch_gpu_sm_occupancy_ratio": (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, _PERCENT),
    "gpuwatch_gpu_tensor_active_ratio": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, _PERCENT),
    "gpuwatch_gpu_dram_bandwidth_ratio": (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, _PERCENT),
    "gpuwatch_gpu_pcie_transmit_bytes_per_second": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB),
    "gpuwatch_gpu_pcie_receive_bytes_per_second": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB),
    "gpuwatch_gpu_nvlink_receive_bytes_per_second": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, _MIB),
    "gpuwatch_gpu_nvlink_transmit_bytes_per_second": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, _MIB),
}
"""The driver's metric, and what turns its unit into ours."""
_MIG_METRICS = {"gpuwatch_gpu_mig_sm_active_ratio": METRICS["gpuwatch_gpu_sm_active_ratio"]}


@dataclass
class _Pair:
    """Two alternating samples: the older one, and the one to be written next."""

    old: Any
    new: Any
    filled: bool = False


class Gpm:
    """GPU performance monitoring (GPM) of Hopper and later: activity of multiprocessors, memory and links, without DCGM.

    A metric is computed from two samples of the driver's counters: the first tick has none. For one thread; `reset` after NVML was
    restarted. *Never run on real hardware yet.*
    Source: the GPM functions of https://docs.nvidia.com/deploy/nvml-api; units by the comments in nvml.h.
    """

    def __init__(self) -> None:
        self._supported: dict[str, bool] = {}
        self._pairs: dict[tuple[str, int | None], _Pair] = {}

    def reset(self) -> None:
        """Drop earlier samples; they are not freed, as their driver may be gone."""
        self._supported.clear()
        self._pairs.clear()

    def read(self, gpu: Gpu) -> list[Value]:
        """Return a GPU's metrics since the last tick; none in the first one. Raises: NVMLError."""
        uuid = gpu.device.uuid
        if uuid not in self._supported:
            self._supported[uuid] = bool(pynvml.nvmlGpmQueryDeviceSupport(gpu.handle).isSupportedDevice)
        if not self._supported[uuid]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        values = self._between((uuid, None), gpu, METRICS)
        return [(metric, value, ()) for metric, value in values.items()]

    def read_instance(self, gpu: Gpu, instance: int) -> list[Value]:
        """Return a MIG instance's metrics since the last tick."""
        if not self._supported.get(gpu.device.uuid):
            return []
        values = self._between((gpu.device.uuid, instance), gpu, _MIG_METRICS)
        return [(metric, value, (str(instance),)) for metric, value in values.items()]

    def _between(
        self, key: tuple[str, int | None], gpu: Gpu, metrics: dict[str, tuple[int, float]]
    ) -> dict[str, float]:
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = _Pair(pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc())
        if key[1] is None:
            pynvml.nvmlGpmSampleGet(gpu.handle, pair.new)
        else:
            pynvml.nvmlGpmMigSampleGet(gpu.handle, key[1], pair.new)
        values = _metrics(pair.old, pair.new, metrics) if pair.filled else {}
        pair.old, pair.new, pair.filled = pair.new, pair.old, True
        return values


def _metrics(old: Any, new: Any, metrics: dict[str, tuple[int, float]]) -> dict[str, float]:
    """Return those of the metrics that the driver could compute from two samples."""
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(metrics)
    asked.sample1, asked.sample2 = old, new
    for place, (metric_id, _) in enumerate(metrics.values()):
        asked.metrics[place].metricId = metric_id
    pynvml.nvmlGpmMetricsGet(asked)
    found = {}
    for place, (name, (_, factor)) in enumerate(metrics.items()):
        answer = asked.metrics[place]
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(answer.value):
            found[name] = answer.value * factor
    return found


_MOST_A_TICK = 64


@dataclass
class _Seen:
    count: int = 0
    last: int | None = None
    last_s: float = 0.0


class XidWatch:
    """XID errors of all GPUs since the agent started: count, number and time of the last one.

    The driver queues them from a registration on; the queue is polled without waiting. *Never run on real hardware yet.*
    Source: the event functions of https://docs.nvidia.com/deploy/nvml-api.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._events: Any = None
        self._uuids: dict[int, str] = {}
        """By the address that a handle is."""
        self._seen: dict[str, _Seen] = {}

    def register(self, gpus: Sequence[Gpu]) -> None:
        """Subscribe to these GPUs' errors, in place of an earlier subscription; GPUs without events are skipped."""
        self.close()
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return
        for gpu in gpus:
            try:
                pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            except pynvml.NVMLError:
                continue
            self._uuids[_address(gpu.handle)] = gpu.device.uuid
            self._seen.setdefault(gpu.device.uuid, _Seen())

    def close(self) -> None:
        """Unsubscribe; before NVML is shut down."""
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
        self._events, self._uuids = None, {}

    def poll(self) -> None:
        """Read the queued events, without waiting. Raises: NVMLError."""
        if self._events is None or not self._uuids:
            return
        for _ in range(_MOST_A_TICK):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError_Timeout:
                return
            seen = self._seen.get(self._uuids.get(_address(event.device), ""))
            if seen is not None and event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                seen.count += 1
                seen.last, seen.last_s = int(event.eventData), self._wall_clock()

    def values(self, gpu: Gpu) -> list[Value]:
        """Return a GPU's errors; nothing for one without events."""
        seen = self._seen.get(gpu.device.uuid)
        if seen is None:
            return []
        values: list[Value] = [("gpuwatch_gpu_xid_errors_total", seen.count, ())]
        if seen.last is not None:
            values.append(("gpuwatch_gpu_last_xid", seen.last, ()))
            values.append(("gpuwatch_gpu_last_xid_timestamp_seconds", seen.last_s, ()))
        return values


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
