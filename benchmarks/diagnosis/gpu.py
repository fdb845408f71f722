"""A GPU without one: a device that is only time, and a driver (a fake NVML) whose readings follow what it did."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.fakes import FakeDevice, measure_by
from gpuwatch import Watch
from tests.nvml.fake import FakeGpu, FakeNvml

FOLDER = "GPUWATCH_BENCHMARK_FOLDER"
"""Environment variable: where the script of the fake driver lies."""
_EVERY_S = 0.5
_BUSY_W, _IDLE_W = 600.0, 90.0


class Result(torch.Tensor):
    """A number that lies on the device: to read it back, the host waits for the device."""

    is_cpu = False  # type: ignore[assignment]


@dataclass
class Gpu:
    """A training's GPU. Its fields may be changed while it runs."""

    device: FakeDevice = field(default_factory=FakeDevice)
    base: FakeGpu = field(default_factory=FakeGpu)
    spins: bool = False
    """Its kernels wait for another GPU: utilisation at its full, and hardly any power."""

    def __post_init__(self) -> None:
        self._driver = FakeNvml(Path(os.environ[FOLDER]))
        self._seen = (time.monotonic_ns(), 0)
        self._weight = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = torch.optim.SGD([self._weight], lr=0.0)
        self._loss = torch.zeros(()).as_subclass(Result)
        self._report()
        threading.Thread(target=self._drive, daemon=True).start()

    def measures(self, watch: Watch) -> Watch:
        """Let the watch measure by this device."""
        measure_by(watch, self.device)
        return watch

    def compute(self, seconds: float) -> None:
        """Launch a step's work: an optimizer's step is its last."""
        self.device.launch(seconds)
        self._optimizer.step()

    def read_back(self) -> float:
        """Return the loss, as `loss.item()` does on a GPU."""
        self.device.synchronize()
        return self._loss.item()

    def _drive(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self._report()

    def _report(self) -> None:
        """Write what the driver reads now: how busy the device was since the last time."""
        now, done = time.monotonic_ns(), self.device.done_ns
        then, done_then = self._seen
        self._seen = (now, done)
        busy = 1.0 if self.spins else min(1.0, max(0.0, (done - done_then) / max(1, now - then)))
        watts = 150.0 if self.spins else _IDLE_W + busy * (_BUSY_W - _IDLE_W)
        held = ((os.getpid(), self.base.memory_used_bytes),)
        reading = replace(
            self.base, utilization_percent=round(100 * busy), power_mw=round(1000 * watts), processes=held
        )
        self._driver.write([reading])
