"""Whether a run that is lost was killed for lack of memory: the kernel's counts of kills, before its last sign of life and after it.

A process that is killed says nothing, and who reaps it is not the agent. What is left is the count of its control group; where that has gone with the
process, those of the groups around it (version 2), else the node's. Source: see `gpuwatch.host.cgroup` and `gpuwatch.host.proc`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpuwatch.errors import NoData
from gpuwatch.host.cgroup import MemoryRoom, counts_those_within, folders, kills_in, peak_bytes, room_within
from gpuwatch.host.proc import oom_kills_on_node, resident_bytes
from gpuwatch.window import MemoryKills
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import LOST, RUNNING, Run

_Key = tuple[str, int]
_Where = Literal["group", "around", "node"]
_MOST_LOOKS = 30
"""A process that lives for so many seconds without a word was not killed before: one that is killed is gone sooner."""


@dataclass(frozen=True)
class _Group:
    """What the control group of a process said, and those around it."""

    own: Path | None = None
    """Its folder; None where it is not to be seen."""
    kills: Mapping[Path, int] = field(default_factory=dict)
    """By folder of a group that tells, the innermost first."""
    room: MemoryRoom | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class _Look:
    """What was to be seen of a process that lived, or had not gone yet."""

    at_ns: int
    group: _Group
    on_node: int | None
    resident_bytes: int | None


class OomWatch:
    """Follows the counts of every run that goes on."""

    def __init__(self, table: ProcessTable, procfs: Path, sysfs: Path) -> None:
        self._table = table
        self._procfs = procfs
        self._sysfs = sysfs
        self._looks: dict[_Key, list[_Look]] = {}
        """Those since the last sign of life, and the last one before it; the oldest first."""
        self._groups: dict[Path, _Group] = {}
        """Of this turn."""
        self._folders: dict[int, list[Path]] = {}
        """Of the control groups of each process that lives, the innermost first: looked up once, for it stays where it was started."""
        self._folders_before: dict[int, list[Path]] = {}

    def look(self, runs: Sequence[Run], now_ns: int) -> None:
        """Note the counts of the runs that go on, and give those that are lost what has been counted since they were heard last."""
        looks, self._looks = self._looks, {}
        self._folders_before, self._folders = self._folders, {}
        self._groups.clear()
        on_node = oom_kills_on_node(self._procfs) if any(run.status == RUNNING for run in runs) else None
        for run in runs:
            key = (run.run, run.rank)
            seen = looks.get(key, [])
            if run.status == LOST and seen:
                run.oom = self._grown(seen)
            elif run.status == RUNNING and run.hello is not None:
                pid = self._table.host_pid(run.hello)
                if pid is not None:
                    seen = [*seen[1 - _MOST_LOOKS :], _Look(now_ns, self._group(pid), on_node, self._resident(pid))]
                # A kill may come right after a message: only a look from before that has certainly not counted it.
                before = [number for number, each in enumerate(seen) if each.at_ns <= run.heard_ns]
                self._looks[key] = seen[before[-1] if before else 0 :]

    def _group(self, pid: int) -> _Group:
        """Return what a process's control group says now: asked once in a turn for all ranks in it."""
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

    def _resident(self, pid: int) -> int | None:
        try:
            return resident_bytes(pid, self._procfs)
        except NoData:
            return None

    def _grown(self, seen: Sequence[_Look]) -> MemoryKills | None:
        where, kills = self._kills_since(seen[0])
        if kills <= 0:
            return None
        rooms = [each.group.room for each in seen if each.group.room is not None]
        peaks = [each.group.peak_bytes for each in seen] + ([peak_bytes(rooms[-1].folder)] if rooms else [])
        return MemoryKills(
            where=where,
            kills=kills,
            limit_bytes=rooms[-1].limit_bytes if rooms else None,
            # The kernel takes a killed process's memory back before it is gone: the last look may have seen little of it.
            used_bytes=max((room.used_bytes for room in rooms), default=None),
            peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
            resident_bytes=max((each.resident_bytes for each in seen if each.resident_bytes is not None), default=None),
        )

    def _kills_since(self, before: _Look) -> tuple[_Where, int]:
        """Return (whose count has been asked, how many more it says): of the innermost group that still tells, else of the node."""
        for folder, count in before.group.kills.items():
            now = kills_in(folder)
            if now is not None:
                return ("group" if folder == before.group.own else "around"), now - count
        now = oom_kills_on_node(self._procfs)
        return "node", 0 if now is None or before.on_node is None else now - before.on_node
