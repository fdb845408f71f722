"""How busy the driver sees the training's own GPU, without an agent: read by the hook's background thread, where nvidia-ml-py is installed.

A reading costs a few microseconds and touches no CUDA context. The driver counts any kernel as busy, and other processes' kernels
too, so the mean is an upper bound of what this training keeps busy.
"""

from __future__ import annotations

from typing import Any

from gpuwatch.diagnosis.window import GpuFacts

_ENOUGH = 3


class OwnGpu:
    """The mean of the driver's utilization readings of one GPU."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._nvml: Any = None
        self._handle: Any = None
        self._is_off = False
        self._sum = 0.0
        self._readings = 0

    def sample(self) -> None:
        """Take a reading; a GPU or a library that has none is not asked again. The first call loads the library."""
        if self._is_off:
            return
        try:
            if self._handle is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            percent = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        except Exception:  # no such package, no driver, a MIG instance, a GPU that is gone
            self._is_off = True
            return
        self._sum += percent / 100
        self._readings += 1

    def facts(self) -> tuple[GpuFacts, ...]:
        """Return the GPU with its utilization so far; nothing where too few readings were had."""
        if self._is_off or self._readings < _ENOUGH:
            return ()
        return (GpuFacts("", self._uuid, utilization_ratio=self._sum / self._readings),)
