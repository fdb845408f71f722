"""The cgroups that this process is in, version 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Quota:
    """The tightest CPU quota over this process, and how often it has been held back by it."""

    cores: float
    periods: int
    throttled: int
    """Of these periods."""


def folders(procfs: Path, sysfs: Path, controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of all above it, innermost first, for a controller.

    In a container the path may be the node's while the container's own cgroup is what is mounted: the mount's top is always last.
    Source: /proc/self/cgroup, cgroups(7).
    """
    try:
        lines = (procfs / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = sysfs / "fs/cgroup" / controller if controllers else sysfs / "fs/cgroup"
        inner = Path(path.strip("/"))
        found += [top / part for part in (inner, *inner.parents)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def quota(procfs: Path, sysfs: Path) -> Quota | None:
    """Return the CPU quota, None for none. Source: cpu.max or cpu.cfs_*_us, and cpu.stat; kernel documentation."""
    tightest: Quota | None = None
    for folder in folders(procfs, sysfs, "cpu"):
        cores = _cores(folder)
        if cores is not None and (tightest is None or cores < tightest.cores):
            counts = _counts(folder / "cpu.stat")
            tightest = Quota(cores, counts.get("nr_periods", 0), counts.get("nr_throttled", 0))
    return tightest


def _cores(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            words = (folder / "cpu.max").read_text().split()
        else:
            words = [(folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period")]
        return None if words[0] in ("max", "-1") else int(words[0]) / int(words[1])
    except OSError:
        return None


def _counts(path: Path) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
    except OSError:
        return {}
