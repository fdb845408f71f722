"""The training processes in /proc: whether they are alive, who owns them, what they use."""

import contextlib
import logging
import os
import pwd
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gpuwatch import wire
from gpuwatch.errors import NoData
from gpuwatch.host import cgroup, proc
from gpuwatch_agent.deadline import DeadlineThread
from gpuwatch_agent.processes.owners import NO_OWNER, Owner, read_owner, user_name

T = TypeVar("T")
_Identity = tuple[int, int, int]
_MOST_KNOWN = 4096
_MOST_PARENTS = 8
SHM_DEADLINE_S = 2.0
_SHM_WAIT_S = 0.05
_MOST_HUNG_THREADS = 8

logger = logging.getLogger(__name__)


class Shm(NamedTuple):
    """The /dev/shm that a process sees."""

    size_bytes: int
    used_bytes: int
    is_hosts: bool


class _ShmReader:
    """Reads the /dev/shm of processes in a thread: of a file system that hangs (FUSE, NFS) only this is not measured.

    A thread that hangs is left behind, and its process is not asked again.
    """

    def __init__(self, procfs: Path, host_shm: Path) -> None:
        self._procfs = procfs
        self._host_shm = host_shm
        self._current = 0
        self._hung: set[int] = set()
        self._thread = DeadlineThread("/dev/shm", SHM_DEADLINE_S)
        self._threads, self._ticks = 1, 0
        self.known: dict[int, Shm] = {}

    def update(self, pids: Collection[int]) -> None:
        """Read /dev/shm of these processes, the node's own every tenth time; late results count for the next tick."""
        self._hung &= set(pids)
        self._ticks += 1
        hosts = {pid: seen for pid, seen in self.known.items() if pid in pids and seen.is_hosts and self._ticks % 10}
        wanted = [pid for pid in pids if pid not in self._hung and pid not in hosts]
        try:
            found = self._thread.offer(lambda: dict(self._read(wanted)), _SHM_WAIT_S) if wanted else {}
            self.known = self.known if found is None else hosts | found
        except TimeoutError:
            self.known = {}
            if self._current not in self._hung:
                message = "process %s: statvfs of its /dev/shm timed out after %g s; it is not measured"
                logger.warning(message, self._current, SHM_DEADLINE_S)
                self._hung.add(self._current)
            if self._threads < _MOST_HUNG_THREADS:
                self._thread, self._threads = DeadlineThread("/dev/shm", SHM_DEADLINE_S), self._threads + 1

    def _read(self, pids: Sequence[int]) -> Iterator[tuple[int, Shm]]:
        for self._current in pids:
            path = f"{self._procfs}/{self._current}/root/dev/shm"
            with contextlib.suppress(NoData, OSError):
                is_hosts = os.stat(path).st_dev == self._host_shm.stat().st_dev  # noqa: PTH116 - a tenth of Path's time
                yield self._current, Shm(*proc.shm_bytes(path), is_hosts)


