"""/dev/shm: its size and use, and how large the tensors are that loader workers put there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpuwatch.errors import NoData

_PREFIX = "/dev/shm/torch_"
"""torch's names: torch_PID_RANDOM_COUNT (at::NewProcessWideShmHandle)."""


def shm_bytes(path: Path = Path("/dev/shm")) -> tuple[int, int]:
    """Return (size, used) of the /dev/shm at a path. Source: statvfs(3): blocks are counted in units of f_frsize.

    Used is size less *free* blocks, as df(1) has it. Raises: NoData where it is not mounted, and for a file system without a size
    (a tmpfs mounted with size=0 has no limit, and statvfs then gives no figures).
    """
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
    if status.f_blocks == 0:
        raise NoData(f"{path}: the file system has no size limit")
    return status.f_blocks * status.f_frsize, (status.f_blocks - status.f_bfree) * status.f_frsize


def largest_tensor_bytes(pids: Iterable[int], procfs: Path = Path("/proc")) -> int | None:
    """Return the largest tensor that workers hold in /dev/shm, or could not get room for; None where there is none.

    The file has its size before it has its room, so that one which did not fit is seen as well. Source: /proc/PID/fd.
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
