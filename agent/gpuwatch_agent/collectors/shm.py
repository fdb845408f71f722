"""Room in /dev/shm, through which loader workers hand batches to the training process."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwatch.host.shm import shm_bytes
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots


class ShmCollector:
    """gpuwatch_shm_size_bytes and gpuwatch_shm_used_bytes of the node's own mount: `mount="host"`."""

    name = "shm"

    def __init__(self, roots: Roots) -> None:
        self._path = roots.shm

    def collect(self) -> Iterable[Sample]:
        """Return size and use of /dev/shm. Raises: NoData where it is not mounted, or has no size limit."""
        size, used = shm_bytes(self._path)
        return [Sample("gpuwatch_shm_size_bytes", size, ("host",)), Sample("gpuwatch_shm_used_bytes", used, ("host",))]
