"""What threatens or has killed a loader's workers: printed on stderr at once, kept for the verdict and the agent.

The rules `shm_exhaustion` and `worker_killed` decide and advise, as in a diagnosis. Sources: `Process.exitcode`; the
control group's count of kills for lack of memory; `oom_kill` in /proc/vmstat, proc_vmstat(5), of the whole node.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpuwatch.formatting import size
from gpuwatch.hook.account import Accounts, thresholds
from gpuwatch.hook.batches import tensors
from gpuwatch.host.cgroup import folders, memory_room, oom_kills
from gpuwatch.host.proc import oom_kills_on_node, optional, shm_bytes
from gpuwatch.wire import MAX_DEATHS, Loader, WorkerDeath

if TYPE_CHECKING:
    from gpuwatch.diagnosis.finding import Finding
    from gpuwatch.diagnosis.window import HostFacts, Window

_NO_ROOM = ("allocate shared memory", "write to file </torch_", "Bus error")  # torch's errors where /dev/shm is full
# Not SIGTERM and SIGINT: these end workers on purpose.
_DEADLY = {signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
_MAX_FOUND = 64


class LoaderHealth:
    """Follows the training loader in the training thread only: two threads polling a child may lose its exit code."""

    def __init__(self, accounts: Accounts, quiet: bool) -> None:
        self._accounts = accounts
        self._quiet = quiet
        self._forecasts: set[tuple[int | None, int | None, int]] = set()  # settings whose need of /dev/shm was compared
        self._shm_warned = False
        self._kills: OomKills | None = None
        self._shared_bytes: int | None = None  # of the last pass's first batch
        self._workers: Sequence[Any] = ()

    def begin_pass(self, iterator: Any) -> None:
        """Follow a new pass's workers. multiprocessing's objects are kept for exit codes: they hold no data set."""
        self.find_dead_workers()
        self._workers = tuple(getattr(iterator, "_workers", ()))
        if self._workers:
            self._kills = self._kills or OomKills()
            self._forecast_shm()

    def first_batch(self, batch: Any) -> None:
        """Forecast /dev/shm from the size of a batch."""
        self._accounts.worker_deaths = ()  # printed already; the training has gone on, so they are not what stops it
        if self._workers:
            self._shared_bytes = shared_bytes(batch)
            self._forecast_shm()

    def fetch_failed(self, error: BaseException) -> None:
        """Look for the cause of a loader's error: dead workers, or a full /dev/shm (newer torch checks it first)."""
        from gpuwatch.diagnosis.rules.killed import LARGER_SHM

        self.find_dead_workers()
        known = self._accounts.worker_deaths or self._shm_warned
        if not known and any(part in str(error) for part in _NO_ROOM):
            shm = optional(shm_bytes)
            room = "" if shm is None else f" ({size(shm[0])}, {size(shm[1])} of it used)"
            self._print(f"/dev/shm has no room for a batch{room}: {LARGER_SHM}")

    def find_dead_workers(self) -> None:
        """Note and print which workers a signal has killed. The loader's own error comes later or says less."""
        if self._kills is None or not self._workers:
            return
        accounts = self._accounts
        known = {death.pid for death in accounts.worker_deaths}
        found = tuple(each for each in deaths(self._workers, self._kills) if each.pid not in known)
        if not found:
            return
        accounts.worker_deaths = (*accounts.worker_deaths, *found)[:MAX_DEATHS]
        from gpuwatch.diagnosis.rules.killed import worker_killed

        loader, host = accounts.loader_with_batch() or Loader(), accounts.watcher.facts()
        finding = worker_killed(self._window(loader, host, worker_deaths=found))
        assert finding is not None
        self._print(f"{finding.title} ({_evidence(finding)}). {finding.advice}")

    def _forecast_shm(self) -> None:
        """Warn before the bus error if a loader's full queues will not fit into /dev/shm, once per setting of it."""
        loader, batch_bytes = self._accounts.loader, self._shared_bytes
        if loader is None or not loader.num_workers or not batch_bytes:
            return
        key = (loader.num_workers, loader.prefetch_factor, batch_bytes)
        if key in self._forecasts or (shm := optional(shm_bytes)) is None:
            return
        self._forecasts.add(key)
        from gpuwatch.diagnosis.rules.killed import shm_exhaustion
        from gpuwatch.diagnosis.window import HostFacts

        host = HostFacts(shm_size_bytes=shm[0], shm_used_bytes=shm[1])
        window = self._window(msgspec.structs.replace(loader, batch_bytes=batch_bytes), host)
        finding = shm_exhaustion(window, thresholds())
        if finding is not None:
            self._shm_warned = True
            self._print(f"{finding.title}: {_evidence(finding)}. {finding.advice}")

    def _window(self, loader: Loader, host: HostFacts, **facts: Any) -> Window:
        """Return what the rules about workers read."""
        from gpuwatch.diagnosis.window import Window

        ranks = self._accounts.local_world_size
        return Window(duration_s=0.0, loader=loader, host=host, local_world_size=ranks, **facts)

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(f"\ngpuwatch: {text}", file=sys.stderr, flush=True)


class OomKills:
    """How many processes the kernel has killed for lack of memory: in this control group, else on the node."""

    def __init__(self, procfs: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        self._procfs, self._groups = procfs, folders("memory", procfs, sysfs)
        self._before = self._count()

    def grown(self) -> int | None:
        """Return how many there were since this was made; None where no count can be read."""
        count = self._count()
        return None if count is None else max(0, count - (self._before or 0))

    def limit_bytes(self) -> int | None:
        """Return the memory limit of the control group; None where it has none."""
        room = memory_room(self._groups)
        return None if room is None else room.limit_bytes

    def _count(self) -> int | None:
        of_group = oom_kills(self._groups)
        return oom_kills_on_node(self._procfs) if of_group is None else of_group


def deaths(workers: Iterable[Any], kills: OomKills, shm: Path = Path("/dev/shm")) -> tuple[WorkerDeath, ...]:
    """Return those of a loader's worker processes that a signal has killed. Call it in the thread that owns them."""
    found = []
    for worker in workers:
        code, facts = getattr(worker, "exitcode", None), dict[str, Any]()
        if not isinstance(code, int) or -code not in _DEADLY:
            continue
        if -code == signal.SIGKILL and (count := kills.grown()) is not None:
            facts = {"out_of_memory": count > 0, "oom_kills": count}
            facts["memory_limit_bytes"] = kills.limit_bytes() if count else None
        elif -code == signal.SIGBUS and (room := optional(shm_bytes, shm)) is not None:
            facts = {"shm_size_bytes": room[0], "shm_free_bytes": room[0] - room[1]}
        found.append(WorkerDeath(int(getattr(worker, "pid", 0) or 0), -code, **facts))
    return tuple(found[:_MAX_FOUND])


def shared_bytes(batch: Any) -> int | None:
    """Return the bytes of torch tensors that a batch puts into /dev/shm; None without any: it goes through a pipe."""
    return sum(int(each.nbytes) for each in tensors(batch) if hasattr(each, "share_memory_")) or None


def _evidence(finding: Finding) -> str:
    return "; ".join(each.text for each in finding.evidence)
