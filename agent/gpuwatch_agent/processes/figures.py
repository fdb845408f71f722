"""A process's figures in /proc/PID: state, threads, memory, I/O, waiting for a core. Pure parsers and one reader.

Not through psutil, which has most of them: it looks at a process's start time again for each, where the agent knows its processes
already, and it has no run-queue wait. One read of `stat` gives three.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Figures:
    """What a process is and has done so far. None: not to be seen (another user's, or a kernel without it)."""

    state: str
    """One letter: R running, S sleeping, D waiting for a disk and not to be interrupted, Z ended."""
    threads: int
    resident_bytes: int
    read_bytes: int | None = None
    """From disks, page cache hits not counted."""
    written_bytes: int | None = None
    run_queue_s: float | None = None
    """Ready to run and without a core, its first thread."""


def parse_stat(text: str) -> tuple[str, int, int]:
    """Return (state, threads, resident pages). Source: /proc/PID/stat, proc(5), fields 3, 20 and 24. Raises: ValueError."""
    fields = text.rpartition(")")[2].split()
    if len(fields) < 22:
        raise ValueError(f"stat: not as in proc(5): {text[:60]!r}")
    return fields[0], int(fields[17]), int(fields[21])


def parse_io(text: str) -> tuple[int, int]:
    """Return (bytes read from disks, bytes sent to them, less those taken back). Source: /proc/PID/io, proc(5). Raises: ValueError."""
    values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    try:
        written = int(values["write_bytes"]) - int(values.get("cancelled_write_bytes", "0"))
        return int(values["read_bytes"]), max(0, written)
    except KeyError as missing:
        raise ValueError(f"io: no {missing}") from None


def parse_schedstat(text: str) -> float:
    """Return the seconds in the run queue. Source: /proc/PID/schedstat, Documentation/scheduler/sched-stats.rst: ns, the second figure."""
    fields = text.split()
    if len(fields) < 2:
        raise ValueError(f"schedstat: {text!r}")
    return int(fields[1]) / 1e9


def read_figures(directory: Path) -> Figures | None:
    """Return the figures of the process whose folder in /proc this is; None if it is gone."""
    try:
        state, threads, pages = parse_stat((directory / "stat").read_text())
    except (OSError, ValueError):
        return None
    read = written = wait = None
    with contextlib.suppress(OSError, ValueError):
        read, written = parse_io((directory / "io").read_text())
    with contextlib.suppress(OSError, ValueError):
        wait = parse_schedstat((directory / "schedstat").read_text())
    return Figures(state, threads, pages * PAGE_BYTES, read, written, wait)


def open_files(directory: Path) -> int | None:
    """Return how many file descriptors a process has open; None where that is not to be seen."""
    try:
        return len(os.listdir(directory / "fd"))  # noqa: PTH208 - names only, thousands of them
    except OSError:
        return None
