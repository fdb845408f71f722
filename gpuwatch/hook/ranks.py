"""The ranks of a run compared without an agent: rank 0 reads the summaries that all put into torch.distributed's store.

A thread does so while steps are made, without collectives, over its own connection (`Store.clone`): the store may hang
as long as its server, and neither training, whose process groups use it too, nor sending to the agent waits for that.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from gpuwatch.hook.identity import Membership, torch_world

if TYPE_CHECKING:
    from gpuwatch.diagnosis.finding import RankSummary
    from gpuwatch.hook.recorder import Failed

_OFTEN, _OFTEN_S, _LATER_S = 10, 1.0, 5.0
"""So many first exchanges, one each second, and the interval of later ones. A summary takes a few ms to make."""
_RANKS_PER_S = 64  # rank 0 reads so many summaries a second at most
_MOST_RANKS = 4096


class RankExchange:
    """One process's view of the other ranks of its run."""

    def __init__(
        self,
        membership: Membership,
        summary: Callable[[], RankSummary],
        is_training: Callable[[], bool],
        failed: Failed,
    ) -> None:
        self._membership, self._summary, self._is_training, self._failed = membership, summary, is_training, failed
        self._thread: threading.Thread | None = None
        self.stopped = False
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the thread to end
        self.others: dict[int, RankSummary] = {}  # on rank 0: the newest summary of each other rank
        self.models: list[Any] = []  # of DDP, whose waits the training thread is to watch
        self.joined = False  # on any other rank: rank 0 takes part, and this rank's summary is stored

    def start_if_distributed(self) -> None:
        """Start the exchange once torch.distributed has several ranks. Called by the background thread in each tick."""
        world_size = self._membership.identity.world_size
        if self._thread is None and 1 < world_size <= _MOST_RANKS and torch_world() is not None:
            self._thread = threading.Thread(target=self._run, name="gpuwatch-ranks", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the exchange: an interpreter that ends while a thread is in a call of the store's aborts the process."""
        self.stopped = True
        self._stop.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store().clone()
            count, searched = 0, False
            while not self.stopped and torch_world() is not None:
                if not searched and (models := distributed_models()) is not None:
                    self.models, searched = models, True
                # Else the process that serves the store may have ended, and torch prints warnings.
                if self._is_training():
                    self.exchange(store)
                    count += 1
                interval_s = _OFTEN_S if count < _OFTEN else _LATER_S
                with contextlib.suppress(queue.Empty):
                    self._stop.get(timeout=max(interval_s, self._membership.identity.world_size / _RANKS_PER_S))
        except Exception as error:
            self._failed("comparing the ranks", error)

    def exchange(self, store: Any) -> None:
        """Store this rank's summary, and on rank 0 read those of the others. Raises: whatever the store does."""
        from gpuwatch.diagnosis.finding import RankSummary

        who = self._membership.identity
        store.set(_key(who.run, who.rank), msgspec.json.encode(self._summary()).decode())
        if who.rank:
            self.joined = self.joined or store.check([_key(who.run, 0)])
            return
        for rank in range(1, who.world_size):
            if self.stopped:
                return
            key = _key(who.run, rank)
            if rank in self.others or store.check([key]):
                self.others[rank] = msgspec.json.decode(store.get(key), type=RankSummary)


def distributed_models() -> list[Any] | None:
    """Return this process's DDP models; none where anything was compiled: a hook would be traced into the graph.

    None while torch's compiler is imported, as in a first optimizer step. gc.get_objects() breaks unfinished tuples.
    """
    ddp = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    compiler = sys.modules.get("torch._dynamo.utils")
    counters = getattr(compiler, "counters", None)
    if compiler is not None and counters is None:
        return None
    if ddp is None or (counters is not None and counters["frames"]["total"]):
        return []
    return [each for each in gc.get_referrers(ddp, *ddp.__subclasses__()) if issubclass(type(each), ddp)]


def _key(run: str, rank: int) -> str:
    return f"gpuwatch/{run}/rank{rank}"
