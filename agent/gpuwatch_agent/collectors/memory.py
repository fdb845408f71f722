"""Memory of the node."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, psutil_at


class MemoryCollector:
    """gpuwatch_memory_total_bytes and gpuwatch_memory_available_bytes.

    Available is the kernel's own estimate of what can be had without swapping, and psutil's where an old kernel makes none.
    """

    name = "memory"

    def __init__(self, roots: Roots) -> None:
        self._procfs = roots.procfs

    def collect(self) -> Iterable[Sample]:
        """Return total and available memory. Raises: NoData without /proc/meminfo or with too little in it."""
        with psutil_at(self._procfs):
            try:
                memory = psutil.virtual_memory()
            except KeyError as missing:
                raise NoData(f"{self._procfs / 'meminfo'} has no entry {missing}") from None
        return [
            Sample("gpuwatch_memory_total_bytes", memory.total),
            Sample("gpuwatch_memory_available_bytes", memory.available),
        ]
