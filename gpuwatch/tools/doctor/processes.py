"""Processes as /proc shows them: who they are, in a few words, and which socket they hold. Never a whole command line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

_IN_THE_WAY = ("0100007F", "0" * 8, "0" * 24 + "01000000", "0" * 32)
"""127.0.0.1, 0.0.0.0, ::1 and :: as /proc/net/tcp writes them on a little-endian machine."""


def pids(procfs: Path) -> Iterator[int]:
    """Yield the processes that there are."""
    for path in procfs.glob("[0-9]*"):
        if path.name.isdigit():
            yield int(path.name)


def command(pid: int, procfs: Path) -> str:
    """Return a process's program in a few words, its options left out: "python3 -m http.server". "" if it is gone."""
    try:
        words = (procfs / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        if not words[0]:
            return (procfs / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    if words[1:2] == ["-m"]:
        return " ".join([program, *words[1:3]])
    return " ".join([program, *(Path(word).name for word in words[1:2] if not word.startswith("-"))])


def gpuwatch_part(pid: int, procfs: Path) -> str:
    """Return "agent", "dashboard", … for a process of gpuwatch's own, "" for any other."""
    try:
        words = (procfs / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if any("gpuwatch_dashboards" in word for word in words):
        return "dashboard"
    if "gpuwatch_agent" in words:  # what `gpuwatch agent` goes on as, see gpuwatch_agent/__main__.py
        return "agent"
    for before, word in pairwise(words):
        if Path(before).name == "gpuwatch" and word.isalpha():
            return word
    return ""


def listening(port: int, procfs: Path) -> int | None:
    """Return the inode of a socket that keeps a program from listening on loopback at a TCP port; None for none.

    Source: /proc/net/tcp and tcp6, proc(5): state 0A is LISTEN, addresses are hexadecimal words in host order.
    Raises: OSError where there is no such table.
    """
    for name in ("tcp", "tcp6"):
        path = procfs / "net" / name
        if name == "tcp6" and not path.exists():  # IPv6 is off
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            address, _, hexadecimal = fields[1].rpartition(":")
            if fields[3] == "0A" and int(hexadecimal, 16) == port and address in _IN_THE_WAY:
                return int(fields[9])
    return None


def holder(inode: int, procfs: Path) -> int | None:
    """Return a process that has the socket open, None where none shows: those of other users need SYS_PTRACE."""
    wanted = f"socket:[{inode}]"
    for pid in pids(procfs):
        try:
            for descriptor in (procfs / str(pid) / "fd").iterdir():
                if str(descriptor.readlink()) == wanted:
                    return pid
        except OSError:
            continue
    return None