class ProcessTable:
    """Reads one node's /proc. A process of another pid namespace cannot be read by its own pid."""

    def __init__(self, procfs: Path, sysfs: Path = Path("/sys"), host_shm: Path = Path("/dev/shm")) -> None:
        self.procfs = procfs
        self._namespace = proc.pid_namespace("1", procfs) or proc.pid_namespace("self", procfs)
        self._host_pids: dict[_Identity, int] = {}
        self.stat = cache(lambda pid: self.read(proc.stat, pid))
        """Returns a process's state and usage by pid, as of this tick; None for one that is gone."""
        self.name = cache(lambda pid: proc.text_of(f"{procfs}/{pid}/comm"))
        """Returns a process's command name by pid, as of the last ten ticks; empty where not known."""
        self.owner = cache(self._owner_now)
        """Returns a process's owner by pid, as of the last thirty ticks; `NO_OWNER` for one gone or not readable."""
        self._find, self._searched = cache(self._find_now), cache(lambda process: self._search(*process[:2]))
        self._quota, self._room = cache(cgroup.quota), cache(cgroup.memory_room)
        self._name_of = cache(lambda uid: pwd.getpwuid(uid).pw_name)  # an error is not kept: it is asked for again
        self._user = cache(partial(user_name, {}, self._name_of))
        self._owner = cache(lambda pid, uid, start_ticks: read_owner(procfs / str(pid), self._user(uid)))
        self.groups = cache(lambda kind, pid, root=True: tuple(cgroup.folders(kind, procfs, sysfs, pid, root)))
        """Returns a process's control groups' folders by controller and pid, as of the last thirty ticks."""
        self._good_for_ticks: dict[Any, int] = {
            **dict.fromkeys((self._find, self.stat, self.owner, self._quota, self._room), 1),
            self._searched: 5,
            self.name: 10,
            **dict.fromkeys((self.groups, self._owner), 30),
            self._user: 60,
            self._name_of: 600,
        }
        self._ticks = 0
        self._seen: set[int] = set()
        self._shm = _ShmReader(procfs, host_shm)

    def begin_tick(self) -> None:
        """Start a new tick: what was found is valid for one, or more."""
        for found, ticks in self._good_for_ticks.items():
            if self._ticks % ticks == 0:
                found.cache_clear()
        self._ticks += 1
        if len(self._host_pids) > _MOST_KNOWN:
            self._host_pids.clear()

    def host_pid(self, hello: wire.Hello | None) -> int | None:
        """Return the training process's pid in this /proc; None where it cannot be found or has ended."""
        return None if hello is None else self._find(_identity(hello))

    def _find_now(self, process: _Identity) -> int | None:
        namespace, number, start_ticks = process
        pid = self._host_pids.get(process)
        if pid is None and namespace in (0, self._namespace):
            pid = number
        elif pid is None and (pid := self._searched(process)) is not None:
            self._host_pids[process] = pid
        stat = None if pid is None else self.stat(pid)
        return pid if stat is not None and stat.alive and stat.start_ticks == start_ticks else None

    def is_peer(self, hello: wire.Hello, pid: int) -> bool:
        """Return whether the kernel's process `pid` is the one that a message names; True where that cannot be seen.

        Nothing can be seen of one that ended: its pid is compared in the agent's own namespace, or if none is named.
        """
        is_near = hello.pid_namespace in (0, self._namespace)
        if is_near and hello.pid == pid:
            return True
        namespace, number = proc.pid_namespace(pid, self.procfs), self.read(proc.own_number, pid)
        if number is None:
            return not is_near
        if number != hello.pid or (namespace and hello.pid_namespace not in (0, namespace)):
            return False
        if namespace:
            self._host_pids[_identity(hello)] = pid
        return True

    def is_of_user(self, pid: int, uid: int | None) -> bool:
        """Return whether a process is this user's; for None (not known), whether it is the agent's, but not root's."""
        try:
            owner = (self.procfs / str(pid)).stat().st_uid
        except OSError:
            return False
        return owner == uid if uid is not None else owner == os.getuid() != 0

    def alive(self, hello: wire.Hello | None) -> bool | None:
        """Return whether the training process is alive; None where that is not visible."""
        if hello is None or not hello.process_start_ticks:
            return None
        if self.host_pid(hello) is not None:
            return True
        return False if hello.pid_namespace in (0, self._namespace) or _identity(hello) in self._host_pids else None

    def read(self, reader: Callable[[int, Path], T], pid: int) -> T | None:
        """Return what a reader of `gpuwatch.host.proc` gives for a process; None where it is not readable."""
        return proc.optional(reader, pid, self.procfs)

    def _owner_now(self, pid: int) -> Owner:
        try:
            uid = os.stat(f"{self.procfs}/{pid}").st_uid  # noqa: PTH116 - for each rank, each second
        except OSError:
            return NO_OWNER
        stat = self.stat(pid)  # a number that is given again is another process's
        return self._owner(pid, uid, None if stat is None else stat.start_ticks)

    def cores(self, hello: wire.Hello | None) -> frozenset[int]:
        """Return the cores that a training process may run on; empty where that is not readable."""
        pid = self.host_pid(hello)
        return frozenset() if pid is None else self.read(proc.allowed_cores, pid) or frozenset()

    def quota(self, pid: int) -> cgroup.Quota | None:
        """Return the CPU quota over a process; None without a readable one."""
        return self._quota(self.groups("cpu", pid))

    def memory_room(self, pid: int) -> cgroup.MemoryRoom | None:
        """Return what a process can use within its container's or job's limit; None without one."""
        return self._room(self.groups("memory", pid))

    def open_files(self, pid: int) -> int | None:
        """Return how many file descriptors a process has open; None where that is not readable."""
        try:
            return len(os.listdir(self.procfs / str(pid) / "fd"))  # noqa: PTH208 - names only, thousands of them
        except OSError:
            return None

    def update_shm(self, hellos: Iterable[wire.Hello | None]) -> None:
        """Read the /dev/shm of these training processes, without waiting for one that hangs."""
        self._shm.update({pid for hello in hellos if (pid := self.host_pid(hello)) is not None})

    def shm(self, pid: int) -> Shm | None:
        """Return /dev/shm in the process's own mount namespace, as of the last tick; None where it is not readable."""
        return self._shm.known.get(pid)

    def ended(self, pids: set[int]) -> set[int]:
        """Return those that have ended since the first call with them: a GPU's process list is up to 10 s old.

        A process that was never visible (of another pid namespace, without `pid: host`) is not among them.
        """
        alive = {pid for pid in pids if (stat := self.stat(pid)) is not None and stat.alive}
        self._seen = (self._seen & pids) | alive
        return self._seen - alive

    def with_parents(self, pid: int) -> Iterator[int]:
        """Yield a process, its parent, and so on up to the eighth, as far as they are visible."""
        for _ in range(_MOST_PARENTS):
            yield pid
            stat = self.stat(pid)
            if stat is None or stat.parent <= 1:
                return
            pid = stat.parent

    def _search(self, namespace: int, number: int) -> int | None:
        """Find a container's process by its number in its own namespace. Source: NSpid in /proc/PID/status, proc(5)."""
        with contextlib.suppress(OSError):  # no descriptor is free
            for pid in (int(entry.name) for entry in self.procfs.iterdir() if entry.name.isdigit()):
                is_inside = proc.pid_namespace(pid, self.procfs) == namespace
                if is_inside and self.read(proc.own_number, pid) == number:
                    return pid
        return None


def _identity(hello: wire.Hello) -> _Identity:
    return hello.pid_namespace, hello.pid, hello.process_start_ticks
