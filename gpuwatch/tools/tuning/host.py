"""What a trial may take of the machine, and what its processes take. Linux; what cannot be read is None."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.errors import NoData
from gpuwatch.host.cgroup import memory_room
from gpuwatch.host.proc import by_pid, io_bytes, mapped_bytes, memory_bytes
from gpuwatch.host.shm import shm_bytes


@dataclass(frozen=True)
class Room:
    """What is free now. Sizes in bytes; None: not known."""

    cores: int
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    shm_bytes: int | None = None
    shm_total_bytes: int | None = None


def room(cores: int, shm: Path = Path("/dev/shm"), procfs: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> Room:
    """Return what is free now, the memory limit of the container or the job heeded."""
    try:
        memory = memory_bytes(procfs)
    except (NoData, ValueError):
        memory = {}
    available, total = memory.get("MemAvailable"), memory.get("MemTotal")
    limit = memory_room(procfs, sysfs)
    if limit is not None and (available is None or limit.available_bytes < available):
        available, total = limit.available_bytes, limit.limit_bytes
    try:
        shm_size, shm_used = shm_bytes(shm)
    except NoData:
        return Room(cores, available, total)
    return Room(cores, available, total, shm_size - shm_used, shm_size)


def descendants(pid: int, procfs: Path = Path("/proc")) -> list[int]:
    """Return the pids of a process's children and theirs. Source: /proc/PID/task/TID/children."""
    found: list[int] = []
    todo = [pid]
    while todo:
        current = todo.pop()
        try:
            tasks = list((procfs / str(current) / "task").iterdir())
        except OSError:
            continue
        for task in tasks:
            try:
                children = [int(child) for child in (task / "children").read_text().split()]
            except (OSError, ValueError):
                continue
            found += children
            todo += children
    return found


def memory_of(pid: int, procfs: Path = Path("/proc")) -> tuple[int, int] | None:
    """Return (resident, private) bytes of a process; None if it is gone or not ours."""
    try:
        sizes = mapped_bytes(pid, procfs)
        return sizes["Rss"], sizes["Private_Clean"] + sizes["Private_Dirty"] + sizes.get("Swap", 0)
    except (NoData, KeyError, ValueError):
        return None


def read_bytes(pids: Iterable[int], procfs: Path = Path("/proc")) -> int | None:
    """Return the bytes that these processes have had read from storage; None where none can be read."""
    found = by_pid(lambda pid, procfs: io_bytes(pid, procfs)[0], pids, procfs)
    return sum(found.values()) if found else None


def give_cores(count: int) -> None:
    """Keep this process and its children on so many of its cores; one that may use no more is left as it is."""
    try:
        mine = sorted(os.sched_getaffinity(0))
        if count < len(mine):
            os.sched_setaffinity(0, mine[:count])
    except (AttributeError, OSError):
        pass
