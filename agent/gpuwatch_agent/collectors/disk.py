"""Bytes and busy time of whole disks."""

from __future__ import annotations

import re
from collections.abc import Iterable

import psutil

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, psutil_at

_NOT_A_DISK = re.compile(r"(loop|ram|zram|fd|sr|dm-|md|bcache|drbd|nvme\d+c\d+n)\d")
"""Memory, files and removable media; and devices made of other disks, whose bytes are counted there already."""


def is_disk(name: str) -> bool:
    """Return whether a block device that is no partition is a disk of its own: True for "sda", False for "dm-0"."""
    return _NOT_A_DISK.match(name) is None


class DiskCollector:
    """The gpuwatch_disk_* metrics.

    I/O time is time with at least one request in flight: busy, and not "full", for an SSD serves many at once. The kernel's counter of it
    wraps after 49.7 days of work.
    """

    name = "disk"

    def __init__(self, roots: Roots) -> None:
        self._procfs = roots.procfs
        self._block = roots.sysfs / "block"

    def collect(self) -> Iterable[Sample]:
        """Return the counters of every disk. Raises: NoData on a node without a disk (booted from the network, say)."""
        with psutil_at(self._procfs):
            if not (self._procfs / "diskstats").exists():  # psutil would read the container's own /sys
                raise NoData(f"{self._procfs / 'diskstats'} does not exist here")
            counters = psutil.disk_io_counters(perdisk=True, nowrap=False)
        try:
            whole = {entry.name for entry in self._block.iterdir()}  # partitions are not listed at this level
        except FileNotFoundError:
            raise NoData(f"{self._block} does not exist here: disks cannot be distinguished from partitions") from None
        # a slash in a device's name is a "!" in sysfs (cciss/c0d0)
        disks = {name: c for name, c in counters.items() if name.replace("/", "!") in whole and is_disk(name)}
        if not disks:
            raise NoData("this node has no disk")
        samples = []
        for name, disk in disks.items():
            samples += [
                Sample("gpuwatch_disk_read_bytes_total", disk.read_bytes, (name,)),
                Sample("gpuwatch_disk_written_bytes_total", disk.write_bytes, (name,)),
                Sample("gpuwatch_disk_io_time_seconds_total", disk.busy_time / 1000, (name,)),
            ]
        return samples
