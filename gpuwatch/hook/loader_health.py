"""What threatens a loader's workers, and what has killed them: printed on stderr at once, and kept for the verdict and the agent.

torch itself reports a killed worker as "exited unexpectedly", or as a bus error where /dev/shm is full. What decides and what is advised here
are the rules `shm_exhaustion` and `worker_killed`, as in a diagnosis.
Sources: `Process.exitcode`; the control group's count of kills for lack of memory; `oom_kill` in /proc/vmstat, proc_vmstat(5), of the whole node.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpuwatch.errors import NoData
from gpuwatch.formatting import size
from gpuwatch.hook.account import Accounts, thresholds
from gpuwatch.hook.batches import tensors
from gpuwatch.host.cgroup import memory_room, oom_kills
from gpuwatch.host.proc import oom_kills_on_node
from gpuwatch.host.shm import largest_tensor_bytes, shm_bytes
from gpuwatch.wire import MAX_DEATHS, Loader, WorkerDeath

if TYPE_CHECKING:
    from gpuwatch.diagnosis.finding import Finding

_NO_ROOM = ("allocate shared memory", "write to file </torch_", "Bus error")
"""torch's errors where /dev/shm is full."""
_DEADLY = frozenset(
    int(number)
    for number in (
        signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE,
    )
)  # fmt: skip
"""Not SIGTERM and SIGINT: these end workers on purpose."""
_MAX_FOUND = 64


class LoaderHealth:
    """Follows the loader that feeds the training steps. Used by the training thread only.

    (Two threads that poll the same child may lose its exit code: multiprocessing's poll is not locked.)
    """

    def __init__(self, accounts: Accounts, quiet: bool) -> None:
        self._accounts = accounts
        self._quiet = quiet
        self._shm = ShmWarning()
        self._kills: OomKills | None = None
        self._shared_bytes: int | None = None
        """Of the last pass's first batch."""
        self._workers: Sequence[Any] = ()

    def begin_pass(self, loader: Any, iterator: Any) -> None:
        """Follow the workers of a new pass. multiprocessing's objects are kept, for their exit codes: they hold no data set."""
        self.find_dead_workers()
        self._workers = tuple(getattr(iterator, "_workers", ()))
        if self._workers:
            self._kills = self._kills or OomKills()
            self._warn(bytes_ahead_of(loader) or self._shared_bytes)

    def first_batch(self, batch: Any) -> None:
        """Forecast /dev/shm from the size of a batch."""
        self._accounts.worker_deaths = ()  # printed already; the training has gone on, so they are not what stops it
        if self._workers:
            self._shared_bytes = shared_bytes(batch)
            self._warn(self._shared_bytes)

    def fetch_failed(self, error: BaseException) -> None:
        """Look for what the loader's error may mean: dead workers, or a full /dev/shm (newer torch asks it for room first)."""
        self.find_dead_workers()
        known = self._accounts.worker_deaths or self._shm.warned
        if not known and any(part in str(error) for part in _NO_ROOM):
            self._print(f"/dev/shm has no room for a batch{self._shm.room()}. {self._larger_shm()}")

    def _larger_shm(self) -> str:
        """Return what to do where no batch came: the size to set, by the tensors that living workers have requested room for."""
        from gpuwatch.diagnosis.prediction import larger_shm, prefetch_of
        from gpuwatch.diagnosis.rules.killed import LARGER_SHM

        loader = self._accounts.loader
        tensor = largest_tensor_bytes(worker.pid for worker in self._workers if worker.pid)
        if loader is None or not loader.num_workers or tensor is None:
            return LARGER_SHM
        needed = loader.num_workers * prefetch_of(loader) * tensor * self._accounts.local_world_size
        queues = f"{loader.num_workers} workers × {prefetch_of(loader)} batches with a tensor of {size(tensor)}"
        return f"{queues} need {size(needed)} or more: {larger_shm(needed)}"

    def find_dead_workers(self) -> None:
        """Note and print which workers a signal has killed. The loader's own error comes later, or has less information."""
        if self._kills is None or not self._workers:
            return
        known = {death.pid for death in self._accounts.worker_deaths}
        found = tuple(each for each in deaths(self._workers, self._kills) if each.pid not in known)
        if not found:
            return
        self._accounts.worker_deaths = (*self._accounts.worker_deaths, *found)[:MAX_DEATHS]
        self._print(self._described(found))

    def _described(self, found: tuple[WorkerDeath, ...]) -> str:
        from gpuwatch.diagnosis.rules.killed import worker_killed
        from gpuwatch.diagnosis.window import Window

        accounts = self._accounts
        window = Window(
            duration_s=0.0,
            loader=accounts.loader_with_batch() or Loader(),
            host=accounts.watcher.facts(),
            local_world_size=accounts.local_world_size,
            worker_deaths=found,
        )
        finding = worker_killed(window)
        assert finding is not None
        return f"{finding.title} ({_evidence(finding)}). {finding.advice}"

    def _warn(self, batch_bytes: int | None) -> None:
        text = self._shm.check(self._accounts.loader, batch_bytes, self._accounts.local_world_size)
        if text is not None:
            self._print(text)

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(f"\ngpuwatch: {text}", file=sys.stderr, flush=True)


