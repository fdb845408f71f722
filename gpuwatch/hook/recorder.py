"""What the training thread records, a log of steps and phases: clock readings, a few slots and one tuple per step.

The hook's background thread and `report()` drain the log into a `Timeline`. Nothing here does I/O or takes a lock.
"""

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from gpuwatch.hook.metering import FetchEvidence, Meter
from gpuwatch.host.proc import ThreadTime
from gpuwatch.ledger import events
from gpuwatch.ledger.device_timeline import DeviceTimeline
from gpuwatch.ledger.events import DATA_WAIT, FAST_STEP, IN_STEP, LOOSE, STEP, TAKEN, TRANSFERRING, UNKNOWN_SAMPLES
from gpuwatch.ledger.states import INPUT_WAIT, OTHER

T = TypeVar("T")
Failed = Callable[[str, BaseException], None]
"""Called with what has failed, and why."""

_NOT_GIVEN = object()
_AT_ONCE_NS = 20_000  # a training launches nothing within this time of receiving a batch
UNREAD = -1  # instead of a gap's begin: the device may compute yet
METERED = 16  # one in so many last launches, and of marks of sections, is metered
MOST_TAKEN = 8  # steps of optimizers on one batch; further ones are steps of a loop without a loader
_PAUSE_NS = 1_000_000  # after a copy to the device a longer one is a wait for more of the batch
_PAUSED_FOR = 64  # so many further copies are followed by a wait, too


def is_autograds() -> bool:
    """Whether this thread is in a backward pass, and not Python's: unknown to it, or a dummy once it has logged."""
    known, me = getattr(threading, "_active", None), get_ident()
    engine = getattr(sys.modules.get("torch"), "_C", None)
    in_pass = getattr(engine, "_current_graph_task_id", int)() >= 0  # others of C++ may train, as Ray's do
    return in_pass and known is not None and (me not in known or isinstance(known[me], threading._DummyThread))


class _OfFastPath:
    """What the fast path reads and sets: side by side, as it runs from cold caches."""

    __slots__ = ("active_timeline", "batch_ready_ns", "begin_ns", "samples", "steady", "thread", "transfer_ns")


