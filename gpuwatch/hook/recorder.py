"""What the training thread writes down: a log of steps and phases. Everything here is on the hot path.

The training thread reads the clock, changes a few slots and appends one tuple a step. Whoever wants to know what
happened (the hook's background thread, `report()`) drains the log into a `Timeline`. Nothing here does I/O or takes a
lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gpuwatch.hook.events import (
    BETWEEN,
    CLOSED,
    COPY_FOLLOWS_NS,
    DATA_WAIT,
    ENTER,
    EXIT,
    IN_STEP,
    LOOSE,
    PART,
    PHASE,
    REST,
    SPAN,
    STARTUP,
    STEP,
    TRANSFERRING,
    UNKNOWN_SAMPLES,
    UNVERIFIED,
)
from gpuwatch.hook.fetches import FetchEvidence
from gpuwatch.hook.metering import Meter

if TYPE_CHECKING:
    from gpuwatch.ledger.device_timeline import DeviceTimeline


_AT_ONCE_NS = 20_000
"""Within this time of a batch a training launches nothing."""
_METERED = 16
"""Of so many last launches one is metered."""


class Recorder:
    """The log and the open step. One training thread writes; others only read single slots and pop from the log."""

    __slots__ = (
        "_serial",
        "activity",
        "begin_ns",
        "clock",
        "copy",
        "countdown",
        "data_ns",
        "device",
        "device_failed",
        "epoch_start",
        "failed",
        "fed_ns",
        "fetches",
        "home",
        "idle",
        "in_step",
        "level",
        "levels",
        "log",
        "mark_ns",
        "meter",
        "parts",
        "resting",
        "samples",
        "steady",
        "step_owner",
        "thread",
        "transfer_ns",
        "unfed",
    )

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        failed: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.clock = clock
        self.failed = failed
        """Called with what has failed and why."""
        self.log: deque[tuple[Any, ...]] = deque()
        self.thread: int | None = None
        """The training thread; None until a loop begins, CLOSED once nothing is to be recorded any more."""
        self.in_step = False
        self.begin_ns = 0
        self.data_ns = 0
        self.transfer_ns = 0
        self.samples = UNKNOWN_SAMPLES
        self.epoch_start = False
        self.unfed = False
        """The open step asked a second loader for a batch, and that had none: unless more happens it is no step."""
        self.activity = STARTUP
        self.idle = STARTUP
        """The activity while no step is open."""
        self.mark_ns = 0
        """When `activity` last changed: a wait or a copy that is open is counted from here."""
        self.parts: list[str] = []
        """The activities that each open `data()` or `transfer()` interrupted."""
        self.steady: object | None = None
        """The owner of the open step, while that is one of many alike with nothing out of the ordinary in it: see `leave_steady`."""
        self.fed_ns = 0
        """When the open step's batch had come, 0 while it is waited for. Kept in place of `data_ns` while steps are steady."""
        self.step_owner: object | None = None
        """The loop whose next batch ends the open step, or the context whose exit does."""
        self.levels: list[tuple[Any, ...]] = []
        """What was interrupted by each phase or nested loop that is open now; its serial number first."""
        self.level = 0
        """Serial number of the innermost of them, 0 without any. Numbers are never used again, so that a loop which is
        forgotten late (a kept iterator, a cycle) cannot close somebody else's phase."""
        self._serial = 0
        self.countdown = 1
        """Fetches until the next one that is looked at closely."""
        self.fetches = FetchEvidence()
        self.meter = Meter()
        self.home: DeviceTimeline | None = None
        """The device's timeline, once the user's code has set a device up."""
        self.device: DeviceTimeline | None = None
        """The same while steps are measured by it: not in declared phases, nor while it rests."""
        self.resting = False
        """The device's timeline leaves steps out, because measuring all of them costs too much."""
        self.device_failed = False
        """An event call has raised: the host's clock measures for the rest of the run."""
        self.copy: object | None = None
        """The open copy, as the device's timeline knows it."""

    def claim_thread(self, steps: bool = True) -> bool:
        """Return whether the calling thread is the training thread, becoming it when no other one is at work.

        Steps of the main thread win over those of any other, such as one that prefetches. A phase or a wait without a step
        (a checkpoint written by a thread, say) makes no thread the training thread while there is one.
        """
        return self.thread == get_ident() or self._take_over(steps)

    def _take_over(self, steps: bool) -> bool:
        me, owner = get_ident(), self.thread
        if owner == CLOSED:
            return False
        if owner is not None:
            is_main = me == threading.main_thread().ident
            idle = not self.in_step and not self.levels
            if not (steps and (is_main or idle)) and any(thread.ident == owner for thread in threading.enumerate()):
                return False
            now = self.clock()
            self.exit_all(now)
            self.abandon(now, "other")
        self.parts = []
        self.thread = me
        self.fetches.begin_in_this_thread()
        return True

    def leave_steady(self) -> None:
        """Bring up to date what is not kept while steps are steady: `activity`, `data_ns` and `mark_ns`.

        Most steps of most loops are alike: a batch is waited for, then worked on. Of these the hot path keeps `begin_ns`, `fed_ns`,
        `transfer_ns` and `samples` alone. Whatever else happens calls this first.
        """
        if self.steady is not None:
            self.steady = None
            self.activity = IN_STEP if self.fed_ns else DATA_WAIT
            self.mark_ns = self.fed_ns or self.begin_ns
            self.data_ns = self.mark_ns - self.begin_ns

    def doing(self) -> str:
        """Return what the training thread does now. Any thread may ask."""
        if self.steady is None:
            return self.activity
        return IN_STEP if self.fed_ns else DATA_WAIT

    def begin_step(self, owner: object, at_ns: int) -> None:
        """Begin a step, ending the one that is open. A `data()` or `transfer()` that is open goes on in it."""
        going_on = self.activity if self.parts and self.activity in (DATA_WAIT, TRANSFERRING) else IN_STEP
        if self.in_step:
            self.end_step(at_ns)
        self.open(owner, at_ns)
        self.activity = going_on

    def end_step(self, at_ns: int, more_follows: bool = False) -> None:
        """End the open step, if there is one."""
        self.leave_steady()
        if self.unfed:
            self.abandon(at_ns)
        if self.in_step:
            kind = PART if self.step_owner is LOOSE else STEP
            if self.activity is not IN_STEP:
                self._credit(at_ns)
            self._log_piece(kind, at_ns, more_follows)
        self._shut()

    def abandon(self, at_ns: int, state: str = "input_wait", is_polled: bool = False) -> None:
        """The open step got no batch: its time was a wait for data, and it was no step."""
        self.leave_steady()
        if self.in_step:
            self.log.append((SPAN, self.begin_ns, at_ns, state))
        if self.device is not None:
            self.device.start(at_ns)
        if not is_polled:
            self.poll(at_ns)  # no step follows that would
        self._shut()

    def leave_loop(self, at_ns: int) -> None:
        """The loop was left by a `break`: what follows is no pause between two of its steps."""
        self.log.append((SPAN, at_ns, at_ns, "other"))
        if self.device is not None:
            self.device.start(at_ns)

    def begin_part(self, part: str, at_ns: int) -> None:
        """A wait for data or a copy begins, inside the open step or outside of any, inside another part or not."""
        self.leave_steady()
        if not self.in_step:
            self.open(LOOSE, at_ns)
        self._credit(at_ns)
        within, worked_ns = self.copies, at_ns - self.begin_ns - self.data_ns - self.transfer_ns
        works = self.transfer_ns or worked_ns > _AT_ONCE_NS
        if part is DATA_WAIT and self.device is not None and works and self.activity is IN_STEP:
            self._divide(at_ns)  # the device may work on while this is waited for
        self.parts.append(self.activity)
        self.activity = part
        if part is TRANSFERRING and self.device is not None and not within:
            self.copy = self.device.copy_begins(at_ns, worked_ns < COPY_FOLLOWS_NS, in_fetch=DATA_WAIT in self.parts)

    def end_part(self, at_ns: int, more_follows: bool = False) -> None:
        """The innermost part ends; the one around it goes on, so that no time is in two of them."""
        if not self.parts:
            return
        if self.activity is DATA_WAIT:
            self.data_ns += at_ns - self.mark_ns
        elif self.activity is TRANSFERRING:
            self.transfer_ns += at_ns - self.mark_ns
        self.mark_ns = at_ns
        ended, self.activity = self.activity, self.parts.pop()
        if not self.in_step:
            return
        if self.device is not None:
            if ended is DATA_WAIT:
                self.device.begin(at_ns)
            elif ended is TRANSFERRING and not self.copies:
                copy, self.copy = self.copy, None
                self.device.copy_ends(copy)
        if not self.parts and self.step_owner is LOOSE:
            self.end_step(at_ns, more_follows)

    def enter(self, name: str | None, at_ns: int) -> int:
        """Interrupt what is open by a phase, or by a nested training loop (name None); return its serial number."""
        self.leave_steady()
        if self.in_step:
            self._log_piece(PART, at_ns, more_follows=name is None)
        interrupted = (
            self.in_step,
            self.step_owner,
            self.samples,
            self.epoch_start,
            self.activity,
            self.idle,
            self.parts,
        )
        if self.device is not None:
            self.device.start(at_ns)
        self._serial += 1
        self.level = self._serial
        self.levels.append((self.level, *interrupted))
        self.log.append((ENTER, at_ns, name))
        if name is not None:
            self.idle = PHASE + name
            self.device = None
        elif self.idle is STARTUP:
            self.idle = BETWEEN
        self.parts = []
        self._shut()
        return self.level

    def exit(self, level: int, at_ns: int) -> None:
        """Leave a phase or nested loop and all that was entered inside it; go on with what it interrupted."""
        while self.is_open(level):
            self.end_step(at_ns)
            self.log.append((EXIT, at_ns))
            _, in_step, owner, samples, epoch_start, activity, self.idle, self.parts = self.levels.pop()
            # A device that was found inside the phase is measured after it.
            self.device = None if self.in_phase or self.resting else self.home
            if self.device is not None:
                self.device.start(at_ns)
            self.level = self.levels[-1][0] if self.levels else 0
            if in_step:
                self.open(owner, at_ns)
                self.samples, self.epoch_start, self.activity = samples, epoch_start, activity
            else:
                self.activity = self.idle

    def exit_all(self, at_ns: int) -> None:
        """Leave every phase and nested loop."""
        if self.levels:
            self.exit(self.levels[0][0], at_ns)

    def is_open(self, level: int) -> bool:
        return any(entry[0] == level for entry in self.levels)

    @property
    def in_phase(self) -> bool:
        """Whether a declared phase is open: what happens now is not training."""
        return self.idle.startswith(PHASE)

    def open(self, owner: object, at_ns: int) -> None:
        """Open a step (or a piece outside of one, LOOSE) while none is."""
        if self.idle is STARTUP and owner is not LOOSE:
            self.idle = BETWEEN
        self.step_owner = owner
        self.begin_ns = self.mark_ns = at_ns
        self.data_ns = self.transfer_ns = 0
        self.samples = UNKNOWN_SAMPLES
        self.epoch_start = False
        self.activity = IN_STEP
        self.in_step = True
        if self.device is not None:
            self.device.begin(at_ns)

    @property
    def copies(self) -> bool:
        """Whether a copy is open, in another part or not: what is copied meanwhile is a part of it."""
        return self.activity is TRANSFERRING or TRANSFERRING in self.parts

    def _divide(self, at_ns: int) -> None:
        """Have the open step go on in a second piece, with a wait and times on the device of its own."""
        owner, samples, epoch_start, parts = self.step_owner, self.samples, self.epoch_start, self.parts
        self._log_piece(PART, at_ns, more_follows=True)
        self.open(owner, at_ns)
        self.samples, self.epoch_start, self.parts = samples, epoch_start, parts

    def _shut(self) -> None:
        self.in_step = False
        self.step_owner = None
        self.unfed = False
        self.activity = self.idle

    def _credit(self, at_ns: int) -> None:
        """Count the part that is open until now."""
        if self.activity is DATA_WAIT:
            self.data_ns += at_ns - self.mark_ns
        elif self.activity is TRANSFERRING:
            self.transfer_ns += at_ns - self.mark_ns
        self.mark_ns = at_ns

    def _log_piece(self, kind: int, at_ns: int, more_follows: bool) -> None:
        """Log the open piece. `more_follows`: of the same loop, at whose end the device is asked at the latest."""
        self._credit(at_ns)
        piece = None
        if self.device is not None:
            piece = self.device.end(at_ns)
            if self.device.saw_foreign():
                self.log.append((UNVERIFIED,))
        self.log.append(
            (kind, self.begin_ns, at_ns, self.data_ns, self.transfer_ns, self.samples, self.epoch_start, piece)
        )
        if not more_follows or (self.device is not None and self.device.attention):
            self.poll(at_ns)

    def attend(self, at_ns: int) -> None:
        """Do what the device's timeline asks for at the end of a piece: read what the device has finished, note what it saw."""
        home = self.home
        if home is None:
            return
        if home.saw_foreign():
            self.log.append((UNVERIFIED,))
        begin = self.clock()
        self.poll(at_ns)
        self.meter.harvested(at_ns, self.clock() - begin)

    def launched(self, *_: Any) -> None:
        """The optimizer has made its step: the last known launch. (Torch hands over the optimizer and its arguments.)"""
        device = self.device
        if device is None or not self.in_step:
            return
        if self.thread != get_ident() and get_ident() in getattr(threading, "_active", (get_ident(),)):
            return  # else it is a thread of autograd's own: the backward pass, which the training thread waits for, makes the step
        begin = self.clock()
        device.launched(begin)
        if device.launches % _METERED == 0:
            self.meter.launched(self.clock() - begin, _METERED)

    def poll(self, at_ns: int) -> None:
        """Read what the device has finished by now. Called in the training thread only."""
        home = self.home
        if home is not None:
            home.harvest(at_ns)
            if home.error is not None:
                self._device_broke(home.error)

    # By which device steps are measured, and when that rests ------------------------------------------------------------

    def adopt_device(self, timeline: DeviceTimeline) -> None:
        """Measure by this timeline from the next batch on."""
        self.leave_steady()
        now = self.clock()
        self.release_device(now)
        self.home = timeline
        if not self.in_phase:
            self.device = timeline
            timeline.start(now)

    def release_device(self, at_ns: int | None) -> None:
        """Stop measuring by the device: what it has not finished is left to the host's clock. None: do not ask it again."""
        home, self.home, self.device = self.home, None, None
        if home is not None:
            if at_ns is not None:
                home.harvest(at_ns)
            home.abandon()
        if self.resting:
            self.resting = False
            self.log.append((REST, False))

    def rest_device(self, resting: bool) -> None:
        """From now on leave steps out of the device's timeline, or measure them again. Called while a batch is fetched."""
        home = self.home
        if home is None or resting == self.resting or self.in_phase:
            return
        self.leave_steady()
        self.resting = resting
        self.log.append((REST, resting))
        if resting:
            home.interrupt()
            self.device = None
        else:
            home.start(self.clock())
            self.device = home

    def _device_broke(self, error: Exception) -> None:
        """An event call has raised: go on by the host's clock, and say so once."""
        self.device_failed = True
        self.release_device(None)
        if self.failed is not None:
            self.failed("measuring by events on the device", error)

    def open_parts_ns(self, now_ns: int) -> tuple[int, dict[str, int]]:
        """Return when the open step began and its time so far by state; (now, {}) when none is open.

        Any thread may ask: the training thread may go on meanwhile, so a step may have begun after `now_ns`.
        """
        steady, fed = self.steady is not None, self.fed_ns
        begin, data, transfer = self.begin_ns, self.data_ns, self.transfer_ns
        if not self.in_step or begin >= now_ns:
            return now_ns, {}
        open_ns = now_ns - begin
        part_ns = max(0, now_ns - self.mark_ns)
        if steady:
            data = max(0, fed - begin) if fed else open_ns
        elif self.activity is DATA_WAIT:
            data += part_ns
        elif self.activity is TRANSFERRING:
            transfer += part_ns
        data = min(data, open_ns)
        transfer = min(transfer, open_ns - data)
        return begin, {"input_wait": data, "transfer": transfer, "compute": open_ns - data - transfer}
