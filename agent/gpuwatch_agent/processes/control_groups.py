"""Each run's control group (its container's, its job's), versions 1 and 2: limits, use, pressure, OOM kills.

A group's series are exported once, for the lowest rank in it. The root group is the node itself, which the collectors cover.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpuwatch.diagnosis.window import MemoryKills
from gpuwatch.host import cgroup, proc
from gpuwatch.metrics import Sample
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import LOST, RUNNING, Run


def group_samples(runs: Sequence[Run], table: ProcessTable, procfs: Path, sysfs: Path) -> Iterator[Sample]:
    """Yield the series of every control group that a run lives in."""
    seen: set[tuple[str, tuple[Path, ...]]] = set()
    for run in sorted(runs, key=lambda run: (run.run, run.rank)):
        pid = table.host_pid(run.live_hello)
        if pid is None:
            continue
        memory = cgroup.folders("memory", procfs, sysfs, pid, root=False)
        unified = cgroup.folders("", procfs, sysfs, pid, root=False)
        key = (run.run, (*memory[:1], *unified[:1]))
        if key in seen:
            continue
        seen.add(key)
        values: dict[str, float | None] = {}
        if memory:
            limits = [limit for folder in memory if (limit := cgroup.limit_bytes(folder)) is not None]
            values["gpuwatch_run_memory_limit_bytes"] = min(limits, default=None)
            values["gpuwatch_run_memory_used_bytes"] = cgroup.used_bytes(memory[0])
            values["gpuwatch_run_oom_kills_total"] = cgroup.kills_in(memory[0])
        for resource in ("cpu", "io", "memory") if unified else ():
            with contextlib.suppress(OSError, ValueError):  # absent, or the kernel has it switched off
                waited_s = proc.parse_pressure((unified[0] / f"{resource}.pressure").read_text()).get("some")
                values[f"gpuwatch_run_pressure_{resource}_waiting_seconds_total"] = waited_s
        labels = (run.run, str(run.rank))
        yield from (Sample(metric, value, labels) for metric, value in values.items() if value is not None)


_Key = tuple[str, int]
_Where = Literal["group", "around", "node"]
_MOST_SAMPLES = 30
"""A process alive for so many seconds without a message was not killed before them: a killed one is gone sooner."""


@dataclass(frozen=True)
class _Group:
    """The memory of a process's control group, and of those around it."""

    kills: Mapping[Path, int] = field(default_factory=dict)
    """By folder of a group that counts them, the innermost first."""
    own: Path | None = None
    """The innermost folder; None where it is not visible."""
    room: cgroup.MemoryRoom | None = None
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

    def update(self, runs: Sequence[Run], now_ns: int) -> None:
        """Sample the counts of running runs; give lost runs what was counted since their last message."""
        samples, self._samples = self._samples, {}
        groups: dict[Path, _Group] = {}
        on_node = proc.oom_kills_on_node(self._procfs) if any(run.status == RUNNING for run in runs) else None
        for run in runs:
            seen = samples.get(run.key, [])
            if run.status == LOST and seen:
                run.oom = self._grown(seen)
            elif run.status == RUNNING and run.hello is not None:
                pid = self._table.host_pid(run.hello)
                if pid is not None:
                    resident = self._table.read(proc.resident_bytes, pid)
                    seen = [*seen[1 - _MOST_SAMPLES :], _Sample(now_ns, self._group(pid, groups), on_node, resident)]
                # A kill may come right after a message: only a sample from before that has certainly not counted it.
                before = [number for number, each in enumerate(seen) if each.at_ns <= run.heard_ns]
                self._samples[run.key] = seen[before[-1] if before else 0 :]

    def _group(self, pid: int, known: dict[Path, _Group]) -> _Group:
        """Return a process's control group as it is now; `known` are those of this tick, which ranks may share."""
        folders = cgroup.folders("memory", self._procfs, self._sysfs, pid)
        if not folders:
            return _Group()
        if folders[0] not in known:
            counting = folders if cgroup.counts_those_within(folders[0]) else folders[:1]
            kills = {folder: count for folder in counting if (count := cgroup.kills_in(folder)) is not None}
            room = cgroup.room_within(folders)
            peak = None if room is None else cgroup.peak_bytes(room.folder)
            known[folders[0]] = _Group(kills, folders[0], room, peak)
        return known[folders[0]]

    def _grown(self, seen: Sequence[_Sample]) -> MemoryKills | None:
        where, kills = self._kills_since(seen[0])
        if kills <= 0:
            return None
        rooms = [each.group.room for each in seen if each.group.room is not None]
        last_peak = cgroup.peak_bytes(rooms[-1].folder) if rooms else None
        return MemoryKills(
            where=where,
            kills=kills,
            limit_bytes=rooms[-1].limit_bytes if rooms else None,
            # The kernel takes a killed process's memory back before it is gone: the last sample may have seen little of it.
            used_bytes=_most(room.used_bytes for room in rooms),
            peak_bytes=_most([*(each.group.peak_bytes for each in seen), last_peak]),
            resident_bytes=_most(each.resident_bytes for each in seen),
        )

    def _kills_since(self, before: _Sample) -> tuple[_Where, int]:
        """Return (whose count was read, by how much it grew): of the innermost group that still has one, else of the node."""
        for folder, count in before.group.kills.items():
            now = cgroup.kills_in(folder)
            if now is not None:
                return ("group" if folder == before.group.own else "around"), now - count
        now = proc.oom_kills_on_node(self._procfs)
        return "node", 0 if now is None or before.on_node is None else now - before.on_node


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
