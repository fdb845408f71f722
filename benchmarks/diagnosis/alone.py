"""A /proc in which a program is alone on a node of 16 cores: causes of free cores, shown on a small or busy machine.

What the program's own processes do is real and read where it lies. Of the node, the CPU time is made up: the program's
processes get a core whenever they are ready to run (their CPU time and their time in the queue for one), everything
else is idle, and no task waits for a core.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

CORES = 16
_EVERY_S = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LINKED = ("1", "self", "thread-self", "meminfo", "loadavg", "diskstats", "net", "sys", "uptime", "mounts", "cpuinfo", "vmstat")  # fmt: skip


class Alone:
    """A folder for the agent's `--procfs`, kept up to date for one session's processes until it is closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._session: int | None = None
        self._begin = time.monotonic()
        self._used_s: dict[int, float] = {}
        """CPU time and time in the queue by pid, of ended processes too."""
        self._stop = threading.Event()
        (folder / "pressure").mkdir(parents=True)
        for name in _LINKED:
            (folder / name).symlink_to(Path("/proc") / name)
        for name in ("io", "memory"):
            (folder / "pressure" / name).symlink_to(Path("/proc/pressure") / name)
        line = "avg10=0.00 avg60=0.00 avg300=0.00 total=0"
        (folder / "pressure" / "cpu").write_text(f"some {line}\nfull {line}\n")
        self._write_stat()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def follow(self, session: int) -> None:
        """Begin to show this session's processes."""
        self._session = session
        self._look()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        for place in Path("/proc").iterdir():
            if not place.name.isdigit():
                continue
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) != self._session:
                    continue
                pid = int(place.name)
                waited_s = int((place / "schedstat").read_text().split()[1]) / 1e9
                self._used_s[pid] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S + waited_s
                self._show(pid)
        self._write_stat()

    def _show(self, pid: int) -> None:
        """Show one process: all of it as it is, but for the cores that it may use."""
        shown = self.folder / str(pid)
        if shown.exists():
            return
        new = self.folder / f"new-{pid}"
        new.mkdir()
        for name in os.listdir(f"/proc/{pid}"):  # noqa: PTH208 - names only
            if name != "status":
                (new / name).symlink_to(f"/proc/{pid}/{name}")
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        lines = [
            f"Cpus_allowed_list:\t0-{CORES - 1}" if line.startswith("Cpus_allowed_list:") else line for line in status
        ]
        (new / "status").write_text("\n".join(lines) + "\n")
        new.rename(shown)

    def _write_stat(self) -> None:
        used = sum(self._used_s.values()) * _TICKS_PER_S
        idle = max(0.0, CORES * (time.monotonic() - self._begin) * _TICKS_PER_S - used)
        lines = [f"cpu  {used:.0f} 0 0 {idle:.0f} 0 0 0 0 0 0"]
        lines += [f"cpu{core} {used / CORES:.0f} 0 0 {idle / CORES:.0f} 0 0 0 0 0 0" for core in range(CORES)]
        lines += ["ctxt 1", f"btime {time.time():.0f}", "processes 1", "procs_running 1", "procs_blocked 0"]
        new = self.folder / "stat.new"
        new.write_text("\n".join(lines) + "\n")
        new.rename(self.folder / "stat")
