"""Readers of /proc and /dev/shm, which raise NoData: CPU, memory, pressure, network, disks, the usage of one process.

`parse_…` take a file's text, and raise ValueError or IndexError for one that is not as its documentation says.
"""

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from time import thread_time_ns
from typing import NamedTuple, ParamSpec, TypeVar

from gpuwatch.errors import NoData

P = ParamSpec("P")
T = TypeVar("T")

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""Columns of a cpu line that add up to all time: `guest` and `guest_nice` are in `user` and `nice` (proc_stat(5))."""
_NO_DISK = r"(loop|ram|zram|fd|sr|dm-|md|bcache|drbd|nvme\d+c\d+n)\d|.*\dp\d+$|([shv]|xv)d[a-z]+\d+$"
"""Memory, files and removable media; devices made of other disks, whose bytes are counted there already; partitions."""
_MOST_THREADS = 512
_HALF_A_PAGE = 2048  # What gives less has ended: the kernel gives as many lines of a file as fit into a page at once.


def text_in(path: Path | str) -> str:
    """Return a kernel file's text, in a fifth of the time that `Path.read_text` takes. Raises: OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = part = os.read(file, 1 << 14)
        while len(part) >= _HALF_A_PAGE:
            found += (part := os.read(file, 1 << 14))
    finally:
        os.close(file)
    return found.decode(errors="replace")  # a command's name may be any bytes


def read(path: Path | str, parse: Callable[[str], T]) -> T:
    """Return a file, parsed. Raises: NoData for one that is absent, or not as its documentation says."""
    try:
        return parse(text_in(path))
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, IndexError) as error:
        raise NoData(f"{path}: {error!r}") from error


def text_of(path: Path | str) -> str:
    """Return a file's text without the white space around it; empty where it cannot be read."""
    return optional(read, path, str.strip) or ""


