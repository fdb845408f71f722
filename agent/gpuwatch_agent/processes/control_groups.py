"""Each run's control group (its container's, its job's), versions 1 and 2: limits, use, pressure, OOM kills.

A group's series are exported once, for the lowest rank in it. The root group is the node itself, which the collectors cover.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpuwatch.diagnosis.window import MemoryKills
from gpuwatch.host import proc
from gpuwatch.host.cgroup import (
    MemoryRoom,
    counts_those_within,
    folders,
    kills_in,
    limit_bytes,
    peak_bytes,
    room_within,
    used_bytes,
)
from gpuwatch.metrics import Sample
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import LOST, RUNNING, Run

_PRESSURE = {
    "cpu": "gpuwatch_run_pressure_cpu_waiting_seconds_total",
    "io": "gpuwatch_run_pressure_io_waiting_seconds_total",
    "memory": "gpuwatch_run_pressure_memory_waiting_seconds_total",
}


def group_samples(runs: Sequence[Run], table: ProcessTable, procfs: Path, sysfs: Path) -> Iterator[Sample]:
    """Yield the series of every control group that a run lives in."""
    seen: set[tuple[str, tuple[Path, ...]]] = set()
    for run in sorted(runs, key=lambda run: (run.run, run.rank)):
        pid = table.host_pid(run.live_hello)
        if pid is None:
            continue
        memory = folders("memory", procfs, sysfs, pid, root=False)
        unified = folders("", procfs, sysfs, pid, root=False)
        key = (run.run, (*memory[:1], *unified[:1]))
        if key in seen:
            continue
        seen.add(key)
        labels = (run.run, str(run.rank))
        if memory:
            limits = [limit for folder in memory if (limit := limit_bytes(folder)) is not None]
            values = {
                "gpuwatch_run_memory_limit_bytes": min(limits, default=None),
                "gpuwatch_run_memory_used_bytes": used_bytes(memory[0]),
                "gpuwatch_run_oom_kills_total": kills_in(memory[0]),
            }
            yield from (Sample(metric, value, labels) for metric, value in values.items() if value is not None)
        if unified:
            yield from _pressure(unified[0], labels)


def _pressure(group: Path, labels: tuple[str, str]) -> Iterator[Sample]:
    for resource, metric in _PRESSURE.items():
        try:
            waited_s = proc.parse_pressure((group / f"{resource}.pressure").read_text()).get("some")
        except (OSError, ValueError):  # absent, or the kernel has it switched off
            continue
        if waited_s is not None:
            yield Sample(metric, waited_s, labels)


_Key = tuple[str, int]
_Where = Literal["group", "around", "node"]
_MOST_SAMPLES = 30
"""A process alive for so many seconds without a message was not killed before them: a killed one is gone sooner."""


@dataclass(frozen=True)
class _Group:
    """The control group of a process, and those around it."""

    own: Path | None = None
    """Its folder; None where it is not visible."""
    kills: Mapping[Path, int] = field(default_factory=dict)
    """By folder of a group that counts them, the innermost first."""
    room: MemoryRoom | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class _Sample:
    """A process while it was alive, or a zombie."""

    at_ns: int
    group: _Group
    on_node: int | None
    resident_bytes: int | None


class OomWatch:
    """Follows the OOM kill counts of every running run."""

    def __init__(self, table: ProcessTable, procfs: Path, sysfs: Path) -> None:
        self._table = table
        self._procfs = procfs
        self._sysfs = sysfs
        self._samples: dict[_Key, list[_Sample]] = {}
        """Those since the last sign of life, and the last one before it; the oldest first."""
        self._groups: dict[Path, _Group] = {}
        """Of this tick."""
        self._folders: dict[int, list[Path]] = {}
        """Folders of each live process's control groups, innermost first: resolved once, as a process stays in its group."""
        self._folders_before: dict[int, list[Path]] = {}

    def update(self, runs: Sequence[Run], now_ns: int) -> None:
        """Sample the counts of running runs; give lost runs what was counted since their last message."""
        samples, self._samples = self._samples, {}
        self._folders_before, self._folders = self._folders, {}
        self._groups.clear()
        on_node = proc.oom_kills_on_node(self._procfs) if any(run.status == RUNNING for run in runs) else None
        for run in runs:
            key = run.key
            seen = samples.get(key, [])
            if run.status == LOST and seen:
                run.oom = self._grown(seen)
            elif run.status == RUNNING and run.hello is not None:
                pid = self._table.host_pid(run.hello)
                if pid is not None:
                    resident = self._table.read(proc.resident_bytes, pid)
                    seen = [*seen[1 - _MOST_SAMPLES :], _Sample(now_ns, self._group(pid), on_node, resident)]
                # A kill may come right after a message: only a sample from before that has certainly not counted it.
                before = [number for number, each in enumerate(seen) if each.at_ns <= run.heard_ns]
                self._samples[key] = seen[before[-1] if before else 0 :]

    def _group(self, pid: int) -> _Group:
        """Return a process's control group as it is now: read once per tick for all ranks in it."""
        groups = self._folders[pid] = self._folders_before.get(pid) or folders("memory", self._procfs, self._sysfs, pid)
        if not groups:
            return _Group()
        known = self._groups.get(groups[0])
        if known is None:
            telling = groups if counts_those_within(groups[0]) else groups[:1]
            kills = {folder: count for folder in telling if (count := kills_in(folder)) is not None}
            room = room_within(groups)
            known = _Group(groups[0], kills, room, None if room is None else peak_bytes(room.folder))
            self._groups[groups[0]] = known
        return known

    def _grown(self, seen: Sequence[_Sample]) -> MemoryKills | None:
        where, kills = self._kills_since(seen[0])
        if kills <= 0:
            return None
        rooms = [each.group.room for each in seen if each.group.room is not None]
        peaks = [each.group.peak_bytes for each in seen] + ([peak_bytes(rooms[-1].folder)] if rooms else [])
        return MemoryKills(
            where=where,
            kills=kills,
            limit_bytes=rooms[-1].limit_bytes if rooms else None,
            # The kernel takes a killed process's memory back before it is gone: the last sample may have seen little of it.
            used_bytes=max((room.used_bytes for room in rooms), default=None),
            peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
            resident_bytes=max((each.resident_bytes for each in seen if each.resident_bytes is not None), default=None),
        )

    def _kills_since(self, before: _Sample) -> tuple[_Where, int]:
        """Return (whose count was read, by how much it grew): of the innermost group that still has one, else of the node."""
        for folder, count in before.group.kills.items():
            now = kills_in(folder)
            if now is not None:
                return ("group" if folder == before.group.own else "around"), now - count
        now = proc.oom_kills_on_node(self._procfs)
        return "node", 0 if now is None or before.on_node is None else now - before.on_node
