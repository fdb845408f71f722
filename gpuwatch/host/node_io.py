"""Bytes over the network and work of the disks, as one process sees them. Each raises NoData where there is nothing."""

from __future__ import annotations

import re
from pathlib import Path

from gpuwatch.errors import NoData

_NO_DISK = re.compile(r"loop|ram|zram|fd\d|sr\d|md\d|dm-|.*\dp\d+$|[shv]d[a-z]+\d+$|xvd[a-z]+\d+$")
"""Devices that hold no bytes of their own, and partitions: their disk counts them."""


def received_bytes(procfs_process: Path = Path("/proc/self")) -> int:
    """Return the bytes received on all interfaces of a process's network namespace, the loopback included.

    Source: /proc/PID/net/dev, proc_pid_net(5).
    """
    try:
        lines = (procfs_process / "net" / "dev").read_text().splitlines()[2:]
        return sum(int(line.rpartition(":")[2].split()[0]) for line in lines)
    except (OSError, ValueError, IndexError) as error:
        raise NoData(f"{procfs_process}/net/dev: {error}") from error


def disks(procfs: Path = Path("/proc")) -> dict[str, tuple[int, float]]:
    """Return (bytes read, seconds with work) since boot by disk. Source: /proc/diskstats, the kernel's iostats documentation."""
    found = {}
    try:
        for line in (procfs / "diskstats").read_text().splitlines():
            fields = line.split()
            if not _NO_DISK.match(fields[2]):
                found[fields[2]] = (int(fields[5]) * 512, int(fields[12]) / 1000)
    except (OSError, ValueError, IndexError) as error:
        raise NoData(f"{procfs}/diskstats: {error}") from error
    if not found:
        raise NoData("this node shows no disk")
    return found
