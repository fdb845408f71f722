"""Bytes and busy time of whole disks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, read_text

_SECTOR_BYTES = 512
"""The kernel's unit in these files, whatever the disk's own (Documentation/block/stat.rst)."""

_NOT_A_DISK = re.compile(r"(loop|ram|zram|fd|sr|dm-|md|bcache|drbd|nvme\d+c\d+n)\d")
"""Memory, files and removable media; and devices made of other disks, whose bytes are counted there already."""


@dataclass(frozen=True)
class DiskCounters:
    """One block device since boot."""

    read_bytes: int
    written_bytes: int
    io_time_s: float
    """Time with at least one request in flight. Busy, and not "full": an SSD serves many at once."""


def parse_diskstats(text: str) -> dict[str, DiskCounters]:
    """Return the counters of each block device, partitions among them, in /proc/diskstats.

    Source: Documentation/admin-guide/iostats.rst: after major, minor and name come reads, merged, sectors read, ms
    reading, writes, merged, sectors written, ms writing, in flight, ms busy. The times are 32-bit and wrap after 49.7
    days of work. A line that is shorter (partitions of very old kernels) is left out. Raises: ValueError for odd text.
    """
    counters = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 14:
            counters[fields[2]] = DiskCounters(
                read_bytes=int(fields[5]) * _SECTOR_BYTES,
                written_bytes=int(fields[9]) * _SECTOR_BYTES,
                io_time_s=int(fields[12]) / 1000,
            )
    return counters


def is_disk(name: str) -> bool:
    """Return whether a block device that is no partition is a disk of its own: True for "sda", False for "dm-0"."""
    return _NOT_A_DISK.match(name) is None


class DiskCollector:
    """The gpuwatch_disk_* metrics."""

    name = "disk"

    def __init__(self, roots: Roots) -> None:
        self._diskstats = roots.procfs / "diskstats"
        self._block = roots.sysfs / "block"

    def collect(self) -> Iterable[Sample]:
        """Return the counters of every disk. Raises: NoData on a node without a disk (booted from the network, say)."""
        counters = parse_diskstats(read_text(self._diskstats))
        try:
            whole = {entry.name for entry in self._block.iterdir()}  # partitions are not listed at this level
        except FileNotFoundError:
            raise NoData(f"{self._block} does not exist here: disks cannot be told from partitions") from None
        # a slash in a device's name is a "!" in sysfs (cciss/c0d0)
        disks = {name: c for name, c in counters.items() if name.replace("/", "!") in whole and is_disk(name)}
        if not disks:
            raise NoData("this node has no disk")
        samples = []
        for name, disk in disks.items():
            samples += [
                Sample("gpuwatch_disk_read_bytes_total", disk.read_bytes, (name,)),
                Sample("gpuwatch_disk_written_bytes_total", disk.written_bytes, (name,)),
                Sample("gpuwatch_disk_io_time_seconds_total", disk.io_time_s, (name,)),
            ]
        return samples
