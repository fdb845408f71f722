"""What threatens a loader's workers, and what has killed them: said on stderr at once, and kept for the verdict and the agent."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gpuwatch.formatting import size
from gpuwatch.hook.account import Accounts
from gpuwatch.hook.shm_warning import ShmWarning, bytes_ahead_of, shared_bytes
from gpuwatch.hook.worker_deaths import OomKills, deaths
from gpuwatch.host.shm import largest_tensor_bytes
from gpuwatch.wire import MAX_DEATHS, WorkerDeath

_NO_ROOM = ("allocate shared memory", "write to file </torch_", "Bus error")
"""What torch says where /dev/shm is full."""


class LoaderHealth:
    """Follows the loader that feeds the training steps. All of it is the training thread's."""

    def __init__(self, accounts: Accounts, quiet: bool) -> None:
        self._accounts = accounts
        self._quiet = quiet
        self._shm = ShmWarning()
        self._kills: OomKills | None = None
        self._shared_bytes: int | None = None
        """Of the last pass's first batch."""
        self._workers: Sequence[Any] = ()

    def pass_begins(self, loader: Any, iterator: Any) -> None:
        """Take over the workers of a new pass. multiprocessing's objects are kept, for their exit codes: they hold no data set."""
        self.look_for_dead_workers()
        self._workers = tuple(getattr(iterator, "_workers", ()))
        if self._workers:
            self._kills = self._kills or OomKills()
            self._warn(bytes_ahead_of(loader) or self._shared_bytes)

    def first_batch(self, batch: Any) -> None:
        """Forecast /dev/shm from the size of a batch."""
        self._accounts.worker_deaths = ()  # training has gone on: what died was said, and is no more what stops it
        if self._workers:
            self._shared_bytes = shared_bytes(batch)
            self._warn(self._shared_bytes)

    def fetch_failed(self, error: BaseException) -> None:
        """Look for what the loader's error may mean: dead workers, or a /dev/shm without room (newer torch asks for it first)."""
        self.look_for_dead_workers()
        if not self._accounts.worker_deaths and not self._shm.said and any(word in str(error) for word in _NO_ROOM):
            self._say(f"/dev/shm has no room for a batch{self._shm.room()}. {self._larger_shm()}")

    def _larger_shm(self) -> str:
        """Return what to do where no batch came: the size to give, by the tensors that living workers have asked room for."""
        from gpuwatch.diagnosis.prediction import larger_shm, prefetch_of, queues_bytes
        from gpuwatch.diagnosis.rules.worker_killed import LARGER_SHM

        loader = self._accounts.loader
        tensor = largest_tensor_bytes(worker.pid for worker in self._workers if worker.pid)
        if loader is None or not loader.num_workers or tensor is None:
            return LARGER_SHM
        needed = queues_bytes(loader, tensor, self._accounts.local_world_size)
        queues = f"{loader.num_workers} workers × {prefetch_of(loader)} batches with a tensor of {size(tensor)}"
        return f"{queues} need {size(needed)} or more: {larger_shm(needed)}"

    def look_for_dead_workers(self) -> None:
        """Note which workers a signal has killed, and say it. The loader's own words for it come later, or are less."""
        if self._kills is None or not self._workers:
            return
        known = {death.pid for death in self._accounts.worker_deaths}
        found = tuple(each for each in deaths(self._workers, self._kills) if each.pid not in known)
        if not found:
            return
        self._accounts.worker_deaths = (*self._accounts.worker_deaths, *found)[:MAX_DEATHS]
        self._say(self._described(found))

    def _described(self, found: tuple[WorkerDeath, ...]) -> str:
        from gpuwatch.diagnosis.rules.worker_killed import worker_killed
        from gpuwatch.diagnosis.window import Window

        accounts = self._accounts
        window = Window(
            duration_s=0.0,
            loader=accounts.loader_with_batch(),
            host=accounts.watcher.facts(),
            local_world_size=accounts.local_world_size,
            worker_deaths=found,
        )
        finding = worker_killed(window)
        assert finding is not None
        return f"{finding.title} ({'; '.join(each.text for each in finding.evidence)}). {finding.advice}"

    def _warn(self, batch_bytes: int | None) -> None:
        text = self._shm.look(self._accounts.loader, batch_bytes, self._accounts.local_world_size)
        if text is not None:
            self._say(text)

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(f"\ngpuwatch: {text}", file=sys.stderr, flush=True)
