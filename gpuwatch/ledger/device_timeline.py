"""The device's own timeline: when its stream was empty, from timing events that are polled and never waited for.

A launch returns before the device runs it, so the host's clock alone cannot tell a wait that starves the device from one that
hides behind queued work. Events on the current stream can. Each piece of a step has two: `batch` when its batch is in hand, `end`
when the next batch is asked for. Some pieces have more: one after each run of copies, one after the optimizer's last launch, two around
each wait for other ranks.
They are read later with `query()`, in the training thread, never while a graph is captured, and nothing is ever synchronised.
No device is initialised here: events begin once the user's code has set one up.

Where an event is recorded on an empty stream, the device reaches it at that moment: there the device's clock meets the host's.
From there on the device's times follow as differences between events, so that one `elapsed` a piece is enough. Of quick pieces on a
starved device not each needs that one: how far the device is behind the host at their end is sampled, as often as it varies.

An error of any event call ends the timeline: `error` is set, no event is touched again, and the recorder goes on by the host's
clock. What a signal handler of the user's raises passes through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Any, Protocol

import msgspec

from gpuwatch.errors import pass_on

RING = 256
"""Pieces that the device has not finished, at most. Where there are more, all of them are let go, counted: it was busy all the time."""
HARVESTED_AFTER = 16
HARVESTED_AFTER_NS = 50_000_000
"""Ended pieces are read so many at a time, or after so long: at once where steps are slow, and together where they are quick."""
OVERDUE_NS = 300_000_000_000
"""A piece that the device has not finished after so long is let go too, with all after it."""
DETAILED_NS = 20_000_000
"""Pieces that take longer than this on average are all measured in detail; of shorter ones one in sixteen is."""
SHORT_PAUSE_NS = 50_000
"""A pause of the host this short is not looked into."""
LAUNCH_GAP_NS = 1_000_000
"""A pause up to this long, with more work launched after it in the same piece, is a gap between launches: compute, as between any two kernels."""
WAIT_TIMED_EVERY_NS = 1_500_000
"""A wait for other ranks is timed as often on average, at most: pieces with more waits for their time are not all timed."""
LAG_SAMPLED = 1 / 8
"""Share of the quick pieces on a starved device that are measured at least. Those in which the host took longer than usual are all measured,
and those before a wait of `DETAILED_NS` or longer."""
LAG_PIECES = 1000
LAG_ERROR = 0.005
"""Where their lag varies, more are measured: over so many pieces the standard error is this share of their time at most."""
_LAGS_FIRST = 32
"""So many are measured before others are estimated by them."""
_WAITS_A_PIECE = 1024
"""A piece with more waits than this is estimated."""
_ASTRAY = 16
"""Pieces in a row that begin on another device or stream before that one is taken for the training's."""
_FIRST_DETAILED = 16
_CLOCKS_AGREE_NS = 100_000
RELIED_ON_NS = 2_000_000_000
"""For so long after the two clocks met, the host's serves to tell when the device was reached."""
COPY_CALL_NS = 50_000
"""At most so much of a copy's call is its launch: an idle device waits for that as for any kernel's, and it is no transfer."""
_MOST_COPIES = 64
"""Runs of copies that one piece measures at most, on its own stream and on others; what comes after them counts as other work."""
_DRIFT = 20_000
"""Two clocks may drift apart by one part in so many."""


class Events(Protocol):
    """Timing events of one device's current stream, its home stream. None of its methods waits for the device."""

    foreign: int
    """How often work on another device or stream was seen that is not measured."""

    def record(self, event: Any | None) -> Any:
        """Record an event (a new or pooled one for None) on the home stream; return it."""

    def record_aside(self) -> Any | None:
        """Record an event on the current stream where that is another stream of the same device; None where it is not."""

    def ready(self, event: Any) -> bool:
        """Return whether the device has reached the event."""

    def elapsed_ns(self, first: Any, second: Any) -> int:
        """Return the device's time from one event to another, both ready, in ns; negative where the second came first."""

    def release(self, event: Any) -> None:
        """Give an event back for reuse."""

    def usable(self) -> bool:
        """Return whether events may be touched now: not while a graph is captured, not on another device or stream."""

    def saw(self, device: Any) -> None:
        """Note a tensor's device: one that is none of ours is foreign."""


