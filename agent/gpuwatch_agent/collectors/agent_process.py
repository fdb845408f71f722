"""What the agent itself costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from gpuwatch.errors import NoData
from gpuwatch.host.proc import parse_statm
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, read_text


class AgentProcessCollector:
    """gpuwatch_agent_cpu_seconds_total and gpuwatch_agent_resident_memory_bytes."""

    name = "agent_process"

    def __init__(
        self,
        roots: Roots,
        cpu_time_s: Callable[[], float] = time.process_time,
        page_bytes: int | None = None,
    ) -> None:
        self._path = roots.procfs / "self" / "statm"
        self._cpu_time_s = cpu_time_s
        self._page_bytes = page_bytes or os.sysconf("SC_PAGE_SIZE")

    def collect(self) -> Iterable[Sample]:
        """Return CPU time, of all threads, user and system, and resident memory, where /proc tells it."""
        samples = [Sample("gpuwatch_agent_cpu_seconds_total", self._cpu_time_s())]
        try:
            resident = parse_statm(read_text(self._path), self._page_bytes)
        except NoData:
            return samples  # another pid namespace's /proc, in which the agent is not
        return [*samples, Sample("gpuwatch_agent_resident_memory_bytes", resident)]


__all__ = ["AgentProcessCollector", "parse_statm"]
