"""What a trial may take of the machine, and what its processes take. Linux; what cannot be read is None."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.errors import NoData
from gpuwatch.host.cgroup import memory_room
from gpuwatch.host.proc import shm_bytes


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
    available, total = _meminfo(procfs)
    limit = memory_room(procfs, sysfs)
    if limit is not None and (available is None or limit.available_bytes < available):
        available, total = limit.available_bytes, limit.limit_bytes
    try:
        shm_size, shm_used = shm_bytes(shm)
    except NoData:
        return Room(cores, available, total)
    return Room(cores, available, total, shm_size - shm_used, shm_size)


def _meminfo(procfs: Path) -> tuple[int | None, int | None]:
    """Return (available, total). Source: /proc/meminfo, proc(5)."""
    try:
        fields = dict(line.split(":", 1) for line in (procfs / "meminfo").read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024, int(fields["MemTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None, None


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
    """Return (resident, private) bytes of a process; None if it is gone or not ours. Source: /proc/PID/smaps_rollup."""
    try:
        lines = (procfs / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return sizes["Rss"], sizes["Private_Clean"] + sizes["Private_Dirty"] + sizes.get("Swap", 0)
    except (OSError, KeyError, ValueError, IndexError):
        return None


def core_wait_s(pids: Iterable[int], procfs: Path = Path("/proc")) -> dict[int, float]:
    """Return for how long each process's main thread has waited for a core, in seconds. Source: /proc/PID/schedstat."""
    found = {}
    for pid in pids:
        try:
            found[pid] = int((procfs / str(pid) / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            continue
    return found


def read_bytes(pids: Iterable[int], procfs: Path = Path("/proc")) -> int | None:
    """Return the bytes that these processes have had read from storage; None where none can be read. Source: /proc/PID/io."""
    total: int | None = None
    for pid in pids:
        try:
            text = (procfs / str(pid) / "io").read_text()
            total = (total or 0) + int(text.partition("\nread_bytes:")[2].split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return total


def give_cores(count: int) -> None:
    """Keep this process and its children on so many of its cores; one that may use no more is left as it is."""
    try:
        mine = sorted(os.sched_getaffinity(0))
        if count < len(mine):
            os.sched_setaffinity(0, mine[:count])
    except (AttributeError, OSError):
        pass
