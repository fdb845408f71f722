"""How a loader's workers died: by which signal, and whether for lack of memory. torch itself says "exited unexpectedly".

Asked in the training thread alone: two threads that ask after one child may lose its answer (multiprocessing's poll is not locked).
Sources: `Process.exitcode`; the control group's count of kills for lack of memory; `oom_kill` in /proc/vmstat, proc_vmstat(5), which counts
the whole node.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpuwatch.errors import NoData
from gpuwatch.host.cgroup import memory_room, oom_kills
from gpuwatch.host.proc import oom_kills_on_node
from gpuwatch.host.shm import shm_bytes
from gpuwatch.wire import WorkerDeath

_DEADLY = frozenset(
    int(number)
    for number in (
        signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE,
    )
)  # fmt: skip
"""Not SIGTERM and SIGINT: so workers are ended on purpose."""
_MOST = 64


class OomKills:
    """How many processes the kernel has killed for lack of memory: of this control group, else on the node."""

    def __init__(self, procfs: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        self._procfs = procfs
        self._sysfs = sysfs
        self._before = self._counts()

    def grown(self) -> int | None:
        """Return how many there were since this was made; None where no count can be read.

        The group's own count is believed where there is one: workers are in it, and another job's kills are none of it.
        """
        for now, then in zip(self._counts(), self._before, strict=True):
            if now is not None:
                return max(0, now - (then or 0))
        return None

    def limit_bytes(self) -> int | None:
        """Return the memory limit of the control group; None where it has none."""
        room = memory_room(self._procfs, self._sysfs)
        return None if room is None else room.limit_bytes

    def _counts(self) -> tuple[int | None, int | None]:
        return oom_kills(self._procfs, self._sysfs), oom_kills_on_node(self._procfs)


def deaths(workers: Iterable[Any], kills: OomKills, shm: Path = Path("/dev/shm")) -> tuple[WorkerDeath, ...]:
    """Return those of a loader's worker processes that a signal has killed. Call it in the thread that owns them."""
    found = []
    for worker in workers:
        code = getattr(worker, "exitcode", None)
        if not isinstance(code, int) or -code not in _DEADLY:
            continue
        pid = int(getattr(worker, "pid", 0) or 0)
        if -code == signal.SIGKILL:
            count = kills.grown()
            limit = kills.limit_bytes() if count else None
            found.append(WorkerDeath(pid, -code, None if count is None else count > 0, count, limit))
        else:
            size, free = _space(shm) if -code == signal.SIGBUS else (None, None)
            found.append(WorkerDeath(pid, -code, shm_size_bytes=size, shm_free_bytes=free))
    return tuple(found[:_MOST])


def _space(shm: Path) -> tuple[int | None, int | None]:
    """Return (size, what is free of it)."""
    try:
        size, used = shm_bytes(shm)
    except NoData:
        return None, None
    return size, size - used
