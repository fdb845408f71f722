"""Small readers of /proc that both the training process and the agent use. Each raises NoData where there is nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gpuwatch.errors import NoData

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_times_s(procfs: Path = Path("/proc")) -> tuple[float, float]:
    """Return the node's (busy, total) CPU time since boot over all cores, in seconds; iowait counts as idle.

    Source: /proc/stat, proc(5); guest time is within user time. Raises: NoData if absent.
    """
    line = _read(procfs / "stat").partition("\n")[0].split()
    if len(line) < 5 or line[0] != "cpu":
        raise NoData(f"{procfs}/stat has no cpu line")
    ticks = [int(field) for field in line[1:9]]
    total = sum(ticks)
    idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
    return (total - idle) / TICKS_PER_S, total / TICKS_PER_S


def process_cpu_s(pid: int, procfs: Path = Path("/proc")) -> float:
    """Return user and system CPU time of a process, in seconds. Source: /proc/PID/stat. Raises: NoData if it is gone."""
    fields = _read(procfs / str(pid) / "stat").rpartition(")")[2].split()
    if len(fields) < 13:
        raise NoData(f"process {pid} has an unreadable stat file")
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def run_queue_s(pid: int, procfs: Path = Path("/proc")) -> float:
    """Return for how long a process's first thread was ready to run and had no core, in seconds.

    Source: /proc/PID/schedstat, the second figure (the kernel's sched-stats documentation). Raises: NoData where there is none.
    """
    fields = _read(procfs / str(pid) / "schedstat").split()
    if len(fields) < 2:
        raise NoData(f"process {pid} has an unreadable schedstat file")
    return int(fields[1]) / 1e9


def allowed_cores(pid: int, procfs: Path = Path("/proc")) -> int:
    """Return how many cores a process may run on. Source: Cpus_allowed_list in /proc/PID/status, proc(5). Raises: NoData."""
    for line in _read(procfs / str(pid) / "status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            spans = [span.partition("-") for span in line.split()[1].split(",")]
            return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    raise NoData(f"process {pid} has no list of allowed cores")


def private_bytes(pid: int, procfs: Path = Path("/proc")) -> int:
    """Return the memory that is a process's own, what it shares with the one it was forked from left out.

    Source: Private_* in /proc/PID/smaps_rollup, proc(5). It costs the kernel a walk over all pages. Raises: NoData.
    """
    lines = (line.split() for line in _read(procfs / str(pid) / "smaps_rollup").splitlines())
    kib = [int(fields[1]) for fields in lines if fields[0] in ("Private_Clean:", "Private_Dirty:")]
    if not kib:
        raise NoData(f"process {pid} has no figures of its private memory")
    return sum(kib) << 10


def memory_available_bytes(procfs: Path = Path("/proc")) -> int:
    """Return the memory that can be had without swapping. Source: MemAvailable in /proc/meminfo, proc(5). Raises: NoData."""
    for line in _read(procfs / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise NoData(f"{procfs}/meminfo does not tell what is available")


def oom_kills_on_node(procfs: Path = Path("/proc")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory since boot; None where it does not tell.

    Source: oom_kill in /proc/vmstat, proc_vmstat(5); those killed in control groups are among them.
    """
    try:
        lines = _read(procfs / "vmstat").splitlines()
    except NoData:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def resident_bytes(pid: int, procfs: Path = Path("/proc")) -> int:
    """Return the memory of a process that is in RAM, what it shares with others included. Source: statm, proc(5). Raises: NoData if it is gone."""
    try:
        return parse_statm(_read(procfs / str(pid) / "statm"), os.sysconf("SC_PAGE_SIZE"))
    except ValueError as error:
        raise NoData(f"process {pid} has an unreadable statm file") from error


def parse_statm(text: str, page_bytes: int) -> int:
    """Return a process's resident memory in bytes. Source: proc_pid_statm(5), the second column, in pages.

    Raises: ValueError for odd text.
    """
    fields = text.split()
    if len(fields) < 2:
        raise ValueError(f"statm: not as in proc_pid_statm(5): {text.strip()!r}")
    return int(fields[1]) * page_bytes


def start_ticks(pid: int, procfs: Path = Path("/proc")) -> int:
    """Return when a process started, in clock ticks since boot. Raises: NoData if it is gone."""
    fields = _read(procfs / str(pid) / "stat").rpartition(")")[2].split()
    if len(fields) < 20:
        raise NoData(f"process {pid} has an unreadable stat file")
    return int(fields[19])


def pressure_s(resource: str, procfs: Path = Path("/proc")) -> float:
    """Return for how long some task has waited for "cpu", "io" or "memory" since boot, in seconds.

    Source: /proc/pressure, the kernel's PSI documentation. Raises: NoData where the kernel has none.
    """
    for line in _read(procfs / "pressure" / resource).splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2]) / 1e6
    raise NoData(f"no pressure figures for {resource}")


def shm_bytes(path: Path = Path("/dev/shm")) -> tuple[int, int]:
    """Return (size, used) of the /dev/shm that this process sees. Raises: NoData where it is not mounted."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
    return status.f_blocks * status.f_frsize, (status.f_blocks - status.f_bfree) * status.f_frsize


def worker_cpu_s(pids: Iterable[int], procfs: Path = Path("/proc")) -> dict[int, float]:
    """Return the CPU seconds of those processes that still live, by pid."""
    found: dict[int, float] = {}
    for pid in pids:
        try:
            found[pid] = process_cpu_s(pid, procfs)
        except NoData:
            continue
    return found


def worker_queue_s(pids: Iterable[int], procfs: Path = Path("/proc")) -> dict[int, float]:
    """Return the seconds in which those processes were ready to run and had no core, by pid; a kernel may not tell."""
    found: dict[int, float] = {}
    for pid in pids:
        try:
            found[pid] = run_queue_s(pid, procfs)
        except NoData:
            continue
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
