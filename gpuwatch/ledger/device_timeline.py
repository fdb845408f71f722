"""The device's own timeline: when its stream was empty, from timing events that are polled and never waited for.

A launch returns before the device runs it: only events on its stream tell a wait that starves the device from one that
hides behind queued work. Each piece of a step has two: `batch` when its batch is in hand, `end` when the next one is
asked for. Some have more: after each run of copies, after the optimizer's last launch, around each wait for other
ranks, at each section. They are read by `query()`, in the training thread, never while a graph is captured. An error of
an event call ends the timeline; the recorder goes on by the host's clock. What signal handlers raise passes through.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import islice, zip_longest
from typing import Any, Concatenate, ParamSpec, TypeVar

from gpuwatch.errors import pass_on
from gpuwatch.ledger.device_pieces import DETAILED_NS, MOST_COPIES, DeviceTimes, Events, Piece
from gpuwatch.ledger.device_reading import SHORT_PAUSE_NS, PieceReader
from gpuwatch.ledger.states import MOST_MARKS

P = ParamSpec("P")
R = TypeVar("R")

RING = 256  # pieces that the device has not finished, at most; more are dropped, counted: it was busy
HARVESTED_AFTER = 16
HARVESTED_AFTER_NS = 50_000_000  # ended pieces are read so many at a time, or after so long
OVERDUE_NS = 300_000_000_000  # a piece that is not finished after so long is given up too, with all after it
WAIT_TIMED_EVERY_NS = 1_500_000  # average time between two waits for other ranks that are timed, at least
_WAITS_A_PIECE = 1024  # a piece with more waits than this is estimated
_ASTRAY = 16  # pieces in a row that begin on another device or stream before that one is taken for the training's
_FIRST_DETAILED = 16
COPY_CALL_NS = 50_000  # at most so much of a copy's call is its launch, which is no transfer


def breaks(call: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """Return a method that raises nothing: an error ends the timeline, and from then on None is returned."""

    @functools.wraps(call)
    def guarded(self: DeviceTimeline, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            if self.error is None:
                return call(self, *args, **kwargs)
            self.attention = True
        except Exception as error:
            self._open = self._last = None
            pass_on(error)
            self.error = self.error or error
            self.attention = True
        return None

    return guarded


class DeviceTimeline:
    """Records events for the training thread, which makes the calls, and reads them in order. No call raises."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.uuid: str | None = getattr(events, "uuid", None)  # the device's, as its driver knows it, "GPU-…"
        self._reader = PieceReader(events)
        self._open: Piece | None = None
        self._last: Any | None = None  # the end of the piece before the next one
        self._chained = False  # whether it is a piece's end, and not only where measuring began
        self._started_ns = 0
        self._is_reached = False  # whether the device is known to have reached that
        self._pending: deque[Piece] = deque()
        self._known = 0  # how many of them, the first ones, it is known to have finished
        # The outermost open copy: its piece (None: another stream's) and begin (None: it goes on with the batch).
        self._copy: tuple[Piece | None, Any] | None = None
        self._copy_at_ns = 0
        self._copy_call_ns = COPY_CALL_NS  # the shortest call that copied to the device
        self._aside_copies: list[tuple[Any, Any]] = []  # copies on other streams that no batch has followed yet
        self._copies_aside = False  # some copies of this training are made on other streams
        self.copied_aside = False  # likely so since the home stream last waited for another one
        self.error: Exception | None = None  # what ended this timeline
        self.attention = False  # the recorder has something to do: `error`, `saw_foreign`, or time to harvest
        self.launches = 0  # how often the optimizer's last launch was noted
        self.watches_ranks = False  # the home stream's waits for other ranks are watched, from the next piece on
        self._waits = 0.0  # how many of them a piece has on average lately
        self.divides = False  # pieces in detail are divided into sections, from the next one on
        self._harvested_ns = self._ended = 0
        self._foreign_seen = 0
        self._begun_elsewhere = 0
        self._begun = 0  # steps
        self._goes_on = False  # the piece that begins next belongs to the same one
        self._last_begin_ns = 0

    @breaks
    def start(self, at_ns: int) -> None:
        """Measure from now on, at first or after a rest or a phase: what is queued now comes before the next batch."""
        unused = None if self._chained else self._last  # where measuring began, and no piece did
        if (piece := self._open) is not None:  # a rest came; the end before it goes with the piece that had it
            self._reader.release(piece, kept=piece.previous or (piece.batch if piece.follows else None))
        self._open = self._last = self._copy = None
        self._is_reached = self._chained = False
        self._started_ns = at_ns
        dropped, self._aside_copies = self._aside_copies, []
        self._reader.drop(dropped)
        if self._events.usable():
            self._last = self._events.record(unused)

    @breaks
    def begin(self, at_ns: int) -> None:
        """A batch is in hand, or the step goes on after a phase. A second call before any launch moves the moment."""
        piece, events = self._open, self._events
        if piece is not None and not piece.launch_ns:
            # With copies it was copied while fetched, and is there already; after a wait for ranks the step has begun.
            if not (piece.copies or piece.waits_seen or piece.marks) and events.usable():
                self._move_batch(piece, at_ns)
            return
        self._open = None
        pending = self._pending
        if pending and (len(pending) >= RING or at_ns - pending[0].end_ns > OVERDUE_NS):
            self.harvest(at_ns)
            if pending and (len(pending) >= RING or at_ns - pending[0].end_ns > OVERDUE_NS):
                self._give_up_busy()
                self.start(at_ns)
        foreign = events.foreign
        if not events.usable():
            self._begun_elsewhere = self._begun_elsewhere + 1 if events.foreign > foreign else 0
            self._last = None
            return
        self._begun_elsewhere = 0
        piece = Piece(at_ns, self._is_detailed(at_ns), self._draw, copies_until_ns=at_ns)
        last, self._last = self._last, None
        piece.chained, piece.started_ns = self._chained, self._started_ns
        if self.watches_ranks:
            piece.waits_seen = 0
            piece.times_waits = self._draw * self._waits * WAIT_TIMED_EVERY_NS <= self._reader.piece_ns
        if self.divides and piece.detailed:
            piece.marks = []
        if last is not None:
            self._is_reached = self._is_reached or events.ready(last)  # and so were all before it
            piece.follows = not self._is_reached
            if self._is_reached:
                self._known = len(pending)
        if piece.follows and not self._aside_copies:  # what comes is queued behind it: one event serves two purposes
            piece.batch = last
        else:
            piece.previous, piece.batch = last, events.record(None)
            if self._aside_copies:
                piece.asides, self._aside_copies = self._aside_copies, []
            piece.asides_missed = self.copied_aside and not piece.asides
        self._open = piece

    def _is_detailed(self, at_ns: int) -> bool:
        """Return whether the piece that begins is measured in detail, as is its whole step; chosen in no rhythm."""
        if self._last_begin_ns:
            self._reader.piece_ns += 0.125 * (at_ns - self._last_begin_ns - self._reader.piece_ns)
        self._last_begin_ns = at_ns
        self._begun += not self._goes_on
        quick = self._reader.piece_ns < DETAILED_NS and self._begun > _FIRST_DETAILED
        return not quick or self._draw < 1 / 16

    @property
    def _draw(self) -> float:
        """A number from 0 to 1 for this step: evenly spread over any run of steps, and over every n-th of them."""
        return (self._begun * 0x9E3779B1 & 0xFFFFFFFF) / 2**32

    def _move_batch(self, piece: Piece, at_ns: int) -> None:
        """Record the piece's batch event now."""
        if piece.previous is None and piece.follows:
            piece.previous, piece.batch = piece.batch, self._events.record(None)
        else:
            piece.batch = self._events.record(piece.batch)
        if piece.follows:
            piece.follows = not self._events.ready(piece.previous)
        piece.begin_ns = piece.copies_until_ns = at_ns
        if self._aside_copies:
            piece.asides, self._aside_copies = [*piece.asides, *self._aside_copies], []
        piece.asides_missed = self.copied_aside and not piece.asides

    @breaks
    def copy_begins(self, at_ns: int, follows: bool, in_fetch: bool = False) -> Any | None:
        """A copy to the device is about to be launched; return what `copy_ends` takes.

        `follows`: right after the batch or another copy. `in_fetch`: by the loader, so the wait for it ends here.
        """
        piece, events = self._open, self._events
        around = self._copy
        may_be_aside = (piece is None or piece.detailed or self._aside_copies) and len(self._aside_copies) < MOST_COPIES
        if may_be_aside and (around is None or around[0] is not None):
            aside = events.record_aside()
            if aside is not None:
                self._copies_aside = self.copied_aside = True
                token = (None, aside)
                self._copy = around or token
                return token
        if piece is None or around is not None:
            return None
        piece.copied = True
        if not piece.detailed:  # on which stream is not asked
            self.copied_aside |= self._copies_aside
        if not (piece.detailed or (in_fetch and not piece.copies)) or not events.usable():
            return None
        if in_fetch and not piece.copies:
            self._move_batch(piece, at_ns)
            follows = True
        if not follows and len(piece.copies) >= MOST_COPIES:
            return None
        self._copy_at_ns = at_ns
        self._copy = piece, None if follows else events.record(None)
        return self._copy

    @breaks
    def copy_ends(self, token: Any | None, call_ns: int | None = None) -> None:
        """The copy was launched, by one call of `call_ns` (None: by several). Not measured if its piece has ended."""
        if token is None:
            return
        piece, begin = token
        if self._copy is token:
            self._copy = None
        events = self._events
        if piece is None:
            end = events.record_aside()
            if end is None:
                events.foreign += 1  # the stream was changed in between
            else:
                self._aside_copies.append((begin, end))
        elif self._open is None or piece is not self._open or not events.usable():
            return
        elif begin is None and piece.copies:
            events.record(piece.copies[-1][1])  # the run of copies goes on: its end moves
        else:
            piece.copies = [*piece.copies, (piece.batch if begin is None else begin, events.record(None))]
        if call_ns is not None and piece is not None and begin is None and piece.copies[-1][0] is piece.batch:
            self._copy_call_ns = min(self._copy_call_ns, call_ns)
            piece.launching_ns += max(0, self._copy_at_ns - piece.copies_until_ns) + self._copy_call_ns
            piece.copies_until_ns = self._copy_at_ns + call_ns

    def awaits_asides(self, at_ns: int | None) -> Any | None:
        """The home stream will wait for copies on others (`at_ns` None: in a fetch); return what `copy_ends` takes."""
        piece = self._open
        token = None
        if at_ns is not None and piece is not None:
            piece.awaits_asides = True
            token = self.copy_begins(at_ns, follows=False)
        self.copied_aside = False
        return token

    @breaks
    def launched(self, at_ns: int) -> None:
        """The optimizer has launched its work."""
        self.launches += 1
        piece, events = self._open, self._events
        if piece is None:
            return
        piece.launch_ns, piece.paused_ns = at_ns, 0
        if piece.detailed and events.usable():
            piece.launch = events.record(piece.launch)
            piece.late_copies = len(piece.copies)

    @breaks
    def wait_begins(self) -> tuple[Piece, Any] | None:
        """The home stream will wait for other ranks; return what `wait_ends` takes. Autograd's threads may call too."""
        piece = self._open
        if piece is None or piece.waits_seen is None:
            return None
        piece.waits_seen += 1
        if piece.times_waits and len(piece.waits) < _WAITS_A_PIECE and self._events.usable():
            return piece, self._events.record(None)
        return None

    @breaks
    def wait_ends(self, begin: tuple[Piece, Any] | None) -> None:
        """What the stream waits for has been queued."""
        if begin is not None and begin[0] is self._open and self._events.usable():
            begin[0].waits.append((begin[1], self._events.record(None)))

    @breaks
    def mark(self, section: str) -> None:
        """A section of the open piece begins."""
        piece = self._open
        if piece is not None and piece.marks is not None and len(piece.marks) <= MOST_MARKS:
            piece.marks.append((section, self._events.record(None) if self._events.usable() else None))

    def read_back(self, began_ns: int, at_ns: int) -> None:
        """The host has asked for a result, and waited for it."""
        piece, blocked_ns = self._open, at_ns - began_ns
        if piece is not None:
            piece.read_back = True
            piece.blocked_ns = max(piece.blocked_ns, blocked_ns)
            piece.paused_ns += blocked_ns
            if blocked_ns > SHORT_PAUSE_NS:
                piece.reads = [*piece.reads[-MOST_COPIES:], (began_ns, at_ns)]

    @breaks
    def end(self, at_ns: int, goes_on: bool = False) -> Piece | None:
        """End the piece, not its step if that `goes_on`. Return it if times will follow; None: use the host's clock."""
        piece, events = self._open, self._events
        self._open, self._goes_on = None, goes_on
        if piece is not None:
            if events.usable():
                piece.end_ns = at_ns
                piece.end = events.record(None)
                self._pending.append(piece)
                self._last, self._chained, self._is_reached = piece.end, True, False
                self._reader.host_ns += 0.125 * (at_ns - piece.begin_ns - self._reader.host_ns)
                self._waits += 0.125 * ((piece.waits_seen or 0) - self._waits)
            else:
                self._last = piece = None
        self._copy = None
        self._ended += 1
        self.attention = (
            self._ended >= HARVESTED_AFTER
            or at_ns - self._harvested_ns >= HARVESTED_AFTER_NS
            or events.foreign != self._foreign_seen
        )
        return piece

    def saw_foreign(self) -> bool:
        """Return whether work on another device or stream was seen since this was asked last."""
        seen, self._foreign_seen = self._foreign_seen, self._events.foreign
        return seen != self._foreign_seen

    @breaks
    def harvest(self, now_ns: int) -> None:
        """Give the pieces that the device has finished their times, in order. Costs a few queries at most, or none."""
        pending = self._pending
        if not pending or not self._events.usable():
            return
        self._harvested_ns, self._ended = now_ns, 0
        count = self._known = self._finished()
        pieces = list(islice(pending, count + 1))
        self._reader.measure_runs(pieces[:count])
        for piece, following in zip_longest(pieces[:count], pieces[1:]):
            if piece.times is None:  # else an interrupt came just after it was read
                self._reader.read(piece, following, now_ns)
            self._known -= 1
            pending.popleft()

    def _finished(self) -> int:
        """Return how many of the pending pieces the device has finished: they are of one stream, so the first ones."""
        pending, ready = self._pending, self._events.ready
        if self._is_reached or ready(pending[-1].end):
            return len(pending)
        return bisect_left(pending, True, self._known, len(pending) - 1, key=lambda piece: not ready(piece.end))

    def saw(self, tensor: Any) -> None:
        """Note the device that a tensor of the step came to."""
        try:
            self._events.saw(tensor.device)
        except Exception as error:  # a subclass with a device of its own making
            pass_on(error)

    @property
    @breaks
    def is_home(self) -> bool:
        """Whether the stream that is measured is the current one."""
        events, foreign = self._events, self._events.foreign
        is_usable, events.foreign = events.usable(), foreign
        return is_usable

    @property
    def is_astray(self) -> bool:
        """Whether the training goes on on another device or stream than it began on."""
        return self._begun_elsewhere >= _ASTRAY

    def abandon(self) -> None:
        """Leave the pieces to the host's clock that the device has not finished."""
        pending = self._pending
        self._known = 0
        while pending:
            piece = pending[0]
            piece.is_lost = piece.times is None
            pending.popleft()
            self._release(piece)
        self._open = self._last = None
        self._reader.reached_ns = None

    @breaks
    def _release(self, piece: Piece) -> None:
        self._reader.release(piece)

    def _give_up_busy(self) -> None:
        """Let pieces go if the device has not finished the first: it had work all the time, so no wait was felt."""
        pending = self._pending
        for number, piece in enumerate(pending):
            known = piece.chained or number > 0
            piece.times = DeviceTimes(
                piece.begin_ns,
                piece.end_ns,
                gap_ns=0 if known else None,
                compute_ns=piece.end_ns - piece.begin_ns,
                is_anchored=False,
                observed_ns=piece.end_ns,  # nothing is booked beyond it
            )
        self.abandon()
