"""A process's control groups, versions 1 and 2: limits of CPU and memory, OOM kills. Groups are given by `folders`.

Source: cgroups(7); cgroup-v2.rst and cgroup-v1/memory.rst of the kernel's documentation.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Literal

import msgspec

from gpuwatch.host.proc import PROC, optional, read, text_of

SYS = Path("/sys")
_NO_LIMIT = 1 << 60  # version 1's "no limit" is an impossible size
_BYTES = {
    "limit": ("memory.max", "memory.limit_in_bytes"),
    "used": ("memory.current", "memory.usage_in_bytes"),
    "peak": ("memory.peak", "memory.max_usage_in_bytes"),
}
KILLS = ("memory.events", "memory.oom_control")  # of version 2, with the kills in groups within, and of version 1


class Quota(msgspec.Struct, frozen=True):
    """The tightest CPU quota over a process, and how often it was throttled."""

    cores: float
    periods: int
    throttled: int  # of these periods
    folder: str = ""  # the group whose quota it is


class MemoryRoom(msgspec.Struct, frozen=True):
    """Memory that a process can still use within the limits of its control groups."""

    available_bytes: int
    limit_bytes: int  # of the group with the least available; so the next two
    used_bytes: int  # page cache included
    folder: Path


def parse(text: str) -> list[tuple[str, str]]:
    """Return (controllers, path) of each line of /proc/PID/cgroup; no controllers in version 2. Source: cgroups(7)."""
    words = ((*line.split(":", 2), "", "") for line in text.splitlines())
    return [(controllers, path) for _, controllers, path, *_ in words]


def folders(
    controller: str, procfs: Path = PROC, sysfs: Path = SYS, pid: int | str = "self", root: bool = True
) -> list[Path]:
    """Return the folders of a process's cgroup and parents for a controller ("": unified hierarchy), innermost first.

    In a container the path may be the node's, while the container's own cgroup is mounted: the mount's top is last for
    this process, absent without `root`. Another one whose path does not exist here has none. Source: /proc/PID/cgroup.
    """
    try:
        groups = parse((procfs / str(pid) / "cgroup").read_text(errors="surrogateescape"))
    except OSError:
        return []
    found: list[Path] = []
    for controllers, path in groups:
        if controllers and controller not in controllers.split(","):
            continue
        top = sysfs / "fs/cgroup" / (controller if controllers else "unified")
        if not controllers and not top.is_dir():  # "unified" is there where both versions are mounted
            top = top.parent
        inner = Path(path.strip("/"))
        if pid != "self" and (".." in inner.parts or not (top / inner).is_dir()):
            continue
        found += [top / part for part in (inner, *inner.parents) if ".." not in part.parts and (root or part.parts)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def quota(groups: Sequence[Path]) -> Quota | None:
    """Return the CPU quota of groups, None for none. Source: cpu.max or cpu.cfs_*_us, and cpu.stat."""
    limited = [(cores, folder) for folder in groups if (cores := _cores(folder)) is not None]
    if not limited:
        return None
    cores, folder = min(limited, key=lambda each: each[0])
    counts = _counts(f"{folder}/cpu.stat")
    return Quota(cores, counts.get("nr_periods", 0), counts.get("nr_throttled", 0), str(folder))


def tasks_limit(groups: Sequence[Path]) -> int | None:
    """Return the tightest limit of processes and threads in groups, None for none. Source: pids.max."""
    limits = (text_of(f"{folder}/pids.max") for folder in groups)
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def memory_room(groups: Sequence[Path]) -> MemoryRoom | None:
    """Return what is available within the memory limits of groups; None without a limit.

    Inactive page cache counts as available. Source: memory.max, memory.current and memory.stat, or those of version 1.
    """
    rooms = []
    for folder in groups:
        if (limit := memory_bytes(folder, "limit")) is None or (used := memory_bytes(folder, "used")) is None:
            continue
        counts = _counts(f"{folder}/memory.stat")
        cache = counts.get("total_inactive_file", counts.get("inactive_file", 0))  # with its children, in version 1
        rooms.append(MemoryRoom(max(0, limit - used + cache), limit, used, folder))
    return min(rooms, key=lambda room: room.available_bytes, default=None)


def throttled_ratio(first: Quota | None, last: Quota | None) -> float | None:
    """Return the share of throttled periods of the quota between two samples; None without a quota, or a period."""
    if first is None or last is None or last.periods <= first.periods:
        return None
    return min(1.0, max(0.0, (last.throttled - first.throttled) / (last.periods - first.periods)))


def within_quota(cores: int, granted: Quota | None) -> int:
    """Return `cores` limited by a quota, rounded up."""
    return cores if granted is None else max(1, min(cores, ceil(granted.cores)))


def within_limit(on_node: int | None, room: MemoryRoom | None) -> int | None:
    """Return the node's available memory limited by the room within groups; None where neither is known."""
    return on_node if room is None else min(room.available_bytes, room.available_bytes if on_node is None else on_node)


def oom_kills(groups: Sequence[Path]) -> int | None:
    """Return the OOM kills in the innermost group that counts them; None where they are not counted.

    Source: `oom_kill` in memory.events, in version 1 memory.oom_control. Both count kills for lack of node memory too.
    """
    return next((count for folder in groups if (count := kills_in(folder)) is not None), None)


def kills_in(folder: Path) -> int | None:
    """Return the OOM kills in one group, in version 2 with its children; None where not counted, or it is gone."""
    counts = (_counts(f"{folder}/{file}").get("oom_kill") for file in KILLS)
    return next((count for count in counts if count is not None), None)


def memory_bytes(folder: Path, what: Literal["limit", "used", "peak"]) -> int | None:
    """Return a group's own memory limit, the memory in use, page cache included, or its peak.

    None for no limit ("max" in version 2), a group that is gone, and the peak before Linux 5.19 in version 2.
    """
    text = next((found for name in _BYTES[what] if (found := text_of(f"{folder}/{name}"))), "")
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _cores(folder: Path) -> float | None:
    fields = (text_of(f"{folder}/cpu.max") or text_of(f"{folder}/cpu.cfs_quota_us")).split()
    fields += text_of(f"{folder}/cpu.cfs_period_us").split()
    try:
        return None if fields[0] in ("max", "-1") else int(fields[0]) / int(fields[1])
    except (ValueError, IndexError, ZeroDivisionError):
        return None


def _counts(path: str) -> dict[str, int]:
    """Return a file of `name number` lines; {} if it is absent."""
    rows = optional(read, path, lambda text: [(name, int(value)) for name, value in map(str.split, text.splitlines())])
    return dict(rows or ())