class DeviceTimes(msgspec.Struct, frozen=True, gc=False):
    """What the device did in one piece of a step. Times in ns; moments on the host's clock."""

    reached_ns: int
    """When the device reached the batch."""
    gap_ns: int | None
    """For how long the stream was empty before the batch was in hand; 0 while work was queued, None where it is not known."""
    transfer_ns: int
    """Copies to the device that the training had to wait for."""
    compute_ns: int
    """Everything else up to the end, idle moments between launches included."""
    host_wait_ns: int | None
    """Idle between the last launch of the optimizer and the end; None where no optimizer was seen."""
    done_ns: int
    """When the device had reached the end."""
    lag_ns: int | None
    """How far the device was behind the host when the host had launched the step, or the longest that the host waited for a
    result of it: 0 where the device kept up with every launch. None: not measured."""
    is_anchored: bool = True
    """False where the device was already behind when measuring began: it may have been at `reached_ns` and `done_ns` later than they say."""
    read_back: bool = False
    """A result was read back from the device meanwhile: the host waited until it was there."""
    aside_ns: int = 0
    """The part of `transfer_ns` before `reached_ns`: the stream had no work, and the batch was still being copied on another."""
    observed_ns: int | None = None
    """When the end was found to be reached; None: not noted."""
    comm_ns: int | None = None
    """The part of `compute_ns` in which the stream waited for other ranks; None where that is not measured."""


class Piece:
    """One piece of a step: its events while the device works on it, then its times."""

    __slots__ = (
        "asides",
        "asides_missed",
        "awaits_asides",
        "batch",
        "begin_ns",
        "blocked_ns",
        "chained",
        "copied",
        "copies",
        "copies_until_ns",
        "detailed",
        "draw",
        "end",
        "end_ns",
        "follows",
        "in_run_ns",
        "is_lost",
        "late_copies",
        "launch",
        "launch_ns",
        "launching_ns",
        "paused_ns",
        "previous",
        "read_back",
        "started_ns",
        "times",
        "times_waits",
        "waits",
        "waits_seen",
    )

    def __init__(self, begin_ns: int, detailed: bool, draw: float = 0.0) -> None:
        self.begin_ns = begin_ns
        """When the batch was in hand."""
        self.detailed = detailed
        self.draw = draw
        """From 0 to 1, evenly spread: the lowest are sampled."""
        self.previous: Any | None = None
        """The end of the piece before, while `batch` is another event."""
        self.batch: Any = None
        self.chained = False
        """The one before it is the end of the piece that is read before this one."""
        self.started_ns = 0
        """Else: when measuring began, where the one before it was recorded."""
        self.follows = False
        """The stream had work when the batch was in hand."""
        self.copied = False
        self.copies: Sequence[tuple[Any, Any]] = ()
        """Begin and end of each run of copies to the device on the home stream."""
        self.copies_until_ns = begin_ns
        """When the last call of the first run of copies, which begins with the batch, had returned."""
        self.launching_ns = 0
        """The part of that run's time in which the host launched its copies, or was between two of them."""
        self.asides: Sequence[tuple[Any, Any]] = ()
        """Begin and end of copies on other streams, launched before the batch was in hand."""
        self.asides_missed = False
        """There were such copies, and they are not measured."""
        self.awaits_asides = False
        """The home stream was made to wait for copies on other streams later in the piece."""
        self.waits_seen: int | None = None
        """How often the home stream waited for other ranks; None where that is not watched."""
        self.times_waits = False
        self.waits: list[tuple[Any, Any]] = []
        """Before and after each of these waits; fewer than `waits_seen` where they are not timed."""
        self.launch: Any | None = None
        """After the optimizer's last launch."""
        self.launch_ns = 0
        """When the host had made it; 0: no optimizer was seen."""
        self.late_copies = 0
        """How many of `copies` came before that."""
        self.blocked_ns = 0
        """The longest that the host waited for a result."""
        self.paused_ns = 0
        """How long it waited for results after the optimizer's last launch."""
        self.read_back = False
        self.in_run_ns: tuple[int, int] | None = None
        """From when to when it takes in a run of pieces that were measured as one; None where it is measured by itself."""
        self.end: Any = None
        self.end_ns = 0
        self.times: DeviceTimes | None = None
        self.is_lost = False
        """The host's clock must do."""

    @property
    def is_pending(self) -> bool:
        """Whether its times may still come."""
        return self.times is None and not self.is_lost


