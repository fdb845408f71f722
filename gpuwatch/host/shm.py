"""How large the tensors are that loader workers put into /dev/shm, seen from outside: for a loader that fails before its first batch."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PREFIX = "/dev/shm/torch_"
"""torch's names: torch_PID_RANDOM_COUNT (at::NewProcessWideShmHandle)."""


def largest_tensor_bytes(pids: Iterable[int], procfs: Path = Path("/proc")) -> int | None:
    """Return the largest tensor that workers hold in /dev/shm, or have asked room for in vain; None where none is seen.

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
