"""What the agent itself costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gpuwatch.errors import NoData
from gpuwatch.host.proc import PAGE_BYTES, resident_bytes
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots


class AgentProcessCollector:
    """gpuwatch_agent_cpu_seconds_total and gpuwatch_agent_resident_memory_bytes."""

    name = "agent_process"

    def __init__(
        self,
        roots: Roots,
        cpu_time_s: Callable[[], float] = time.process_time,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self._procfs = roots.procfs
        self._cpu_time_s = cpu_time_s
        self._page_bytes = page_bytes

    def collect(self) -> Iterable[Sample]:
        """Return CPU time, of all threads, user and system, and resident memory, where /proc tells it."""
        samples = [Sample("gpuwatch_agent_cpu_seconds_total", self._cpu_time_s())]
        try:
            resident = resident_bytes("self", self._procfs, self._page_bytes)
        except NoData:
            return samples  # another pid namespace's /proc, in which the agent is not
        return [*samples, Sample("gpuwatch_agent_resident_memory_bytes", resident)]
