"""What a loader's workers do, from /proc: CPU use, and what each is blocked on: a CPU, disk, network, lock or sleep.

Reading /proc/PID/syscall needs the right to trace the process: a parent has it for its children, root for all.
"""

import math
import os
import platform
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from gpuwatch.host import proc

WAITS = ("cpu", "disk", "network", "lock", "sleep", "queue", "other")
CPU, DISK, NETWORK, LOCK, SLEEP, QUEUE, OTHER = WAITS
"""QUEUE: on a pipe, for another process's data. An idle loader worker is blocked there."""

_KINDS = {
    NETWORK: "recvfrom recvmsg connect accept poll ppoll select pselect6 epoll_wait epoll_pwait",
    LOCK: "futex flock fcntl semop semtimedop",
    SLEEP: "nanosleep clock_nanosleep",
}
_NUMBERS = {
    "x86_64": {
        "recvfrom": 45, "recvmsg": 47, "connect": 42, "accept": 43, "poll": 7, "ppoll": 271, "select": 23, "pselect6": 270,
        "epoll_wait": 232, "epoll_pwait": 281, "futex": 202, "flock": 73, "fcntl": 72, "semop": 65, "semtimedop": 220,
        "nanosleep": 35, "clock_nanosleep": 230,
    },
    "aarch64": {
        "recvfrom": 207, "recvmsg": 212, "connect": 203, "accept": 202, "ppoll": 73, "pselect6": 72, "epoll_pwait": 22,
        "futex": 98, "flock": 32, "fcntl": 25, "semop": 193, "semtimedop": 192, "nanosleep": 101, "clock_nanosleep": 115,
    },
}  # fmt: skip
"""Source: the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h."""


def _by_number(machine: str) -> dict[int, str]:
    numbers = _NUMBERS.get(machine, {})
    return {numbers[name]: kind for kind, names in _KINDS.items() for name in names.split() if name in numbers}


_HERE = _by_number(platform.machine())
_POLLS = {str(number) for name, number in _NUMBERS.get(platform.machine(), {}).items() if name in ("poll", "ppoll")}
_MOST_POLLED = 64
_MOST_SAMPLED = 64  # workers
_LEAST_SAMPLES = 8
_MEMORY_EVERY_S = 15.0


def classify(state: str, syscall: str, by_number: dict[int, str] = _HERE) -> str:
    """Return one of WAITS for a process's state ("R", "S", "D") and its line in /proc/PID/syscall ("" if unreadable).

    A wait for one of several files (poll, select, epoll) counts as the network's here: see `blocked_on`.
    """
    if state == "R" or syscall.startswith("running"):
        return CPU
    if state == "D":
        return DISK
    number = syscall.partition(" ")[0]
    return by_number.get(int(number), OTHER) if number.isdigit() else OTHER


def blocked_on(pid: int, state: str, procfs: Path = proc.PROC) -> str:
    """Return which of WAITS a process's main thread is blocked on, by its state. Source: /proc/PID/syscall, proc(5).

    A poll is the network's when one of its files is a socket, and a queue's when all of them are pipes.
    """
    place = f"{procfs}/{pid}"
    syscall = "" if state in ("R", "D") else proc.text_of(f"{place}/syscall")
    found = classify(state, syscall)
    if found == LOCK:  # it may wait for a thread of its own, such as a pool's, which waits for something itself
        with suppress(OSError):
            threads = (proc.text_of(each / "syscall") for each in Path(f"{place}/task").iterdir())
            return next((wait for each in threads if (wait := classify("S", each)) not in (LOCK, OTHER)), LOCK)
    return _polled(place, syscall.split()) if found == NETWORK and syscall.split()[0] in _POLLS else found


def _polled(place: str, fields: list[str]) -> str:
    """Return what a poll waits for: NETWORK, QUEUE, or OTHER where its files cannot be seen.

    Source: poll(2), whose first argument points to `struct pollfd`s of 8 bytes; /proc/PID/mem, /proc/PID/fd, proc(5).
    """
    try:
        with open(f"{place}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(int(fields[1], 16))
            polled = memory.read(8 * min(int(fields[2], 16), _MOST_POLLED))
        targets = [os.readlink(f"{place}/fd/{fd}") for fd, _ in struct.iter_unpack("<iI", polled) if fd >= 0]  # noqa: PTH115
    except (OSError, ValueError, IndexError, struct.error):
        return OTHER
    if any(target.startswith("socket:") for target in targets):
        return NETWORK
    return QUEUE if targets and all(target.startswith("pipe:") for target in targets) else OTHER


class Workers:
    """The workers of one loader over their last samples."""

    def __init__(self, window_s: float, keep: int) -> None:
        """CPU use is that of `window_s`, waits are those of the last `keep` samples."""
        self._window_s = window_s
        self.times: dict[int, deque[tuple[float, float, float]]] = {}
        """By pid: (when, CPU time, the same with the time ready to run without a core, nan if unknown), in seconds."""
        self._waits: deque[list[str]] = deque(maxlen=keep)
        self._memory_due_s = -math.inf
        self.private_bytes: int | None = None  # private memory of one worker; None before it was read

    def sample(self, at_s: float, stats: Mapping[int, proc.Stat], procfs: Path = proc.PROC) -> dict[int, float]:
        """Take a sample of workers, by pid; return their CPU time. Where there is none, the last ones are kept."""
        cpu_s = {pid: stat.cpu_s for pid, stat in stats.items()}
        queue_s = proc.by_pid(proc.run_queue_s, cpu_s, procfs)
        now = {pid: self.times.get(pid, deque()) for pid in cpu_s}
        for pid, times in now.items():
            times.append((at_s, cpu_s[pid], cpu_s[pid] + queue_s.get(pid, math.nan)))
            while len(times) > 2 and times[1][0] <= at_s - self._window_s:
                times.popleft()
        if not any(len(times) > 1 for times in now.values()):  # those of a pass before are known better, until then
            now = {pid: times for pid, times in self.times.items() if len(times) > 1} | now
        self.times = now  # another thread may be reading it
        self._waits.append([blocked_on(pid, stats[pid].state, procfs) for pid in islice(stats, _MOST_SAMPLED)])
        if cpu_s and (self.private_bytes is None or at_s >= self._memory_due_s):
            self._memory_due_s = at_s + _MEMORY_EVERY_S
            private_bytes = proc.optional(proc.private_bytes, next(iter(cpu_s)), procfs)
            self.private_bytes = self.private_bytes if private_bytes is None else private_bytes
        return cpu_s

    def ratios(self, busy: bool = False) -> tuple[float, ...] | None:
        """Return each worker's CPU use, 1.0 = one core; `busy`: with time ready without a core. None: not measured."""
        spans = [(times[0], times[-1]) for times in self.times.values()]
        what = 2 if busy else 1
        found = [(end[what] - begin[what]) / (end[0] - begin[0]) for begin, end in spans if end[0] > begin[0]]
        return tuple(found) if found and not any(map(math.isnan, found)) else None

    def waits(self) -> dict[str, float] | None:
        """Return the share of samples in which workers were blocked on each of WAITS; None with too few samples."""
        samples = [wait for each in list(self._waits) for wait in each]
        return {wait: samples.count(wait) / len(samples) for wait in WAITS} if len(samples) >= _LEAST_SAMPLES else None
