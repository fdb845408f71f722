"""What a GPU usually does, over longer than the window: its power while a run makes steps, its memory once a minute.

No I/O and no clock. Times in ns of the agent's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from gpuwatch.thresholds import THRESHOLDS
from gpuwatch.window import MemoryTrend
from gpuwatch_agent.gpus import GpuAccount
from gpuwatch_agent.runs import RUNNING

_STEPPING_NS = 5_000_000_000
"""A run makes steps when its last one ended so recently."""
_POWERS = 300
_LEAST_POWERS = 30
_MEMORY_LOOKS = 10
"""Looks at a GPU's memory in the time over which it must grow to be called creeping."""
_MEMORIES = 60


class GpuTrends:
    """Follows every GPU; what belongs to a run is forgotten with the run's hold of the GPU."""

    def __init__(self) -> None:
        self._holders: dict[str, tuple[str, int] | None] = {}
        self._powers: dict[str, deque[float]] = {}
        self._memories: dict[str, deque[tuple[int, int]]] = {}

    def look(self, account: GpuAccount, power_watts: float | None, memory_bytes: int | None, now_ns: int) -> None:
        """Take this second's readings of one GPU."""
        run = account.run
        holder = None if run is None else (run.run, run.rank)
        if self._holders.get(account.uuid) != holder:
            self._holders[account.uuid] = holder
            self._powers.pop(account.uuid, None)
            self._memories.pop(account.uuid, None)
        if run is None or run.status != RUNNING:
            return
        last_ns = run.steps.last_end_ns
        stepping = last_ns is not None and now_ns - last_ns < _STEPPING_NS
        if stepping and power_watts is not None:
            self._powers.setdefault(account.uuid, deque(maxlen=_POWERS)).append(power_watts)
        if memory_bytes is not None:
            kept = self._memories.setdefault(account.uuid, deque(maxlen=_MEMORIES))
            if not kept or now_ns - kept[-1][0] >= THRESHOLDS.memory_creep_s * 1e9 / _MEMORY_LOOKS:
                kept.append((now_ns, memory_bytes))

    def keep_only(self, uuids: Sequence[str]) -> None:
        """Forget every GPU but these."""
        for gone in self._holders.keys() - set(uuids):
            for book in (self._holders, self._powers, self._memories):
                book.pop(gone, None)

    def usual_watts(self, uuid: str) -> float | None:
        """Return the median power while the run made steps; None with less than half a minute of it."""
        powers = self._powers.get(uuid, ())
        return median(powers) if len(powers) >= _LEAST_POWERS else None

    def memory(self, uuid: str, total_bytes: int | None) -> MemoryTrend | None:
        """Return how used memory went since the run took the GPU, an hour at most; None with fewer than two looks."""
        kept = list(self._memories.get(uuid, ()))
        if len(kept) < 2 or not total_bytes:
            return None
        changes = [after[1] - before[1] for before, after in pairwise(kept)]
        return MemoryTrend(
            span_s=(kept[-1][0] - kept[0][0]) / 1e9,
            rises=sum(change > 0 for change in changes),
            falls=sum(change < 0 for change in changes),
            growth_bytes=kept[-1][1] - kept[0][1],
            total_bytes=total_bytes,
        )
