"""Memory of the node."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwatch.errors import NoData
from gpuwatch.host.proc import memory_bytes
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots


class MemoryCollector:
    """gpuwatch_memory_total_bytes and gpuwatch_memory_available_bytes: the kernel's own estimate of what can be had without swapping."""

    name = "memory"

    def __init__(self, roots: Roots) -> None:
        self._procfs = roots.procfs

    def collect(self) -> Iterable[Sample]:
        """Return total and available memory. Raises: NoData without /proc/meminfo or with too little in it."""
        memory = memory_bytes(self._procfs)
        names = {"MemTotal": "gpuwatch_memory_total_bytes", "MemAvailable": "gpuwatch_memory_available_bytes"}
        if missing := names.keys() - memory.keys():
            raise NoData(f"{self._procfs / 'meminfo'} has no entry {', '.join(sorted(missing))}")
        return [Sample(metric, memory[name]) for name, metric in names.items()]
