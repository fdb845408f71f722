"""What the rest of the agent asks of GPUs, whoever makes them: implemented once a kind of GPU, or of exporter."""

from __future__ import annotations

from typing import Protocol

from gpuwatch_agent.collectors.base import Collector
from gpuwatch_agent.collectors.nvml import GpuDevice, GpuProcess


class GpuSource(Collector, Protocol):
    """A collector of gpuwatch_gpu_* that knows which GPUs there are and which processes hold them."""

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that answered last, by index."""
        ...

    def processes(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Return the compute processes of each GPU by UUID; an absent UUID is not known."""
        ...

    def process_list_age_s(self, uuid: str) -> float:
        """Return how old a GPU's process list is, 0 where there is none."""
        ...
