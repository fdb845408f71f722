"""CPU time of the node by mode, and its cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuwatch.host.proc import TICKS_PER_S, parse_cpu_times
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, read_text

_LARGEST_STEP_BACK_S = 3.0


def never_back(last: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return `now` with small steps back held at the last value.

    Idle and iowait are computed from two clocks and do go back a little (proc_stat(5) says so of iowait); a counter
    that decreases reads as a restart, so that all of its past would be added again. A large step back is a real
    restart, that of a migrated container, and passes.
    """
    return {
        mode: last[mode] if 0 < last.get(mode, value) - value <= _LARGEST_STEP_BACK_S else value
        for mode, value in now.items()
    }


class CpuCollector:
    """gpuwatch_cpu_seconds_total, gpuwatch_cpu_cores, and with `cores` gpuwatch_cpu_core_busy_seconds_total."""

    name = "cpu"

    def __init__(self, roots: Roots, ticks_per_s: int = TICKS_PER_S, cores: bool = False) -> None:
        self._path = roots.procfs / "stat"
        self._ticks_per_s = ticks_per_s
        self._last: dict[str, float] = {}
        self._cores = cores
        self._last_busy: dict[str, float] = {}

    def collect(self) -> Iterable[Sample]:
        """Return the CPU time of the node since boot. Raises: NoData without /proc/stat."""
        times = parse_cpu_times(read_text(self._path), self._ticks_per_s)
        self._last = never_back(self._last, times.seconds)
        samples = [Sample("gpuwatch_cpu_seconds_total", value, (mode,)) for mode, value in self._last.items()]
        if times.cores:
            samples.append(Sample("gpuwatch_cpu_cores", times.cores))
        if self._cores:
            self._last_busy = never_back(self._last_busy, times.busy_seconds)
            samples += [Sample("gpuwatch_cpu_core_busy_seconds_total", s, (cpu,)) for cpu, s in self._last_busy.items()]
        return samples
