"""Writes the history in a thread of its own, so that a disk that hangs holds up neither the page nor the ledgers."""

import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from gpuwatch_agent.deadline import DeadlineThread
from gpuwatch_agent.history import History, Tick

logger = logging.getLogger(__name__)

_WAIT_S = 2.0  # a second is served once it is written, or after so long; while the disk hangs, at once
_MOST_WAITING_BYTES = 16 << 20
_SAMPLE_BYTES = 200
_MARK_WAIT_S = 0.2


class HistoryWriter:
    """The one that calls `commit`, `downsample` and `trim` of a history. For one calling thread."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._thread, self._marker = DeadlineThread("history", math.inf), DeadlineThread("history's mark", math.inf)
        self._hangs = self._trim_is_due = False
        self.waiting: deque[tuple[Tick, int]] = deque()
        """Seconds that wait in memory for the disk, with their sizes in bytes."""
        self._unwritten: dict[tuple[str, int], bytes] = {}  # newest records of runs that could not be written yet
        self._skipped: dict[tuple[str, int], bytes] = {}  # and of those in seconds that were not kept in memory
        self.skipped = 0  # seconds that were not kept in memory either, as too many were waiting

    def commit(self, tick: Tick) -> bool:
        """Write one second; return whether it is written now. If the disk hangs it waits in memory, 16 MiB at most."""
        packed = sum(len(column) for batch in tick.steps for column in batch.columns.values())
        size = _SAMPLE_BYTES * len(tick.samples) + packed + sum(map(len, tick.runs.values()))
        if self.waiting and size + sum(size for _, size in self.waiting) > _MOST_WAITING_BYTES:
            self.skipped += 1
            self._skipped.update(tick.runs)
        else:
            self.waiting.append((tick._replace(runs={**self._skipped, **tick.runs}), size))
            self._skipped = {}
        written = self._do(self._write_waiting)
        if written is not None and self.waiting:  # what has returned had begun before
            written = self._do(self._write_waiting)
        is_behind = not written or bool(self.waiting or self._skipped)
        if is_behind != self._history.is_behind:  # before the page of this second is served
            with suppress(OSError):
                self._marker.offer(lambda: self._history.mark_behind(is_behind), _MARK_WAIT_S)
        return not is_behind

    def tidy(self, now_s: float, trim: bool) -> None:
        """Downsample, and trim if asked to, without waiting; while the disk is busy do neither, and trim next time."""
        self._trim_is_due = self._trim_is_due or trim
        if not self._hangs:
            self._do(lambda: self._tidy(now_s), waits=False)

    def _tidy(self, now_s: float) -> bool:
        self._history.downsample(now_s)
        if self._trim_is_due:
            self._trim_is_due = False
            self._history.trim(now_s)
        return True

    def close(self) -> None:
        """Close the history, unless its disk hangs: then the process ends without."""
        try:
            answers = self._do(lambda: True) is not None
        except Exception:  # of work that had begun before: the sampler has ended, which logs it
            answers = True
        if answers:
            self._history.close()

    def _write_waiting(self) -> bool:
        """Write them. A run's record comes only when it changes: an unwritten one goes with the next second."""
        written = True
        while self.waiting:
            try:
                tick = self.waiting[0][0]
                self._unwritten.update(tick.runs)
                if written := self._history.commit(tick._replace(runs=self._unwritten)):
                    self._unwritten = {}
            finally:
                self.waiting.popleft()
        return written

    def _do(self, work: Callable[[], bool], waits: bool = True) -> bool | None:
        """Return the result of this, or of what had begun before; None while it is not there."""
        done = self._thread.offer(work, _WAIT_S if waits and not self._hangs else 0.0)
        if waits and self._hangs != (done is None):
            self._hangs = done is None
            now = f"has not responded for {_WAIT_S:g} s; up to 16 MiB are buffered" if self._hangs else "responds again"
            logger.warning("history %s: its disk %s", self._history.path, now)
        return done