class ShmWarning:
    """Warns before the bus error where a loader's full queues will not fit into /dev/shm, once per setting of the loader."""

    def __init__(self, read: Callable[[], tuple[int, int]] = shm_bytes) -> None:
        self._read = read
        self.warned = False
        self._checked: set[tuple[int | None, int | None, int]] = set()

    def check(self, loader: Loader | None, batch_bytes: int | None, ranks: int) -> str | None:
        """Return the warning; None where there is room, it was given before, or the sizes are not known."""
        if loader is None or not loader.num_workers or not batch_bytes:
            return None
        key = (loader.num_workers, loader.prefetch_factor, batch_bytes)
        if key in self._checked:
            return None
        self._checked.add(key)
        try:
            total, used = self._read()
        except NoData:
            return None
        from gpuwatch.diagnosis.rules.killed import shm_exhaustion
        from gpuwatch.diagnosis.window import HostFacts, Window

        window = Window(
            duration_s=0.0,
            loader=msgspec.structs.replace(loader, batch_bytes=batch_bytes),
            host=HostFacts(shm_size_bytes=total, shm_used_bytes=used),
            local_world_size=ranks,
        )
        finding = shm_exhaustion(window, thresholds())
        if finding is None:
            return None
        self.warned = True
        return f"{finding.title}: {_evidence(finding)}. {finding.advice}"

    def room(self) -> str:
        """Return e.g. " (64 MiB, 60 MiB of it used)"; empty where it cannot be read."""
        try:
            total, used = self._read()
        except NoData:
            return ""
        return f" ({size(total)}, {size(used)} of it used)"


class OomKills:
    """How many processes the kernel has killed for lack of memory: in this control group, else on the node."""

    def __init__(self, procfs: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        self._procfs = procfs
        self._sysfs = sysfs
        self._before = self._counts()

    def grown(self) -> int | None:
        """Return how many there were since this was made; None where no count can be read.

        The group's own count is preferred: workers are in the group, and another job's kills are not.
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
            continue
        total = free = None
        if -code == signal.SIGBUS:
            try:
                total, used = shm_bytes(shm)
                free = total - used
            except NoData:
                pass
        found.append(WorkerDeath(pid, -code, shm_size_bytes=total, shm_free_bytes=free))
    return tuple(found[:_MAX_FOUND])


def shared_bytes(batch: Any) -> int | None:
    """Return what a worker puts into /dev/shm for a batch: its torch tensors. None: it has none, and goes through a pipe."""
    sizes = [int(each.nbytes) for each in tensors(batch) if hasattr(each, "share_memory_")]
    return sum(sizes) if sizes else None


def bytes_ahead_of(loader: Any) -> int | None:
    """Return a batch's bytes where they are known before the first one: from the tensors of a TensorDataset."""
    batch_size, held = getattr(loader, "batch_size", None), getattr(getattr(loader, "dataset", None), "tensors", None)
    if not isinstance(batch_size, int) or not isinstance(held, tuple):
        return None
    sizes = [each.nbytes / each.shape[0] for each in held if hasattr(each, "share_memory_") and each.shape[0]]
    return int(batch_size * sum(sizes)) if sizes else None


def _evidence(finding: Finding) -> str:
    return "; ".join(each.text for each in finding.evidence)
