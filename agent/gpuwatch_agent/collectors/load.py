"""Load average and the run queue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, read_text


@dataclass(frozen=True)
class Load:
    """The node's run queue."""

    load1: float
    """Mean number of tasks that ran, waited for a CPU or slept uninterruptibly, over about one minute."""
    running: int
    """Tasks that run or wait for a CPU now, on all cores; the reader itself is one of them."""


def parse_loadavg(text: str) -> Load:
    """Return what /proc/loadavg says, as in "0.20 0.18 0.12 1/80 11206".

    Source: proc_loadavg(5). The number before the slash is what /proc/stat calls procs_running, without the cost of
    /proc/stat, which adds up every interrupt of every core. Raises: NoData for an empty file, ValueError for odd text.
    """
    fields = text.split()
    if not fields:
        raise NoData("loadavg is empty")
    if len(fields) < 4 or "/" not in fields[3]:
        raise ValueError(f"loadavg: not as in proc_loadavg(5): {text.strip()!r}")
    return Load(load1=float(fields[0]), running=int(fields[3].partition("/")[0]))


class LoadCollector:
    """gpuwatch_load1 and gpuwatch_procs_running."""

    name = "load"

    def __init__(self, roots: Roots) -> None:
        self._path = roots.procfs / "loadavg"

    def collect(self) -> Iterable[Sample]:
        """Return load and run queue. Raises: NoData without /proc/loadavg."""
        load = parse_loadavg(read_text(self._path))
        return [Sample("gpuwatch_load1", load.load1), Sample("gpuwatch_procs_running", load.running)]
