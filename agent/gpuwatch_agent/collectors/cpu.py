"""CPU time of the node by mode, and its cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, read_text

MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""The columns of a cpu line that together are all of the time. `guest` and `guest_nice` follow them in the file and are
left out: the kernel counts guest time in `user` and `nice` as well (proc_stat(5), kernel/sched/cputime.c)."""

_LARGEST_STEP_BACK_S = 3.0


@dataclass(frozen=True)
class CpuTimes:
    """All cores together since boot."""

    seconds: Mapping[str, float]
    """By mode. A mode that an old kernel does not count is absent."""
    cores: int
    """Cores that are online."""
    busy_seconds: Mapping[str, float]
    """Of each online core by its number: all but idle and iowait."""


def parse_stat(text: str, ticks_per_s: int) -> CpuTimes:
    """Return the CPU times in /proc/stat, whose unit is the tick of `sysconf(_SC_CLK_TCK)`.

    Source: proc_stat(5). Only online cores have a `cpuN` line. Raises: NoData if there is no `cpu` line, ValueError
    for a number that is none.
    """
    seconds: dict[str, float] | None = None
    busy: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("cpu"):
            break  # the cpu lines come first, and the one that follows is by far the longest
        label, *ticks = line.split()
        if label == "cpu":
            seconds = {mode: int(value) / ticks_per_s for mode, value in zip(MODES, ticks, strict=False)}
        else:
            times = [int(value) for value in ticks[: len(MODES)]]
            busy[label.removeprefix("cpu")] = (sum(times) - sum(times[3:5])) / ticks_per_s
    if seconds is None:
        raise NoData("stat has no line of all CPUs")
    return CpuTimes(seconds, len(busy), busy)


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

    def __init__(self, roots: Roots, ticks_per_s: int | None = None, cores: bool = False) -> None:
        self._path = roots.procfs / "stat"
        self._ticks_per_s = ticks_per_s or os.sysconf("SC_CLK_TCK")
        self._last: dict[str, float] = {}
        self._cores = cores
        self._last_busy: dict[str, float] = {}

    def collect(self) -> Iterable[Sample]:
        """Return the CPU time of the node since boot. Raises: NoData without /proc/stat."""
        times = parse_stat(read_text(self._path), self._ticks_per_s)
        self._last = never_back(self._last, times.seconds)
        samples = [Sample("gpuwatch_cpu_seconds_total", value, (mode,)) for mode, value in self._last.items()]
        if times.cores:
            samples.append(Sample("gpuwatch_cpu_cores", times.cores))
        if self._cores:
            self._last_busy = never_back(self._last_busy, times.busy_seconds)
            samples += [Sample("gpuwatch_cpu_core_busy_seconds_total", s, (cpu,)) for cpu, s in self._last_busy.items()]
        return samples