def optional(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return what a reader of this module gives; None where that raises NoData."""
    try:
        return read(*args, **kwargs)
    except NoData:
        return None


# The node -------------------------------------------------------------------------------------------------------------


class CpuTimes(NamedTuple):
    """All cores together since boot, in seconds."""

    seconds: dict[str, float]  # by mode; absent if the kernel does not count it
    cores: int  # online


def parse_cpu_times(text: str, ticks_per_s: int = TICKS_PER_S) -> CpuTimes:
    """Return CPU times in /proc/stat, of online cores. Source: proc_stat(5). Raises: NoData without a `cpu` line."""
    # The cpu lines come first, and the one that follows is by far the longest.
    rows = [line.split() for line in takewhile(lambda line: line.startswith("cpu"), text.splitlines())]
    if not rows:
        raise NoData("stat has no line of all CPUs")
    seconds = {mode: int(value) / ticks_per_s for mode, value in zip(CPU_MODES, rows[0][1:], strict=False)}
    return CpuTimes(seconds, len(rows) - 1)


def cpu_times_s(procfs: Path = PROC) -> tuple[float, float]:
    """Return the node's (busy, total) CPU time since boot over all cores, in seconds; iowait counts as idle."""

    def busy_and_total(text: str) -> tuple[float, float]:
        modes = parse_cpu_times(text.partition("\n")[0]).seconds
        total = sum(modes.values())
        return total - modes["idle"] - modes.get("iowait", 0.0), total

    return read(f"{procfs}/stat", busy_and_total)


def memory_bytes(procfs: Path = PROC) -> dict[str, int]:
    """Return the node's memory by kernel names: MemAvailable is without swapping. Source: /proc/meminfo, proc(5)."""
    return read(f"{procfs}/meminfo", parse_kib)


def oom_kills_on_node(procfs: Path = PROC) -> int | None:
    """Return the OOM kills since boot, those in control groups included; None where the kernel does not count them.

    Source: oom_kill in /proc/vmstat, proc_vmstat(5).
    """
    return optional(read, f"{procfs}/vmstat", lambda text: int(f"\n{text}".partition("\noom_kill ")[2].split()[0]))


def boot_id(procfs: Path = PROC) -> str:
    """Return this boot's random id, empty where it is not readable. Source: sys/kernel/random/boot_id, random(4)."""
    return text_of(f"{procfs}/sys/kernel/random/boot_id")


def node_name() -> str:
    """Return the name of this node: GPUWATCH_NODE, which the chart sets, as a pod's host name is its own."""
    return os.environ.get("GPUWATCH_NODE") or socket.gethostname()


def parse_pressure(text: str) -> dict[str, float]:
    """Return each line's total in seconds since boot, e.g. "some avg10=0.00 avg60=0.00 avg300=0.00 total=12" (in µs).

    Source: Documentation/accounting/psi.rst.
    """
    rows = map(str.split, text.splitlines())
    return {label: int(pairs[-1].removeprefix("total=")) / 1e6 for label, *pairs in rows}


def pressure_s(path: Path) -> float:
    """Return the time in which some task of the node or of a group waited for a resource, in seconds."""
    return read(path, lambda text: parse_pressure(text)["some"])


class Disk(NamedTuple):
    """A disk's counters since boot."""

    read_bytes: int
    written_bytes: int
    busy_s: float  # time with at least one request in flight; the kernel's counter wraps after 49.7 days


def is_disk(name: str) -> bool:
    """Return whether a block device is a disk: True for "sda", False for "sda1" and "dm-0"."""
    return re.match(_NO_DISK, name) is None


def parse_disks(text: str) -> dict[str, Disk]:
    """Return each disk's counters. Source: /proc/diskstats, the kernel's iostats.rst. Raises: NoData without a disk."""
    rows = [row for row in map(str.split, text.splitlines()) if is_disk(row[2])]
    if not rows:
        raise NoData("this node shows no disk")
    return {row[2]: Disk(int(row[5]) * 512, int(row[9]) * 512, int(row[12]) / 1000) for row in rows}


def parse_network(text: str) -> dict[str, tuple[int, int]]:
    """Return (bytes received, bytes sent) by interface, the loopback included. Source: net/dev, proc_pid_net(5)."""
    rows = (line.rpartition(":")[::2] for line in text.splitlines()[2:])
    return {name.strip(): (int(of[0]), int(of[8])) for name, of in ((name, counts.split()) for name, counts in rows)}


def shm_bytes(path: Path | str = "/dev/shm") -> tuple[int, int]:
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


# One process ----------------------------------------------------------------------------------------------------------


class Stat(NamedTuple):
    """A process's state and usage so far. Source: /proc/PID/stat, proc_pid_stat(5)."""

    state: str  # R running, S sleeping, D uninterruptible disk wait, Z and X ended
    parent: int
    cpu_s: float  # user and system
    threads: int
    start_ticks: int  # clock ticks since boot
    resident_bytes: int  # shared pages included

    @property
    def alive(self) -> bool:
        """Whether it has not ended: one that was killed stays a zombie until its parent asks."""
        return self.state not in ("Z", "X")


def stat(pid: int | str, procfs: Path = PROC) -> Stat:
    """Return a process's state and usage."""

    def parse(text: str) -> Stat:
        fields = text.rpartition(")")[2].split(None, 22)  # the command's name before it may hold anything
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        return Stat(fields[0], int(fields[1]), cpu_s, int(fields[17]), int(fields[19]), int(fields[21]) * PAGE_BYTES)

    return read(f"{procfs}/{pid}/stat", parse)


def pid_namespace(pid: int | str = "self", procfs: Path = PROC) -> int:
    """Return the inode of a process's pid namespace; 0 if unreadable. Source: /proc/PID/ns/pid, namespaces(7)."""
    try:
        return (procfs / str(pid) / "ns/pid").stat().st_ino
    except OSError:
        return 0


def own_number(pid: int | str, procfs: Path = PROC) -> int:
    """Return a process's pid in its own namespace."""
    return _status(pid, procfs, "NSpid", lambda numbers: int(numbers[-1]))


def _status(pid: int | str, procfs: Path, name: str, parse: Callable[[list[str]], T]) -> T:
    """Return a field of /proc/PID/status, parsed from its values. Source: proc(5)."""
    line = re.compile(rf"^{name}:(.*)", re.MULTILINE)
    return read(f"{procfs}/{pid}/status", lambda text: parse(line.findall(text)[0].split()))


def run_queue_s(pid: int, procfs: Path = PROC) -> float:
    """Return the seconds of a process's first thread in the run queue. Source: /proc/PID/schedstat, second field."""
    return read(f"{procfs}/{pid}/schedstat", lambda text: int(text.split()[1]) / 1e9)


def own_threads_busy_s(procfs: Path = PROC) -> dict[int, float]:
    """Return own threads' seconds on a CPU and in the run queue, by id. Source: /proc/self/task/TID/schedstat."""
    busy = {}
    with contextlib.suppress(OSError):
        for thread in list((procfs / "self/task").iterdir())[:_MOST_THREADS]:
            with contextlib.suppress(NoData):  # it has ended meanwhile
                busy[int(thread.name)] = read(thread / "schedstat", lambda text: sum(map(int, text.split()[:2])) / 1e9)
    if not any(busy.values()):
        raise NoData(f"{procfs}/self/task has no times of threads")
    return busy


def io_bytes(pid: int, procfs: Path = PROC) -> tuple[int, int]:
    """Return (bytes read from disks, written less cancelled), no page cache hits. Source: /proc/PID/io, proc(5)."""

    def read_and_written(text: str) -> tuple[int, int]:
        values = {name: int(value) for name, value in (line.split(": ", 1) for line in text.splitlines())}
        return values["read_bytes"], max(0, values["write_bytes"] - values.get("cancelled_write_bytes", 0))

    return read(f"{procfs}/{pid}/io", read_and_written)


def allowed_cores(pid: int, procfs: Path = PROC) -> frozenset[int]:
    """Return the cores that a process may run on."""

    def numbers(listed: list[str]) -> frozenset[int]:
        spans = [span.partition("-") for span in listed[0].split(",")]
        return frozenset(core for first, _, last in spans for core in range(int(first), int(last or first) + 1))

    return _status(pid, procfs, "Cpus_allowed_list", numbers)


def mapped_bytes(pid: int, procfs: Path = PROC) -> dict[str, int]:
    """Return a process's memory by kind, e.g. Rss. Slow: walks all pages. Source: /proc/PID/smaps_rollup, proc(5)."""
    return read(f"{procfs}/{pid}/smaps_rollup", parse_kib)


def private_bytes(pid: int, procfs: Path = PROC) -> int:
    """Return a process's private memory, without what it shares with its parent since the fork."""
    sizes = mapped_bytes(pid, procfs)
    private = [sizes[name] for name in ("Private_Clean", "Private_Dirty") if name in sizes]
    if not private:
        raise NoData(f"process {pid} has no figures of its private memory")
    return sum(private)


def received_bytes(pid: int | str = "self", procfs: Path = PROC) -> int:
    """Return the bytes received on all interfaces of a process's network namespace, the loopback included."""
    by_interface = read(f"{procfs}/{pid}/net/dev", parse_network)
    return sum(received for received, _ in by_interface.values())


def by_pid(read: Callable[[int, Path], T], pids: Iterable[int], procfs: Path = PROC) -> dict[int, T]:
    """Return the result of `read` (e.g. `stat`) for those processes that can be read, by pid."""
    return {pid: value for pid in pids if (value := optional(read, pid, procfs)) is not None}


class ThreadTime:
    """The calling thread's time on a CPU and in the run queue: it shows if it computes or waits, on a busy node too.

    Source: clock_gettime(2); /proc/thread-self/schedstat, second field (the kernel's sched-stats documentation).
    """

    __slots__ = ("_file",)

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def busy_ns(self) -> int:
        """Return the time in ns; without that in the run queue where the kernel does not count it."""
        try:
            return thread_time_ns() + int(os.pread(self._file, 80, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return thread_time_ns()

    def close(self) -> None:
        file, self._file = self._file, -1
        with contextlib.suppress(OSError):  # none was open
            os.close(file)

    __del__ = close


def parse_kib(text: str) -> dict[str, int]:
    """Return "Name:   12 kB" lines as bytes by name."""
    lines = (line.split() for line in text.splitlines())
    return {fields[0][:-1]: int(fields[1]) << 10 for fields in lines if len(fields) == 3 and fields[2] == "kB"}
