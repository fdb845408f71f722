"""/dev/shm: its size and use."""

from __future__ import annotations

import os
from pathlib import Path

from gpuwatch.errors import NoData


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
