"""Memory of the node."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, read_text

_METRICS = {
    "MemTotal": "gpuwatch_memory_total_bytes",
    "MemAvailable": "gpuwatch_memory_available_bytes",
}


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the entries of /proc/meminfo that are exported, in bytes.

    Source: proc_meminfo(5); "kB" there means 1,024 bytes. `MemAvailable` is the kernel's own estimate of what can be
    had without swapping, and not `MemFree`, which leaves the page cache out. Raises: ValueError for odd text.
    """
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in _METRICS:
            value, *unit = rest.split()
            if unit != ["kB"]:
                raise ValueError(f"meminfo: no unit kB in {line!r}")
            sizes[name] = int(value) * 1024
    return sizes


class MemoryCollector:
    """gpuwatch_memory_total_bytes and gpuwatch_memory_available_bytes."""

    name = "memory"

    def __init__(self, roots: Roots) -> None:
        self._path = roots.procfs / "meminfo"

    def collect(self) -> Iterable[Sample]:
        """Return total and available memory. Raises: NoData without /proc/meminfo or with neither entry in it."""
        sizes = parse_meminfo(read_text(self._path))
        if not sizes:
            raise NoData(f"{self._path} has neither MemTotal nor MemAvailable")
        return [Sample(_METRICS[name], size) for name, size in sizes.items()]
