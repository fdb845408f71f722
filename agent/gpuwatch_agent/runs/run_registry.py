"""All runs of the node. What senders may add is bounded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpuwatch import wire
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.runs.records import RunRecord

logger = logging.getLogger(__name__)

_LATE_TURN_NS = 3_000_000_000


class RunBook:
    """The runs by (run, rank). Past `MAX_RUNS` a new one takes the place of the one that ended first, or is refused."""

    MAX_RUNS = 512
    KEEP_ENDED_S = 900.0
    """An ended run's series go after this; its history stays."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.runs: dict[tuple[str, int], Run] = {}
        self.refused = 0
        self._turned_ns: int | None = None

    def apply(self, message: wire.Message, now_ns: int, now_s: float) -> bool:
        """Take one message; return whether it brought step records that are new and are to be kept."""
        key = (message.run, message.rank)
        run = self.runs.get(key)
        if run is None:
            if len(self.runs) >= self.MAX_RUNS and not self._make_room():
                if not self.refused:
                    logger.warning("more than %s runs: further ones are refused and counted", self.MAX_RUNS)
                self.refused += 1
                return False
            run = self.runs[key] = Run(message.run, message.rank, self.boot_id)
        return run.apply(message, now_ns, now_s)

    def excuse_pause(self, now_ns: int) -> None:
        """Note that a turn begins. If the agent itself was held up, that is not the runs' silence."""
        pause_ns = 0 if self._turned_ns is None else now_ns - self._turned_ns
        self._turned_ns = now_ns
        if pause_ns > _LATE_TURN_NS:
            for run in self.runs.values():
                run.heard_ns = min(now_ns, run.heard_ns + pause_ns)

    def restore(self, records: Sequence[RunRecord], now_ns: int, now_s: float) -> None:
        """Take up the runs that a former agent kept, those that ended long ago left out."""
        for record in sorted(records, key=lambda record: record.last_message_s)[-self.MAX_RUNS :]:
            run = Run.restore(record, self.boot_id, now_ns, now_s)
            if run.ended_s is None or now_s - run.ended_s < self.KEEP_ENDED_S:
                run.changed = False
                self.runs[run.run, run.rank] = run

    def forget_ended(self, now_s: float) -> None:
        """Drop the runs that ended long enough ago."""
        for key, run in list(self.runs.items()):
            if run.ended_s is not None and run.status != RUNNING and now_s - run.ended_s > self.KEEP_ENDED_S:
                del self.runs[key]

    def _make_room(self) -> bool:
        ended = [(run.ended_s or 0.0, key) for key, run in self.runs.items() if run.status != RUNNING]
        if not ended:
            return False
        del self.runs[min(ended)[1]]
        return True
