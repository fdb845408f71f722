"""Room in /dev/shm, through which loader workers hand batches to the training process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots


@dataclass(frozen=True)
class ShmRoom:
    """A tmpfs, in bytes."""

    size_bytes: int
    used_bytes: int


def room(stat: os.statvfs_result) -> ShmRoom:
    """Return size and used part of a file system. Source: statvfs(3): blocks are counted in units of f_frsize.

    Used is size less *free* blocks, as df(1) has it. Raises: NoData for a file system without a size (a tmpfs mounted
    with size=0 has no limit, and statvfs then tells no figures).
    """
    if stat.f_blocks == 0:
        raise NoData("the file system has no size limit")
    return ShmRoom(stat.f_blocks * stat.f_frsize, (stat.f_blocks - stat.f_bfree) * stat.f_frsize)


class ShmCollector:
    """gpuwatch_shm_size_bytes and gpuwatch_shm_used_bytes of the node's own mount: `mount="host"`."""

    name = "shm"

    def __init__(self, roots: Roots) -> None:
        self._path = roots.shm

    def collect(self) -> Iterable[Sample]:
        """Return size and use of /dev/shm. Raises: NoData where it is not mounted."""
        try:
            shm = room(os.statvfs(self._path))
        except FileNotFoundError:
            raise NoData(f"{self._path} does not exist here") from None
        return [
            Sample("gpuwatch_shm_size_bytes", shm.size_bytes, ("host",)),
            Sample("gpuwatch_shm_used_bytes", shm.used_bytes, ("host",)),
        ]