class DeviceTimeline:
    """Records events for the training thread and reads them in order. Every call is made in that thread; none raises."""

    __slots__ = (
        "_aside_copies",
        "_aside_gap_ns",
        "_asides_read",
        "_begun",
        "_begun_elsewhere",
        "_chained",
        "_copied",
        "_copies_aside",
        "_copy",
        "_copy_at_ns",
        "_copy_call_ns",
        "_ended",
        "_events",
        "_felt_ns",
        "_foreign_seen",
        "_harvested_ns",
        "_host_ns",
        "_is_anchored",
        "_is_reached",
        "_known",
        "_lag_carried_ns",
        "_lag_ns",
        "_lag_variance",
        "_lags",
        "_lags_estimated",
        "_last",
        "_last_begin_ns",
        "_late_ns",
        "_launches_timed",
        "_met_ns",
        "_open",
        "_pending",
        "_piece_ns",
        "_reached_ns",
        "_run_ns",
        "_started_ns",
        "_to_launch_ns",
        "_transfer_ns",
        "_unfinished_asides",
        "_wait_ns",
        "_waits",
        "_waits_timed",
        "_works_in_fetch",
        "attention",
        "copied_aside",
        "error",
        "given_up",
        "launches",
        "watches_ranks",
    )

    def __init__(self, events: Events) -> None:
        self._events = events
        self._open: Piece | None = None
        self._last: Any | None = None
        """The end of the piece before the next one."""
        self._chained = False
        """Whether it is a piece's end, and not only where measuring began."""
        self._started_ns = 0
        self._is_reached = False
        """Whether the device is known to have reached that."""
        self._pending: deque[Piece] = deque()
        self._known = 0
        """How many of them, the first ones, it is known to have finished."""
        self._copy: tuple[Piece | None, Any] | None = None
        """The outermost open copy: its piece and begin, no piece where it is on another stream, no begin where it goes on with the batch."""
        self._copy_at_ns = 0
        self._copy_call_ns = COPY_CALL_NS
        """The shortest call that copied to the device."""
        self._aside_copies: list[tuple[Any, Any]] = []
        """Copies on other streams that no batch has followed yet."""
        self._copies_aside = False
        """Some copies of this training are made on other streams."""
        self.copied_aside = False
        """They were, as far as known, since the home stream was made to wait for another one last."""
        self.error: Exception | None = None
        """What ended this timeline."""
        self.attention = False
        """The recorder has something to do after this end of a piece: `error`, `saw_foreign`, or time to harvest."""
        self.given_up = 0
        """Pieces that were not read: left to the host's clock, or taken as busy all the time."""
        self.launches = 0
        """How often the optimizer's last launch was noted."""
        self.watches_ranks = False
        """The home stream's waits for other ranks are watched, from the next piece on."""
        self._waits = 0.0
        """How many of them a piece has on average lately."""
        self._harvested_ns = self._ended = 0
        self._foreign_seen = 0
        self._begun_elsewhere = 0
        self._begun = 0
        self._last_begin_ns = 0
        self._piece_ns = self._host_ns = 0.0
        """What a piece takes on average lately, and the host's part of it: from the batch to the end."""
        # What was read last:
        self._unfinished_asides: list[tuple[Any, Any]] = []
        """Copies on other streams that went on when the training's stream had gone on too: for a later batch."""
        self._asides_read = 0
        self._aside_gap_ns = self._felt_ns = 0.0
        """Means of the gaps after such copies, and of the part of them in which the stream had nothing else to do than to wait for the copies."""
        self._reached_ns: int | None = None
        """When the device reached the end of the piece that was read last."""
        self._met_ns = 0
        """When the two clocks met last."""
        self._is_anchored = True
        """Whether the clocks have met since measuring began."""
        self._works_in_fetch = False
        """Something on the home stream is launched while a batch is fetched."""
        self._copied = 0
        self._transfer_ns = self._late_ns = 0.0
        self._to_launch_ns = 0.0
        """Means of what pieces in detail showed: their copies, and the device's time from the batch to the optimizer's last launch."""
        self._lags = self._lags_estimated = 0
        self._lag_ns = self._lag_variance = 0.0
        """How far the device is behind the host at the end of a quick piece that waits surround: of how many it was measured, of how many
        estimated since, and its mean and variance."""
        self._lag_carried_ns = 0.0
        """By how much the estimates so far were too low in all."""
        self._launches_timed = 0
        """Pieces that `_to_launch_ns` is the mean of."""
        self._run_ns = 0
        """When the device reached the first batch of the run that is read."""
        self._waits_timed = 0
        self._wait_ns = 0.0
        """The mean of a wait for other ranks, and of how many pieces."""

    def start(self, at_ns: int) -> None:
        """Measure from now on, at first or after a rest or a phase: what is queued by now comes before the next batch."""
        try:
            self._open = self._last = self._copy = None
            self._is_reached = self._chained = False
            self._started_ns = at_ns
            dropped, self._aside_copies = self._aside_copies, []
            self._drop_asides(dropped)
            if self.error is None and self._events.usable():
                self._last = self._events.record(None)
        except Exception as error:
            self._break(error)

    def begin(self, at_ns: int) -> None:
        """A batch is in hand, or the step goes on after a phase.

        Called again before anything was launched (a second loader feeds the step too), it moves the moment.
        """
        try:
            self._begin(at_ns)
        except Exception as error:
            self._break(error)

    def _begin(self, at_ns: int) -> None:
        piece, events = self._open, self._events
        if piece is not None and not piece.launch_ns:
            # With copies it was copied while it was fetched, and is on the device already; after a wait for ranks the step is under way.
            if not piece.copies and not piece.waits_seen and events.usable():
                self._move_batch(piece, at_ns)
            return
        self._open = None
        if self.error is not None:
            return
        pending = self._pending
        if pending and (len(pending) >= RING or at_ns - pending[0].end_ns > OVERDUE_NS):
            self._harvest(at_ns)
            if pending and (len(pending) >= RING or at_ns - pending[0].end_ns > OVERDUE_NS):
                self._give_up_busy()
        foreign = events.foreign
        if not events.usable():
            self._begun_elsewhere = self._begun_elsewhere + 1 if events.foreign > foreign else 0
            self._last = None
            return
        self._begun_elsewhere = 0
        piece = Piece(at_ns, self._is_detailed(at_ns), self._draw)
        last, self._last = self._last, None
        piece.chained, piece.started_ns = self._chained, self._started_ns
        if self.watches_ranks:
            piece.waits_seen = 0
            piece.times_waits = self._draw * self._waits * WAIT_TIMED_EVERY_NS <= self._piece_ns
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
        """Return whether the piece that begins is measured in detail, in an order that keeps step with no other."""
        if self._last_begin_ns:
            self._piece_ns += 0.125 * (at_ns - self._last_begin_ns - self._piece_ns)
        self._last_begin_ns = at_ns
        self._begun += 1
        quick = self._piece_ns < DETAILED_NS and self._begun > _FIRST_DETAILED
        return not quick or self._draw < 1 / 16

    @property
    def _draw(self) -> float:
        """A number from 0 to 1 for the piece that begins: evenly spread over any run of pieces, and over every n-th of them."""
        return (self._begun * 0x9E3779B1 & 0xFFFFFFFF) / 2**32

    def _move_batch(self, piece: Piece, at_ns: int) -> Any:
        """Record the piece's batch event now; return it."""
        if piece.previous is None and piece.follows:
            piece.previous, piece.batch = piece.batch, self._events.record(None)
        else:
            piece.batch = self._events.record(piece.batch)
        if piece.follows:
            piece.follows = not self._events.ready(piece.previous)
        piece.begin_ns = piece.copies_until_ns = at_ns
        if self._aside_copies:
            piece.asides, self._aside_copies = [*piece.asides, *self._aside_copies], []
        return piece.batch

    def copy_begins(self, at_ns: int, follows: bool, in_fetch: bool = False) -> Any | None:
        """A copy to the device is about to be launched. `follows`: right after the batch came or the copy before it.
        `in_fetch`: the loader copies the batch itself, so the wait for it ends here.

        Return what `copy_ends` wants to be given.
        """
        try:
            return self._copy_begins(at_ns, follows, in_fetch)
        except Exception as error:
            self._break(error)
            return None

    def _copy_begins(self, at_ns: int, follows: bool, in_fetch: bool) -> Any | None:
        if self.error is not None:
            return None
        piece, events = self._open, self._events
        around = self._copy
        may_be_aside = (piece is None or piece.detailed or self._aside_copies) and len(
            self._aside_copies
        ) < _MOST_COPIES
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
        if not follows and len(piece.copies) >= _MOST_COPIES:
            return None
        self._copy_at_ns = at_ns
        self._copy = piece, None if follows else events.record(None)
        return self._copy

    def copy_ends(self, token: Any | None, call_ns: int | None = None) -> None:
        """The copy has been launched, by one call that took so long; None: not by one call.

        One that began in a piece which has ended meanwhile is not measured.
        """
        if token is None or self.error is not None:
            return
        piece, begin = token
        if self._copy is token:
            self._copy = None
        try:
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
        except Exception as error:
            self._break(error)

    def awaits_asides(self, at_ns: int | None) -> Any | None:
        """The home stream is about to wait for copies on other streams. None: while a batch is fetched, so that this is measured by the copies alone.

        Return what `copy_ends` wants to be given.
        """
        piece = self._open
        token = None
        if at_ns is not None and piece is not None:
            piece.awaits_asides = True
            token = self.copy_begins(at_ns, follows=False)
        self.copied_aside = False
        return token

    def launched(self, at_ns: int) -> None:
        """The optimizer has launched its work."""
        self.launches += 1
        piece, events = self._open, self._events
        if piece is None:
            return
        try:
            piece.launch_ns, piece.paused_ns = at_ns, 0
            if piece.detailed and events.usable():
                piece.launch = events.record(piece.launch)
                piece.late_copies = len(piece.copies)
        except Exception as error:
            self._break(error)

    def wait_begins(self) -> tuple[Piece, Any] | None:
        """The home stream is about to wait for other ranks. Return what `wait_ends` wants to be given.

        Called in the training thread, or by autograd's threads while that one waits for a backward pass.
        """
        piece = self._open
        if piece is None or piece.waits_seen is None or self.error is not None:
            return None
        piece.waits_seen += 1
        try:
            if piece.times_waits and len(piece.waits) < _WAITS_A_PIECE and self._events.usable():
                return piece, self._events.record(None)
        except Exception as error:
            self._break(error)
        return None

    def wait_ends(self, begin: tuple[Piece, Any] | None) -> None:
        """What the stream waits for has been queued."""
        if begin is None or self.error is not None or begin[0] is not self._open:
            return
        try:
            if self._events.usable():
                begin[0].waits.append((begin[1], self._events.record(None)))
        except Exception as error:
            self._break(error)

    def read_back(self, blocked_ns: int) -> None:
        """The host has asked for a result, and waited so long for it."""
        piece = self._open
        if piece is not None:
            piece.read_back = True
            piece.blocked_ns = max(piece.blocked_ns, blocked_ns)
            piece.paused_ns += blocked_ns

    def end(self, at_ns: int) -> Piece | None:
        """The host is done with the piece. Return it where its times will follow; None where the host's clock must do."""
        try:
            return self._end(at_ns)
        except Exception as error:
            self._break(error)
            return None

    def _end(self, at_ns: int) -> Piece | None:
        piece, events = self._open, self._events
        self._open = None
        if piece is not None:
            if events.usable():
                piece.end_ns = at_ns
                piece.end = events.record(None)
                self._pending.append(piece)
                self._last, self._chained, self._is_reached = piece.end, True, False
                self._host_ns += 0.125 * (at_ns - piece.begin_ns - self._host_ns)
                self._waits += 0.125 * ((piece.waits_seen or 0) - self._waits)
            else:
                self.given_up += 1
                self._last = piece = None
        self._copy = None
        self._ended += 1
        self.attention = (
            self._ended >= HARVESTED_AFTER
            or at_ns - self._harvested_ns >= HARVESTED_AFTER_NS
            or events.foreign != self._foreign_seen
            or self.error is not None
        )
        return piece

    def saw_foreign(self) -> bool:
        """Return whether work on another device or stream was seen since this was asked last."""
        seen, self._foreign_seen = self._foreign_seen, self._events.foreign
        return seen != self._foreign_seen

    def harvest(self, now_ns: int) -> None:
        """Give the pieces that the device has finished their times, in order. Costs a few queries at most, or none."""
        try:
            self._harvest(now_ns)
        except Exception as error:
            self._break(error)

    def _harvest(self, now_ns: int) -> None:
        pending = self._pending
        if not pending or self.error is not None or not self._events.usable():
            return
        self._harvested_ns, self._ended = now_ns, 0
        count = self._known = self._finished()
        pieces = list(islice(pending, count + 1))
        self._measure_runs(pieces[:count])
        for piece, following in zip_longest(pieces[:count], pieces[1:]):
            if piece.times is None:  # else an interrupt came just after it was read
                self._read(piece, following, now_ns)
            self._known -= 1
            pending.popleft()

    def _measure_runs(self, pieces: Sequence[Piece]) -> None:
        """Measure the pieces between which the device was never idle as one, and share their time evenly: one call for all of them."""
        first = 0
        while first < len(pieces):
            last = first
            while (
                last + 1 < len(pieces)
                and pieces[last + 1].batch is pieces[last].end
                and not (
                    pieces[last].detailed or pieces[last + 1].detailed or pieces[last].waits or pieces[last + 1].waits
                )
            ):
                last += 1
            if last > first:
                run = pieces[first : last + 1]
                run_ns = max(0, self._events.elapsed_ns(run[0].batch, run[-1].end))
                for number, piece in enumerate(run):
                    piece.in_run_ns = run_ns * number // len(run), run_ns * (number + 1) // len(run)
            first = last + 1

    def _finished(self) -> int:
        """Return how many of the pending pieces the device has finished: they are of one stream, so the first ones."""
        pending, ready = self._pending, self._events.ready
        if self._is_reached or ready(pending[-1].end):
            return len(pending)
        finished, unfinished = self._known, len(pending) - 1
        while finished < unfinished:
            middle = (finished + unfinished) // 2
            if ready(pending[middle].end):
                finished = middle + 1
            else:
                unfinished = middle
        return finished

    def interrupt(self) -> None:
        """Something else than the next step follows: the time until then is no gap."""
        self._open = self._last = None

    def saw(self, device: Any) -> None:
        """Note the device that a tensor of the step came to."""
        if self.error is None:
            try:
                self._events.saw(device)
            except Exception as error:
                self._break(error)

    @property
    def uuid(self) -> str | None:
        """The device's UUID as its driver knows it, "GPU-…"; None where it has none."""
        return getattr(self._events, "uuid", None)

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
            self.given_up += piece.is_lost
            pending.popleft()
            if self.error is None:
                try:
                    self._release(piece)
                except Exception as error:
                    self._break(error)
        self._open = self._last = None
        self._reached_ns = None

    def _give_up_busy(self) -> None:
        """Let pieces go of which the device has not finished the first: it had work all the time, so no wait was felt."""
        pending = self._pending
        for number, piece in enumerate(pending):
            known = piece.chained or number > 0
            piece.times = DeviceTimes(
                piece.begin_ns,
                0 if known else None,
                0,
                piece.end_ns - piece.begin_ns,
                None,
                piece.end_ns,
                None,
                is_anchored=False,
                observed_ns=piece.end_ns,  # nothing is booked beyond it
            )
        self.given_up += len(pending)
        self.abandon()

    @property
    def pending(self) -> int:
        return len(self._pending)

    def _break(self, error: Exception) -> None:
        """End this timeline by an error of an event call."""
        self._open = self._last = None
        pass_on(error)
        self.error = self.error or error
        self.attention = True

    # Reading what the device has finished ---------------------------------------------------------------------------

    def _read(self, piece: Piece, following: Piece | None, observed_ns: int) -> None:
        """Set the piece's times, and give its events back. `following`: the piece after it, where that has ended too."""
        elapsed = self._events.elapsed_ns
        before_ns, reached_ns, gap_ns = self._batch(piece)
        reached_ns = min(reached_ns, max(observed_ns, piece.end_ns))  # whatever the device's clock says
        with_asides = bool(piece.asides)
        felt_ns = self._aside(piece, before_ns, reached_ns) if with_asides or self._unfinished_asides else 0
        if gap_ns:
            if piece.asides_missed and self._felt_ns:
                felt_ns = max(felt_ns, int(gap_ns * self._felt_ns / self._aside_gap_ns))
            elif with_asides:
                self._asides_read += 1
                weight = max(0.125, 1 / self._asides_read)
                self._aside_gap_ns += weight * (gap_ns - self._aside_gap_ns)
                self._felt_ns += weight * (min(felt_ns, gap_ns) - self._felt_ns)
            gap_ns = max(0, gap_ns - felt_ns)
        most_lag_ns = self._most_lag_ns(piece, following)
        is_estimated = most_lag_ns is not None and not self._is_sampled(piece, following)
        if most_lag_ns is not None and is_estimated:
            total_ns = piece.end_ns + self._estimated_lag_ns(most_lag_ns) - reached_ns
        elif piece.in_run_ns is None:
            total_ns = max(0, elapsed(piece.batch, piece.end))
        else:  # where the run's time is not shared as evenly, the last one makes up for it
            if piece.in_run_ns[0] == 0:
                self._run_ns = reached_ns
            total_ns = max(0, self._run_ns + piece.in_run_ns[1] - reached_ns)
        end_ns = max(min(reached_ns + total_ns, observed_ns), piece.end_ns)
        total_ns = min(total_ns, end_ns - reached_ns)
        if most_lag_ns is not None and not is_estimated:
            self._sample_lag(end_ns - piece.end_ns)
        late_ns = 0
        if piece.copies:
            copies = [max(0, elapsed(begin, end)) for begin, end in piece.copies]
            if not piece.follows and piece.launching_ns:  # an idle device waited for the host to launch them
                copies[0] = max(0, copies[0] - piece.launching_ns)
            transfer_ns = sum(copies)
            if piece.launch_ns:
                late = zip(piece.copies[piece.late_copies :], copies[piece.late_copies :], strict=True)
                for (_, end), took_ns in late:  # as far as they ran before the host's end
                    after_ns = end_ns - max(0, elapsed(end, piece.end)) - piece.end_ns
                    late_ns += max(0, took_ns - max(0, after_ns))
        else:
            transfer_ns = 0
        if piece.detailed and piece.copied:
            self._copied += 1
            self._transfer_ns += max(0.125, 1 / self._copied) * (transfer_ns - self._transfer_ns)
            self._late_ns += max(0.125, 1 / self._copied) * (late_ns - self._late_ns)
        elif piece.copied:
            transfer_ns, late_ns = int(self._transfer_ns), int(self._late_ns) if piece.launch_ns else 0
        transfer_ns = min(transfer_ns, total_ns)
        idle_ns, lag_ns = self._after_launch(piece, reached_ns, end_ns, late_ns)
        if idle_ns is not None:
            idle_ns = min(idle_ns, total_ns - transfer_ns) if self._is_anchored else 0
        compute_ns = total_ns - transfer_ns - (idle_ns or 0)
        comm_ns = self._waited(piece)
        piece.times = DeviceTimes(
            reached_ns,
            gap_ns,
            transfer_ns + felt_ns,
            compute_ns,
            idle_ns,
            end_ns,
            lag_ns if self._is_anchored and not is_estimated else None,
            self._is_anchored,
            piece.read_back,
            felt_ns,
            observed_ns,
            None if comm_ns is None else min(comm_ns, compute_ns),
        )
        self._reached_ns = end_ns
        self._release(piece)

    def _batch(self, piece: Piece) -> tuple[int | None, int, int | None]:
        """Return when the device was done with what came before, when it reached the batch, and how long the stream was empty in between.

        None: not known.
        """
        at_ns, before_ns = piece.begin_ns, self._reached_ns if piece.chained else None
        if piece.previous is None:
            if piece.follows and before_ns is not None:
                return before_ns, before_ns, 0
            self._met_ns, self._is_anchored = at_ns, not piece.follows
            return None, at_ns, 0 if piece.follows else None
        age_ns = at_ns - self._met_ns
        if (
            before_ns is not None
            and age_ns < RELIED_ON_NS
            and not (piece.detailed or piece.follows or self._works_in_fetch)
        ):
            self._met_ns, self._is_anchored = at_ns, True
            return before_ns, at_ns, max(0, at_ns - before_ns)
        passed_ns = max(0, self._events.elapsed_ns(piece.previous, piece.batch))
        self._is_anchored = self._is_anchored or not piece.follows
        if before_ns is None:  # measuring began there: the device was done with what came before then or later
            before_ns, age_ns = max(piece.started_ns, at_ns - passed_ns), 0
        if piece.follows:
            return before_ns, before_ns + passed_ns, 0
        late_ns = before_ns + passed_ns - at_ns
        self._works_in_fetch = late_ns > _CLOCKS_AGREE_NS + age_ns // _DRIFT
        if self._works_in_fetch:  # work was launched during the fetch, and was not done when the batch was in hand
            return before_ns, at_ns + late_ns, max(0, at_ns - before_ns)
        self._met_ns = at_ns
        return at_ns - passed_ns, at_ns, passed_ns

    def _most_lag_ns(self, piece: Piece, following: Piece | None) -> int | None:
        """Return how far the device can have been behind the host at the end of this piece, which it worked on between two waits.

        None where it is to be measured: the device was not idle before and after, the host took longer than usual, or waited long, or launched
        work in that wait.
        """
        if following is None or following.previous is not piece.end or following.follows:
            return None
        if piece.follows or piece.in_run_ns is not None or self._works_in_fetch:
            return None
        if piece.end_ns - piece.begin_ns > self._host_ns + self._piece_ns / 16:
            return None
        most_ns = following.begin_ns - piece.end_ns
        return most_ns if most_ns < DETAILED_NS else None

    def _is_sampled(self, piece: Piece, following: Piece | None) -> bool:
        """Return whether the lag of such a piece is measured. That before a piece in detail is: the two clocks are compared there."""
        if piece.detailed or self._lags < _LAGS_FIRST or (following is not None and following.detailed):
            return True
        varies = self._lag_variance / (LAG_PIECES * (LAG_ERROR * max(1.0, self._piece_ns)) ** 2)
        return piece.draw < max(LAG_SAMPLED, varies)

    def _sample_lag(self, lag_ns: int) -> None:
        """Take in a lag that was measured. It stands for those estimated since the one before it, too: the next ones make up for them."""
        off_ns = lag_ns - self._lag_ns
        self._lag_carried_ns += self._lags_estimated * off_ns
        self._lags_estimated = 0
        self._lags += 1
        self._lag_variance += max(1 / 32, 1 / self._lags) * (off_ns**2 - self._lag_variance)
        self._lag_ns += max(1 / 8, 1 / self._lags) * off_ns

    def _estimated_lag_ns(self, most_ns: int) -> int:
        """Return what the lag of a piece is taken for, within what is possible. The next estimates make up for what is not."""
        self._lags_estimated += 1
        lag_ns = min(max(0, round(self._lag_ns + self._lag_carried_ns / 8)), most_ns)
        self._lag_carried_ns += self._lag_ns - lag_ns
        return lag_ns

    def _drop_asides(self, copies: Sequence[tuple[Any, Any]]) -> None:
        """Give back the events of copies on other streams that no batch is measured by."""
        for pair in copies:
            for event in pair:
                self._events.release(event)

    def _aside(self, piece: Piece, before_ns: int | None, reached_ns: int) -> int:
        """Return for how long the stream had nothing else to do, before it reached the batch, than to wait for copies on other streams."""
        events = self._events
        if not piece.chained:  # those of before measuring began again
            dropped, self._unfinished_asides = self._unfinished_asides, []
            self._drop_asides(dropped)
        copies, self._unfinished_asides = [*self._unfinished_asides, *piece.asides], []
        piece.asides = ()
        felt_ns = 0
        for begin, end in copies:
            until_ns = reached_ns - events.elapsed_ns(end, piece.batch) if events.ready(end) else reached_ns + 1
            is_done = until_ns <= reached_ns  # else only what the stream is made to wait for later was felt
            if before_ns is not None and (is_done or (piece.awaits_asides and events.ready(begin))):
                from_ns = reached_ns - events.elapsed_ns(begin, piece.batch)
                felt_ns += max(0, min(until_ns, reached_ns) - max(from_ns, before_ns + felt_ns))
            if is_done:
                events.release(begin)
                events.release(end)
            else:
                self._unfinished_asides = [*self._unfinished_asides, (begin, end)][-_MOST_COPIES:]
        return felt_ns

    def _waited(self, piece: Piece) -> int | None:
        """Return for how long the stream waited for other ranks: where that was not timed, by the mean of the waits that were."""
        if not piece.waits_seen:
            return piece.waits_seen
        if len(piece.waits) == piece.waits_seen:
            waited_ns = sum(max(0, self._events.elapsed_ns(begin, end)) for begin, end in piece.waits)
            self._waits_timed += 1
            self._wait_ns += max(0.125, 1 / self._waits_timed) * (waited_ns / piece.waits_seen - self._wait_ns)
            return waited_ns
        return int(self._wait_ns * piece.waits_seen) if self._waits_timed else None

    def _after_launch(self, piece: Piece, reached_ns: int, end_ns: int, late_ns: int) -> tuple[int | None, int | None]:
        """Return for how long the device idled after the optimizer's last launch, and how far it was behind the host then."""
        lag_ns = max(end_ns - piece.end_ns, piece.blocked_ns)
        if not piece.launch_ns:
            return None, lag_ns or None
        pause_ns = piece.end_ns - piece.launch_ns - piece.paused_ns
        if piece.launch is not None and (pause_ns > SHORT_PAUSE_NS or lag_ns == 0):
            launch_ns = max(piece.launch_ns, end_ns - max(0, self._events.elapsed_ns(piece.launch, piece.end)))
            self._launches_timed += 1
            self._to_launch_ns += max(0.25, 1 / self._launches_timed) * (launch_ns - reached_ns - self._to_launch_ns)
            lag_ns, known = max(lag_ns, launch_ns - piece.launch_ns), True
        else:
            launch_ns, known = max(piece.launch_ns, reached_ns + int(self._to_launch_ns)), lag_ns > 0
        if pause_ns <= SHORT_PAUSE_NS:
            return 0, lag_ns if known else None
        # While a result is waited for, the device catches up.
        busy_ns = max(launch_ns - piece.launch_ns + late_ns, piece.paused_ns)
        idle_ns = piece.end_ns - piece.launch_ns - busy_ns
        if idle_ns < LAUNCH_GAP_NS and end_ns - piece.end_ns > SHORT_PAUSE_NS:
            idle_ns = 0
        return max(0, idle_ns), lag_ns if known else None

    def _release(self, piece: Piece) -> None:
        """Give back all events but the end: that is the next piece's `previous` or `batch`, and goes with it."""
        release = self._events.release
        mine = {id(event): event for pair in (*piece.copies, *piece.waits) for event in pair}
        for event in (piece.previous, piece.batch, piece.launch):
            if event is not None:
                mine[id(event)] = event
        for event in mine.values():
            release(event)
