"""The parts of the GPU collector that keep state between two ticks: the slow tier, performance monitoring (GPM), and XID events."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from gpuwatch_agent.collectors.drivers import CallCosts, DeadlineThread, Gpu, GpuProcess, Reading, Value, WarnOnce
from gpuwatch_agent.collectors.nvml import ABSENT, LOST, compute_processes, why

PROCESSES = "processes"
_GOOD_FOR_INTERVALS = 3


class SlowTier:
    """Reads processes, links and memory errors every ten seconds or less often, in its own thread.

    Results are returned with every tick's samples until the next round; too old ones are absent. `driver` is held during a round, in
    which NVML must not be shut down.
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
        self._warn = WarnOnce()

    def tick(self, gpus: Sequence[Gpu]) -> None:
        """Start a round unless one is running, and wait for it briefly."""
        try:
            self._thread.offer(lambda: self._round(gpus), self._wait_s)
        except TimeoutError as error:
            self._warn(f"{error} ({self.costs.current}); the other values are still read")

    def values(self, gpu: Gpu) -> list[Value]:
        """Return a GPU's values that are not too old."""
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
        """Drop all results: the GPUs are listed again, or the driver hangs."""
        self._values.clear()
        self._processes.clear()
        self.costs.forget_due_times()

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
        """Read one value of one GPU; it is absent after a failure. Lost GPUs are detected by the fast tier."""
        key = (gpu.device.uuid, reading.name)
        try:
            values = reading.read(gpu)
        except pynvml.NVMLError as error:
            self._values.pop(key, None)
            if reading.name == PROCESSES:
                self._processes.pop(gpu.device.uuid, None)
            if error.value not in ABSENT | LOST:
                self._warn(f"{gpu}: no {reading.name}: {why(error)}")
            return
        self._values[key] = (self._clock(), values)


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
