"""GPU performance monitoring (GPM) of Hopper and later: what the multiprocessors, the memory and the links did.

The driver gives samples of counters; a metric is computed from two of them, so that the first turn has none. It needs neither DCGM nor
the lock of its profiling. *Never run on real hardware yet.* Source: the GPM functions of https://docs.nvidia.com/deploy/nvml-api;
units by the comments in nvml.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pynvml

from gpuwatch_agent.collectors.nvml import Gpu, Reading, Value

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
    """Two samples in turns: the older one, and the one to be written next."""

    old: Any
    new: Any
    filled: bool = False


class Gpm:
    """Reads GPM of every GPU that has it. For one thread; `reset` when NVML was started anew."""

    def __init__(self) -> None:
        self._supported: dict[str, bool] = {}
        self._pairs: dict[tuple[str, int | None], _Pair] = {}

    def reading(self) -> Reading:
        return Reading("gpm", self.read, 1.0)

    def reset(self) -> None:
        """Let go of samples from before: they belong to a driver that may be gone, and are not given back to it."""
        self._supported.clear()
        self._pairs.clear()

    def read(self, gpu: Gpu) -> list[Value]:
        """Return what a GPU did since the last turn; nothing in the first one. Raises: NVMLError."""
        uuid = gpu.device.uuid
        if uuid not in self._supported:
            self._supported[uuid] = bool(pynvml.nvmlGpmQueryDeviceSupport(gpu.handle).isSupportedDevice)
        if not self._supported[uuid]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        values = self._between((uuid, None), gpu, METRICS)
        return [(metric, value, ()) for metric, value in values.items()]

    def read_instance(self, gpu: Gpu, instance: int) -> list[Value]:
        """Return what a MIG instance did since the last turn."""
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
