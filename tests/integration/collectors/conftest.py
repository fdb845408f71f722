"""A GPU collector on the driver of recorded or scripted GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuwatch_agent.collectors.drivers import Timing
from gpuwatch_agent.collectors.nvml import GpuCollector
from tests.nvml.fake import Clock, FakeNvml, shut_down


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def collector(nvml: FakeNvml, clock: Clock) -> Iterator[GpuCollector]:
    """Give a collector that is patient: a slow machine is not a driver that hangs. Its NVML is shut down afterwards."""
    collector = GpuCollector(Timing(clock, lambda: 1_790_000_000 + clock(), deadline_s=60, slow_wait_s=60))
    yield collector
    nvml.write([])
    collector.fast.thread.call(shut_down)