class Recorder(_OfFastPath):
    """The log and the open step. One training thread writes; others only read single slots and pop from the log."""

    def __init__(
        self, clock: Callable[[], int] = time.monotonic_ns, failed: Failed = lambda doing, error: None
    ) -> None:
        self.clock = clock
        self.failed = failed
        self.log: deque[tuple[Any, ...]] = deque()
        self.thread: int | None = None  # the training thread; None until a loop begins, CLOSED once nothing is recorded
        self.in_step = False
        self.begin_ns = self.data_ns = self.transfer_ns = 0
        self.samples = UNKNOWN_SAMPLES  # the open step's
        self.epoch_start = False  # whether it is the first of a pass over a loader
        self.taken_until_ns = self.taken_left = 0  # when a TAKEN step ends; how many more optimizer steps it may have
        self.lacks_batch = False  # a second loader had no batch for the open step: unless more happens it is no step
        self.activity = self.idle = events.STARTUP  # what the training thread does now, and while no step is open
        self.mark_ns = 0  # when `activity` last changed: an open wait or copy is counted from here
        self.parts: list[str] = []  # the activities that each open `data()` or `transfer()` interrupted
        self.steady: object | None = None  # owner of the open step while that is an ordinary one: see `leave_steady`
        # When the open step's batch was ready, 0 while it is awaited. Kept instead of `data_ns` while steps are steady.
        self.batch_ready_ns = 0
        self.step_owner: object | None = None  # the loop whose next batch ends the open step, or the context that does
        self.bounded_steps = 0  # those that an optimizer's step has begun
        self._bounded_owner = object()  # their owner
        self.copied_ns = 0  # when the last copy ended that was made in such a step's wait; 0 once it computes
        self._pauses = 0  # after so many further copies the wait goes on
        self._until_pass = False  # a forward pass ends it
        self.levels: list[tuple[Any, ...]] = []  # what each open phase or nested loop interrupted; its number first
        # The number of the innermost of them, 0 without any, and the last one given. Numbers are not reused, so that a
        # loop which is collected late (a kept iterator, a cycle) cannot close another one's phase.
        self.level = self._serial = 0
        self.countdown = 1  # fetches, or declared steps, until the next one that is sampled, over all loops
        self.fetches = FetchEvidence()
        self.gap_since_ns = 0  # when a forward pass without gradients ended: what follows until the next one is a gap
        self.gaps_ns = 0  # those so far
        self.meter = Meter()
        self.timeline: DeviceTimeline | None = None  # the device's timeline, once the user's code has set a device up
        self.active_timeline: DeviceTimeline | None = None  # the same while it measures: not in phases, nor at rest
        self.resting = False  # the device's timeline skips steps, because measuring all of them costs too much
        self.device_failed = False  # an event call has raised: the host's clock measures for the rest of the run
        self._copy: object | None = None  # the open copy, as the device's timeline knows it
        self.pinned: bool | None = None  # whether what was copied last lay in pinned memory; None: not asked

    # The training thread --------------------------------------------------------------------------------------------

    def claim_thread(self, steps: bool = True) -> bool:
        """Return whether the calling thread is the training thread; it becomes that when no other one is at work.

        Steps of the main thread win over those of any other. Without a step (`steps` False) it takes no thread's place.
        """
        me, owner = get_ident(), self.thread
        if owner in (me, events.CLOSED):
            return owner == me
        if owner is not None:
            is_main = me == threading.main_thread().ident
            idle = self.step_owner in (None, TAKEN) and not self.levels
            if not (steps and (is_main or idle)) and any(thread.ident == owner for thread in threading.enumerate()):
                return False
            now = self.clock()
            self.exit_all(now)
            self.abandon(now, OTHER)
        self.parts = []
        self.thread = me
        self.fetches.thread_time = ThreadTime()
        return True

    def is_here(self) -> bool:
        """Whether this is the training thread, or one of autograd's, for whose backward pass the training waits."""
        return self.thread == get_ident() or (self.thread not in (None, events.CLOSED) and is_autograds())

    def close(self) -> int | None:
        """Record nothing from now on; return what `thread` was."""
        owner, self.thread = self.thread, events.CLOSED
        return owner

    # Steps of a loop over a loader ----------------------------------------------------------------------------------

    def fast_path(self, loop: Any) -> Callable[[bool], Any]:
        """Return a function that ends an ordinary step of a `Loop` and fetches a batch; `loop.ask()` does all others.

        In a real training it runs from cold caches, so it touches little: two clock readings, one tuple, a few slots.
        """
        owner, clock, log = loop.owner, self.clock, self.log.append

        def ask(due: bool) -> Any:
            if due or self.steady is not owner or self.thread != get_ident():
                if (
                    self.active_timeline is None
                    or self.step_owner is not owner
                    or self.activity is not IN_STEP
                    or self.countdown == 1
                    or loop.to is not None
                    or self.thread != get_ident()
                ):
                    return loop.ask()
                self.next_step(owner, clock(), True)
            else:
                now = clock()
                copied_ns = self.transfer_ns
                log((FAST_STEP, self.begin_ns, now, self.batch_ready_ns, copied_ns, self.samples))
                self.begin_ns = now
                self.batch_ready_ns = 0
                if copied_ns:
                    self.transfer_ns = 0
            try:
                batch = loop.fetch()
            except BaseException as error:
                loop.got_no_batch(error)
                raise
            ready_ns = clock()
            if self.steady is owner:
                self.batch_ready_ns = ready_ns
            elif self.active_timeline is not None and self.step_owner is owner:
                self.batch_ready(ready_ns)
            else:  # something else went on in the fetch, or another thread has taken over meanwhile
                return loop.got_batch(batch, ready_ns)
            count = loop.samples
            if count is not None:
                try:
                    self.samples = count(batch)
                except Exception as error:
                    loop.cannot_count(error)
            return batch

        return ask

    def leave_steady(self) -> None:
        """Update `activity`, `data_ns` and `mark_ns`, which are not kept while steps are steady: a wait, then work."""
        if self.steady is not None:
            self.steady = None
            self.activity = IN_STEP if self.batch_ready_ns else DATA_WAIT
            self.mark_ns = self.batch_ready_ns or self.begin_ns
            self.data_ns = self.mark_ns - self.begin_ns

    def become_steady(self) -> None:
        """Take the fast path from now on. The open step's batch is ready."""
        self.batch_ready_ns = self.begin_ns + self.data_ns
        self.steady = self.step_owner

    def doing(self) -> str:
        """Return what the training thread does now. Any thread may ask."""
        if self.steady is None:
            return self.activity
        return IN_STEP if self.batch_ready_ns else DATA_WAIT

    def begin_gap(self) -> None:
        """A forward pass without gradients ended: a gap until the next; on a device it begins once a result is read."""
        self.gap_since_ns = self.clock() if self.timeline is None else UNREAD

    def read_back(self, began_ns: int) -> None:
        """The host has waited for a result since `began_ns`, and the device has nothing to do now."""
        now = self.clock()
        if self.active_timeline is not None:
            self.active_timeline.read_back(began_ns, now)
        if self.gap_since_ns > 0:
            self.gaps_ns += began_ns - self.gap_since_ns
        if self.gap_since_ns:
            self.gap_since_ns = now

    def end_gap(self, now_ns: int) -> None:
        """The next forward pass begins. 0: there is none, and the gap is dropped."""
        if self.gap_since_ns > 0 and now_ns:
            self.gaps_ns += now_ns - self.gap_since_ns
        self.gap_since_ns = 0

    def next_bounded(self, at_ns: int) -> None:
        """End the fast step, which the optimizer bounds; begin the next, in whose wait no step is on the fast path."""
        self.log.append((FAST_STEP, self.begin_ns, at_ns, self.batch_ready_ns, self.transfer_ns, self.samples))
        self.begin_ns, self.samples = at_ns, UNKNOWN_SAMPLES
        self.batch_ready_ns = self.transfer_ns = 0
        self.parts.append(IN_STEP)  # the wait is a part of the step, until that is popped
        self.bounded_steps += 1

    def begin_bounded(self, owner: object, at_ns: int, until_pass: bool) -> None:
        """End any step by an optimizer's, its last launch; begin one. `until_pass`: a forward pass ends its wait."""
        if self.active_timeline is not None and self.in_step:
            self.active_timeline.launched(at_ns)
        self.end_step(at_ns)
        self.bounded_steps, self._bounded_owner, self._until_pass = self.bounded_steps + 1, owner, until_pass
        self.begin_step(owner, at_ns)

    def in_bounded_wait(self) -> bool:
        """Whether the open step, which an optimizer bounds, waits for its batch."""
        return self.step_owner is self._bounded_owner and self.doing() is DATA_WAIT

    def end_bounded_wait(self, at_ns: int) -> bool:
        """End such a step's wait: a copy to the device or a forward pass begins. Return whether it waited until now."""
        copied_ns, self.copied_ns = self.copied_ns, 0
        if copied_ns:
            self._pauses = _PAUSED_FOR if at_ns - copied_ns > _PAUSE_NS else max(0, self._pauses - 1)
        if self.in_bounded_wait():
            self.leave_steady()
            self.end_part(at_ns)
            return True
        return copied_ns > 0

    def after_copy(self) -> None:
        """That copy was launched: where more of the batch comes later, the wait for it goes on."""
        now = self.clock()
        if self._until_pass and (self._pauses or self.active_timeline is None):
            self.begin_part(DATA_WAIT, now)
        self.copied_ns = now

    def abandon_bounded(self, at_ns: int) -> None:
        """Discard the open step if an optimizer bounds it: what followed the last one was no step."""
        if self.step_owner is self._bounded_owner:
            if self.doing() is DATA_WAIT:  # which is a part of it
                self.parts.pop()
            self.abandon(at_ns, OTHER)

    def bounded_computes(self, at_ns: int) -> None:
        """End the wait of such a step."""
        self.parts.pop()
        self.batch_ready_ns = at_ns

    def next_step(self, owner: object, at_ns: int, follows: bool) -> bool:
        """End the open step (the owner's if `follows`) and wait for a batch; return whether to sample its fetch."""
        if follows:
            timeline, piece = self.active_timeline, None
            if timeline is not None:
                piece = timeline.end(at_ns)
                if timeline.attention:
                    self._attend(timeline, at_ns)
            self.log.append(
                (STEP, self.begin_ns, at_ns, self.data_ns, self.transfer_ns, self.samples, self.epoch_start, piece)
            )
            self.lacks_batch = self.epoch_start = False
            self.begin_ns = self.mark_ns = at_ns
            self.data_ns = self.transfer_ns = 0
            self.samples = UNKNOWN_SAMPLES
        else:
            self.begin_step(owner, at_ns)
        self.activity = DATA_WAIT
        self.countdown -= 1
        return not self.countdown

    def batch_ready(self, at_ns: int) -> None:
        """The batch that the open step waited for has come."""
        self.data_ns += at_ns - self.mark_ns
        self.activity = IN_STEP
        if self.active_timeline is not None:
            self.active_timeline.begin(at_ns)

    def timed_copy(self, move: Callable[[T, Any], T], batch: T, place: Any) -> T:
        """Return `move(batch, place)`, timed by both clocks as the open step's copy to the device."""
        self.activity = TRANSFERRING  # the replacement of Tensor.to does not time it again
        self.mark_ns = begin = self.clock()
        timeline = self.active_timeline
        copy = timeline.copy_begins(begin, follows=True) if timeline is not None else None
        try:
            return move(batch, place)
        finally:
            if timeline is not None:
                timeline.copy_ends(copy)
            self.transfer_ns += self.clock() - begin
            self.activity = IN_STEP

    def fast_copy(
        self, original: Callable[..., Any], is_overridden: Callable[[Any], bool], any_copy: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[[object], None]]:
        """Return what replaces a Tensor's method that copies, and a function that sets the usual place: no CPU.

        It times a normal copy in a normal step to the usual place; `any_copy` makes all others. Each check costs every
        batch, and so would a call that adds the time.
        """
        usual: object = self  # at first no place

        def now_usual(place: object) -> None:
            nonlocal usual
            usual = place

        @functools.wraps(original)
        def copy_to(tensor: Any, place: Any = _NOT_GIVEN, /, *args: Any, **kwargs: Any) -> Any:
            if (
                place is usual
                and self.steady is not None
                and self.batch_ready_ns
                and self.thread == get_ident()
                and not is_overridden(tensor)
            ):
                clock = self.clock
                begin = clock()
                result = original(tensor, place, *args, **kwargs) if args or kwargs else original(tensor, place)
                if result is not tensor and tensor.is_cpu:
                    self.transfer_ns += clock() - begin
                return result
            return any_copy(tensor, args if place is _NOT_GIVEN else (place, *args), kwargs)

        return copy_to, now_usual

    def set_copied(self, before_ns: int, begin_ns: int) -> None:
        """Set the open step's time in copies: `before_ns` and that since `begin_ns`; nothing if it began later."""
        if self.begin_ns <= begin_ns:
            self.transfer_ns = before_ns + self.clock() - begin_ns

    def add_copy(self, spent_ns: int, pinned: bool | None) -> None:
        """Add a copy to the open step's; `pinned`: whether its source lay in pinned memory, None if not asked."""
        self.transfer_ns += spent_ns
        self.pinned = self.pinned if pinned is None else pinned

    def set_samples(self, samples: int) -> None:
        """Set the open step's number of samples."""
        self.samples = events.known_count(samples)

    def begin_epoch(self) -> None:
        """The open step is the first of a pass over a loader."""
        self.epoch_start = True

    def sample_after(self, fetches: int) -> None:
        """Sample the fetch, or declared step, that comes after so many."""
        self.countdown = fetches

    # Any step, declared ones too ------------------------------------------------------------------------------------

    def enter_step(self, owner: object, samples: int, visit: Callable[[], None]) -> bool:
        """Begin a declared step, which `owner` ends; return False inside another. `visit` is called now and then."""
        self.countdown -= 1
        if self.countdown <= 0:
            visit()
        self.end_taken()
        if not self.in_step:
            self.open(owner, self.clock())
        elif self.step_owner is LOOSE:
            self.begin_step(owner, self.clock())
        else:
            return False
        self.samples = samples
        return True

    def mark_step(self, samples: int, tokens: int, visit: Callable[[], None]) -> None:
        """End the last mark's step, of these samples and tokens; begin the next. Not inside a step of another kind."""
        self.end_taken()
        if self.in_step and self.step_owner not in (events.MARKED, LOOSE, self._bounded_owner):
            return
        self.abandon_bounded(self.clock())  # the loop's first optimizer step came before its first mark
        self.countdown -= 1
        if self.countdown <= 0:
            visit()
        if self.step_owner is events.MARKED:
            self.samples = samples
            if tokens >= 0:
                self.log.append((events.TOKENS, tokens))
        self.begin_step(events.MARKED, self.clock())

    def begin_step(self, owner: object, at_ns: int) -> None:
        """Begin a step, ending the one that is open. An open `data()` or `transfer()` goes on in it."""
        going_on = self.activity if self.parts and self.activity in (DATA_WAIT, TRANSFERRING) else IN_STEP
        if self.in_step:
            self.end_step(at_ns)
        self.open(owner, at_ns)
        self.activity = going_on

    def end_step(self, at_ns: int, more_follows: bool = False) -> None:
        """End the open step, if there is one."""
        if self.steady is not None:
            self.leave_steady()
        if self.lacks_batch:
            self.abandon(at_ns)
        if self.in_step:
            self._log_piece(events.PART if self.step_owner is LOOSE else STEP, at_ns, more_follows)
        self._shut()

    def abandon(self, at_ns: int, state: str = INPUT_WAIT, at_end: bool = False) -> None:
        """Discard the open step, which got no batch, as a wait. `at_end`: its loop has ended, the device was polled."""
        self.leave_steady()
        if self.in_step:
            self.log.append((events.SPAN, self.begin_ns, at_ns, state, self.data_ns, at_end or self.lacks_batch))
        if at_end:
            self.leave_loop(at_ns)
        else:
            self._start_device(at_ns)
            self.poll(at_ns)  # no step follows that would
        self._shut()

    def second_batch(self, came: bool) -> None:
        """The open step asked one more loader for a batch, which came, or the loader has come to its end."""
        self.lacks_batch = not came and self.in_step and self.step_owner is not LOOSE

    def take(self, at_ns: int) -> None:
        """End the wait. The loop was dropped with its batch: the last optimizer step before another ends the step."""
        self.end_part(at_ns)
        self.step_owner, self.taken_until_ns, self.taken_left = TAKEN, at_ns, MOST_TAKEN

    def trained_taken(self) -> bool:
        """Note a step of an optimizer; return whether it belongs to a step that `take` has left open."""
        if self.taken_left:
            self.taken_until_ns, self.taken_left = self.clock(), self.taken_left - 1
            return True
        self.end_taken()
        return False

    def end_taken(self) -> None:
        """End a step that `take` has left open, if there is one."""
        if self.step_owner is TAKEN:
            self.end_step(self.taken_until_ns)
            self.leave_loop(self.taken_until_ns)

    def leave_loop(self, at_ns: int) -> None:
        """The loop has ended, or was left by a `break`: what follows is no pause between its steps, and no stall."""
        self.log.append((events.SPAN, at_ns, at_ns, OTHER, 0, False))
        self._start_device(at_ns)

    def begin_part(self, part: str, at_ns: int) -> None:
        """Begin a wait for data or a copy, inside the open step or outside of any, inside another part or not."""
        if self.steady is None and self.activity is IN_STEP and self.active_timeline is None:  # the most frequent case
            self.parts.append(IN_STEP)
            self.activity = part
            self.mark_ns = at_ns
            return
        self.leave_steady()
        if not self.in_step:
            self.open(LOOSE, at_ns)
        self._credit(at_ns)
        within, worked_ns = self._is_copying, at_ns - self.begin_ns - self.data_ns - self.transfer_ns
        works = self.transfer_ns or worked_ns > _AT_ONCE_NS
        if part is DATA_WAIT and self.active_timeline is not None and works and self.activity is IN_STEP:
            self._divide(at_ns)  # the device may work on while this is waited for
        self.parts.append(self.activity)
        self.activity = part
        if part is TRANSFERRING and self.active_timeline is not None and not within:
            follows, in_fetch = worked_ns < events.COPY_FOLLOWS_NS, DATA_WAIT in self.parts
            self._copy = self.active_timeline.copy_begins(at_ns, follows, in_fetch=in_fetch)

    def end_part(self, at_ns: int, more_follows: bool = False) -> None:
        """End the innermost part; the one around it goes on, so that no time is in two of them."""
        if not self.parts:
            return
        self._credit(at_ns)
        ended, self.activity = self.activity, self.parts.pop()
        if not self.in_step:
            return
        if self.active_timeline is not None:
            if ended is DATA_WAIT:
                self.active_timeline.begin(at_ns)
            elif ended is TRANSFERRING and not self._is_copying:
                copy, self._copy = self._copy, None
                self.active_timeline.copy_ends(copy)
        if not self.parts and self.step_owner is LOOSE:
            self.end_step(at_ns, more_follows)

    def open(self, owner: object, at_ns: int) -> None:
        """Open a step (or a piece outside of one, LOOSE) while none is open."""
        if self.idle is events.STARTUP and owner is not LOOSE:
            self.idle = events.BETWEEN
        self.step_owner = owner
        self.begin_ns = self.mark_ns = at_ns
        self.data_ns = self.transfer_ns = self.copied_ns = 0
        self.samples = UNKNOWN_SAMPLES
        self.epoch_start = False
        self.activity = IN_STEP
        self.in_step = True
        if self.active_timeline is not None:
            self.active_timeline.begin(at_ns)

    @property
    def _is_copying(self) -> bool:
        """Whether a copy is open, inside another part or not: further copies are a part of it."""
        return self.activity is TRANSFERRING or TRANSFERRING in self.parts

    def _divide(self, at_ns: int) -> None:
        """Continue the open step in a second piece, with a wait and device times of its own."""
        owner, samples, epoch_start, parts = self.step_owner, self.samples, self.epoch_start, self.parts
        self._log_piece(events.PART, at_ns, more_follows=True)
        self.open(owner, at_ns)
        self.samples, self.epoch_start, self.parts = samples, epoch_start, parts

    def _shut(self) -> None:
        self.in_step = self.lacks_batch = False
        self.step_owner = None
        self.activity = self.idle

    def _credit(self, at_ns: int) -> None:
        """Count the open part until now."""
        if self.activity is DATA_WAIT:
            self.data_ns += at_ns - self.mark_ns
        elif self.activity is TRANSFERRING:
            self.transfer_ns += at_ns - self.mark_ns
        self.mark_ns = at_ns

    def _log_piece(self, kind: int, at_ns: int, more_follows: bool) -> None:
        """Log the open piece. `more_follows`: of the same loop, at whose end the device is polled at the latest."""
        if self.activity is not IN_STEP:
            self._credit(at_ns)
        timeline, piece = self.active_timeline, None
        if timeline is not None:
            piece = timeline.end(at_ns, goes_on=kind == events.PART)
            if timeline.saw_foreign():
                self.log.append((events.UNVERIFIED,))
        self.log.append(
            (kind, self.begin_ns, at_ns, self.data_ns, self.transfer_ns, self.samples, self.epoch_start, piece)
        )
        if self.timeline is not None and (not more_follows or (timeline is not None and timeline.attention)):
            self.poll(at_ns)

    # Phases and nested loops ----------------------------------------------------------------------------------------

    def enter(self, name: str | None, at_ns: int) -> int:
        """Interrupt what is open by a phase, or by a nested training loop (name None); return its serial number."""
        self.leave_steady()
        self.end_taken()
        self.end_gap(at_ns)
        if self.in_step:
            self._log_piece(events.PART, at_ns, more_follows=name is None)
        self._serial += 1
        self.level = self._serial
        open_step = (self.in_step, self.step_owner, self.samples, self.epoch_start, self.activity)
        self.levels.append((self.level, *open_step, self.idle, self.parts))
        if self.active_timeline is not None:
            self.active_timeline.start(at_ns)
        self.log.append((events.ENTER, at_ns, name))
        if name is not None:
            self.idle = events.PHASE + name
            self.active_timeline = None
        elif self.idle is events.STARTUP:
            self.idle = events.BETWEEN
        self.parts = []
        self._shut()
        return self.level

    def exit(self, level: int, at_ns: int) -> None:
        """Leave a phase or nested loop and all that was entered inside it; go on with what it interrupted."""
        while self.is_open(level):
            self.end_step(at_ns)
            self.log.append((events.EXIT, at_ns))
            _, in_step, owner, samples, epoch_start, activity, self.idle, self.parts = self.levels.pop()
            self._start_device(at_ns)
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
        return self.idle.startswith(events.PHASE)

    # The device's timeline ------------------------------------------------------------------------------------------

    def _attend(self, timeline: DeviceTimeline, at_ns: int) -> None:
        """Read what the device has finished and note what its timeline saw, as it asked for at the end of a piece."""
        if timeline.saw_foreign():
            self.log.append((events.UNVERIFIED,))
        begin = self.clock()
        self.poll(at_ns)
        self.meter.harvested(at_ns, self.clock() - begin)

    def launched(self, *_: Any) -> None:
        """The optimizer has made its step: the last known launch. (Torch passes the optimizer and its arguments.)"""
        timeline = self.active_timeline
        if timeline is None or not self.in_step or self.step_owner is self._bounded_owner:
            return  # `begin_bounded` records the launch that ends such a step, whichever hook torch calls first
        if not self.is_here():
            return
        begin = self.clock()
        timeline.launched(begin)
        if timeline.launches % METERED == 0:
            self.meter.launched(self.clock() - begin, METERED)

    def poll(self, at_ns: int) -> None:
        """Read what the device has finished by now. Called in the training thread only."""
        timeline = self.timeline
        if timeline is not None:
            timeline.harvest(at_ns)
            if (error := timeline.error) is not None:  # go on by the host's clock
                self.device_failed = True
                self.release_device(None)
                self.failed("measuring by events on the device", error)

    def adopt_device(self, timeline: DeviceTimeline) -> None:
        """Measure by this timeline from the next batch on."""
        self.leave_steady()
        now = self.clock()
        self.release_device(now)
        self.timeline = timeline
        self._start_device(now)

    def _start_device(self, at_ns: int) -> None:
        """Measure by the device from now on, not at rest nor in a phase: one found in it is measured after it."""
        self.active_timeline = None if self.in_phase or self.resting else self.timeline
        if self.active_timeline is not None:
            self.active_timeline.start(at_ns)

    def release_device(self, at_ns: int | None) -> None:
        """Stop measuring by the device: what is unfinished is left to the host's clock. None: do not poll it again."""
        timeline, self.timeline, self.active_timeline = self.timeline, None, None
        if timeline is not None:
            if at_ns is not None:
                timeline.harvest(at_ns)
            timeline.abandon()
        if self.resting:
            self.resting = False
            self.log.append((events.REST, False))

    def visit_device(self, now_ns: int) -> None:
        """Read what the device has finished; pause its timeline if that costs too much. Called during a fetch."""
        if self.active_timeline is None:  # else its steps are read in their turn
            self.poll(now_ns)
        visits, one_in = self.meter.visits, self.meter.device_one_in
        self.meter.visits += 1
        if one_in > 1 or self.resting:
            self.rest_device(visits % one_in != 0)

    def rest_device(self, resting: bool) -> None:
        """Skip steps in the device's timeline from now on, or measure them again. Called while a batch is fetched."""
        if self.timeline is None or resting == self.resting or self.in_phase:
            return
        self.leave_steady()
        self.resting = resting
        self.log.append((events.REST, resting))
        self._start_device(self.clock())

    # What other threads read ----------------------------------------------------------------------------------------

    def open_parts_ns(self, now_ns: int) -> tuple[int, dict[str, int]]:
        """Return when the open step began and its time so far by state; (now, {}) without one. Any thread may call."""
        steady, ready_ns = self.steady is not None, self.batch_ready_ns
        begin, data, transfer = self.begin_ns, self.data_ns, self.transfer_ns
        if not self.in_step or begin >= now_ns:
            return now_ns, {}
        open_ns = now_ns - begin
        part_ns = max(0, now_ns - self.mark_ns)
        if steady:
            data = max(0, ready_ns - begin) if ready_ns else open_ns
        elif self.activity is DATA_WAIT:
            data += part_ns
        elif self.activity is TRANSFERRING:
            transfer += part_ns
        data = min(data, open_ns)
        transfer = min(transfer, open_ns - data)
        return begin, {"input_wait": data, "transfer": transfer, "compute": open_ns - data - transfer}
