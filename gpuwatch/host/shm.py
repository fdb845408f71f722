"""/dev/shm: its size and use, and the largest tensor that loader workers have there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpuwatch.errors import NoData

_PREFIX = "/dev/shm/torch_"
"""torch's names: torch_PID_RANDOM_COUNT (at::NewProcessWideShmHandle)."""


def shm_bytes(path: Path = Path("/dev/shm")) -> tuple[int, int]:
    """Return (size, used) of the /dev/shm at a path; used is size less free blocks, as in df(1). Source: statvfs(3).

    Raises: NoData where it is not mounted, and for a file system without a size limit (a tmpfs with size=0).
    """
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
    if status.f_blocks == 0:
        raise NoData(f"{path}: the file system has no size limit")
    return status.f_blocks * status.f_frsize, (status.f_blocks - status.f_bfree) * status.f_frsize


def largest_tensor_bytes(pids: Iterable[int], procfs: Path = Path("/proc")) -> int | None:
    """Return the size of the largest tensor that workers have in /dev/shm; None without one. Source: /proc/PID/fd.

    A file has its size before its pages are allocated, so that a tensor that did not fit counts too.
    """
    sizes = [size for pid in pids for size in _segments(procfs / str(pid) / "fd")]
    return max(sizes, default=None)


def _segments(descriptors: Path) -> list[int]:
    found = []
    try:
        for descriptor in descriptors.iterdir():
            with suppress(OSError):  # closed meanwhile
                if str(descriptor.readlink()).startswith(_PREFIX):
                    found.append(descriptor.stat().st_size)
    except OSError:
        return []
    return [size for size in found if size]
