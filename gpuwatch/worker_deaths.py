"""How a loader's workers died: by which signal, and whether for lack of memory. torch itself says "exited unexpectedly".

Asked in the training thread alone: two threads that ask after one child may lose its answer (multiprocessing's poll is not locked).
Sources: `Process.exitcode`; memory.events of the control group (cgroup-v2.rst), memory.oom_control (cgroup-v1/memory.rst); `oom_kill` in
/proc/vmstat, proc_vmstat(5), which counts the whole node.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    """How many processes the kernel has killed for lack of memory: in this control group, and on the node."""

    def __init__(self, procfs: Path = Path("/proc"), cgroupfs: Path = Path("/sys/fs/cgroup")) -> None:
        self._procfs = procfs
        self._cgroupfs = cgroupfs
        self._before = self._counts()

    def grown(self) -> bool | None:
        """Return whether there was one since this was made; None where no count can be read."""
        known = [(now, then) for now, then in zip(self._counts(), self._before, strict=True) if now is not None]
        return any(now > (then or 0) for now, then in known) if known else None

    def _counts(self) -> tuple[int | None, int | None]:
        return self._of_group(), _named(self._procfs / "vmstat", "oom_kill")

    def _of_group(self) -> int | None:
        try:
            lines = (self._procfs / "self/cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            place = path.lstrip("/")
            if not controllers:
                count = _named(self._cgroupfs / place / "memory.events", "oom_kill")
            elif "memory" in controllers.split(","):
                count = _named(self._cgroupfs / "memory" / place / "memory.oom_control", "oom_kill")
            else:
                continue
            if count is not None:
                return count
        return None


def deaths(workers: Iterable[Any], kills: OomKills) -> tuple[WorkerDeath, ...]:
    """Return those of a loader's worker processes that a signal has killed. Call it in the thread that owns them."""
    found = []
    for worker in workers:
        code = getattr(worker, "exitcode", None)
        if isinstance(code, int) and -code in _DEADLY:
            oom = kills.grown() if -code == signal.SIGKILL else None
            found.append(WorkerDeath(int(getattr(worker, "pid", 0) or 0), -code, oom))
    return tuple(found[:_MOST])


def _named(path: Path, name: str) -> int | None:
    """Return the number behind a name in a file of `name number` lines."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
