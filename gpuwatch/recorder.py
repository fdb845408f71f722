"""What the training thread writes down: a log of steps and phases. Everything here is on the hot path.

The training thread reads the clock, changes a few slots and appends one tuple a step. Whoever wants to know what
happened (the hook's background thread, `report()`) drains the log into a `Timeline`. Nothing here does I/O or takes a
lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

STEP, PART, SPAN, ENTER, EXIT = range(5)
"""Kinds of log entries; the first field of each tuple. Times in ns.

(STEP, begin, end, data_wait, transfer, samples, epoch_start)   a step, or its last part
(PART, begin, end, data_wait, transfer, samples, epoch_start)   a part of a step that goes on after something else
(SPAN, begin, end, state)                                       time of one state outside steps
(ENTER, at, name)                                               a phase begins; name None: a nested training loop
(EXIT, at)                                                      the innermost one ends
"""

STARTUP, DATA_WAIT, IN_STEP, BETWEEN, PHASE = "startup", "data_wait", "step", "between_steps", "phase "
"""What the training thread does now; PHASE is followed by the name of a declared phase."""

UNKNOWN_SAMPLES = -1
NOBODY = -1
"""The training thread of a recorder that is closed, or that a fork copied: nothing is recorded any more."""


class Recorder:
    """The log and the open step. One training thread writes; others only read single slots and pop from the log."""

    __slots__ = (
        "activity",
        "begin_ns",
        "clock",
        "data_ns",
        "depth",
        "epoch_start",
        "fetch_cpu_ns",
        "fetch_wall_ns",
        "in_step",
        "levels",
        "log",
        "mark_ns",
        "samples",
        "step_owner",
        "thread",
        "transfer_ns",
    )

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self.log: deque[tuple[Any, ...]] = deque()
        self.thread: int | None = None
        """The training thread; None until a loop begins, NOBODY once nothing is to be recorded any more."""
        self.in_step = False
        self.begin_ns = 0
        self.data_ns = 0
        self.transfer_ns = 0
        self.samples = UNKNOWN_SAMPLES
        self.epoch_start = False
        self.activity = STARTUP
        self.mark_ns = 0
        """When `activity` last changed to DATA_WAIT: where a fetch that is still open began."""
        self.step_owner: object | None = None
        """The loop whose next batch ends the open step."""
        self.levels: list[tuple[Any, ...]] = []
        """What was interrupted by each phase or nested loop that is open now."""
        self.depth = 0
        self.fetch_cpu_ns = 0
        self.fetch_wall_ns = 0
        """CPU and wall time of the training thread in those fetches that were sampled, cumulative."""

    def claim_thread(self) -> bool:
        """Return whether the calling thread is the training thread, becoming it when no other one is at work."""
        me = get_ident()
        if self.thread != me:
            if self.thread == NOBODY:
                return False
            if self.thread is not None and (self.in_step or self.depth):
                return False
            self.thread = me
        return True

    def begin_step(self, owner: object | None, at_ns: int) -> None:
        """Begin a step, ending the one that is open."""
        if self.in_step:
            self.end_step(at_ns)
        self.in_step = True
        self.step_owner = owner
        self.begin_ns = at_ns
        self.data_ns = self.transfer_ns = 0
        self.samples = UNKNOWN_SAMPLES
        self.epoch_start = False
        self.activity = IN_STEP

    def end_step(self, at_ns: int) -> None:
        """End the open step, if there is one."""
        if self.in_step:
            self._log_piece(STEP, at_ns)
            self.in_step = False
            self.step_owner = None
        self.activity = BETWEEN

    def abandon_fetch(self, at_ns: int) -> None:
        """The open step got no batch: its time was a wait for data, and it was no step."""
        if self.in_step:
            self.log.append((SPAN, self.begin_ns, at_ns, "input_wait"))
            self.in_step = False
            self.step_owner = None
        self.activity = BETWEEN

    def enter(self, name: str | None, at_ns: int) -> int:
        """Interrupt what is open by a phase, or by a nested training loop (name None); return the new depth."""
        if self.in_step:
            self._log_piece(PART, at_ns)
        self.levels.append((self.in_step, self.step_owner, self.samples, self.epoch_start, self.activity))
        self.log.append((ENTER, at_ns, name))
        self.in_step = False
        self.step_owner = None
        self.activity = BETWEEN if name is None else PHASE + name
        self.depth = len(self.levels)
        return self.depth

    def exit(self, depth: int, at_ns: int) -> None:
        """Leave the phase or nested loop at `depth` and all that was entered inside it; go on with what it interrupted."""
        while len(self.levels) >= depth > 0:
            self.end_step(at_ns)
            self.log.append((EXIT, at_ns))
            self.in_step, self.step_owner, self.samples, self.epoch_start, self.activity = self.levels.pop()
            self.begin_ns = at_ns
            self.data_ns = self.transfer_ns = 0
        self.depth = len(self.levels)

    def _log_piece(self, kind: int, at_ns: int) -> None:
        self.log.append((kind, self.begin_ns, at_ns, self.data_ns, self.transfer_ns, self.samples, self.epoch_start))

    def open_parts_ns(self, now_ns: int) -> tuple[int, dict[str, int]]:
        """Return when the open step began and its time so far by state; (now, {}) when none is open."""
        if not self.in_step:
            return now_ns, {}
        begin = self.begin_ns
        open_ns = max(0, now_ns - begin)
        data = self.data_ns
        if self.activity == DATA_WAIT:
            data += max(0, now_ns - self.mark_ns)
        data = min(data, open_ns)
        transfer = min(self.transfer_ns, open_ns - data)
        return begin, {"input_wait": data, "transfer": transfer, "compute": open_ns - data - transfer}
