"""Pressure stall information: time lost to waiting for CPU, I/O and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuwatch.errors import NoData
from gpuwatch.host.proc import parse_pressure
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, read_text

METRICS: Mapping[str, Mapping[str, str]] = {
    # cpu has a "full" line for symmetry only: for the node as a whole it is always 0 (kernel docs)
    "cpu": {"some": "gpuwatch_pressure_cpu_waiting_seconds_total"},
    "io": {
        "some": "gpuwatch_pressure_io_waiting_seconds_total",
        "full": "gpuwatch_pressure_io_stalled_seconds_total",
    },
    "memory": {
        "some": "gpuwatch_pressure_memory_waiting_seconds_total",
        "full": "gpuwatch_pressure_memory_stalled_seconds_total",
    },
}
"""The metric of each line ("some" task waited, all tasks were stalled in "full") of each file."""


class PressureCollector:
    """The gpuwatch_pressure_* metrics."""

    name = "pressure"

    def __init__(self, roots: Roots) -> None:
        self._directory = roots.procfs / "pressure"

    def collect(self) -> Iterable[Sample]:
        """Return waiting and stalled time. Raises: NoData where the kernel has no PSI (CONFIG_PSI, psi=1)."""
        samples = []
        for resource, metrics in METRICS.items():
            try:
                totals = parse_pressure(read_text(self._directory / resource))
            except NoData:
                continue
            samples += [Sample(metric, totals[line]) for line, metric in metrics.items() if line in totals]
        if not samples:
            raise NoData(f"{self._directory}: this kernel gives no pressure information (boot it with psi=1)")
        return samples
