"""CPU time that a thread took or was refused: what tells a fetch that computes from one that waits, on a busy node too."""

from __future__ import annotations

import contextlib
import os
from time import thread_time_ns


class ThreadTime:
    """The calling thread's time on a CPU and in the queue for one. Made and asked in that thread.

    A thread that computes on a node whose cores are all taken is off the CPU for much of the time, and yet waits for nothing else.
    Source: clock_gettime(2); /proc/thread-self/schedstat, second field (the kernel's sched-stats documentation).
    """

    __slots__ = ("_file",)

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def busy_ns(self) -> int:
        """Return the thread's time on a CPU or waiting for one, in ns; without the latter where the kernel does not tell."""
        try:
            return thread_time_ns() + int(os.pread(self._file, 80, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return thread_time_ns()

    def close(self) -> None:
        """Give the file back."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def __del__(self) -> None:
        self.close()
