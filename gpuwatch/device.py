"""The device's own timeline: when its stream ran dry, from timing events that are polled and never waited for.

A launch returns before the device runs it, so the host's clock alone cannot tell a wait that starves the device from one that
hides behind queued work. Events on the current stream can: one when a batch is in hand, one when it is on the device, one after
the step's last launch. They are read later with `query()`, in the training thread, never while a graph is captured, and nothing
is ever synchronised. No device is initialised here: events begin once the user's code has set one up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

RING = 256
"""Pieces whose events are still open, at most. A device that runs further behind is measured by the host's clock, counted."""
HARVESTED_AFTER = 16
HARVESTED_AFTER_NS = 2_000_000
"""Ended pieces are read so many at a time, or after so long: at once where steps are slow, and in one go where they are quick."""
AWAITED, FOREIGN, DUE = 1, 2, 4
"""What `end` tells, together: the piece's times will be told; work was seen elsewhere; it is time to `harvest`."""
_ASTRAY = 16
"""Pieces in a row that begin on another device or stream before that one is taken for the training's."""


class Events(Protocol):
    """Timing events of one device's current stream. None of its methods waits for the device."""

    foreign: int
    """How often work on another device or stream was seen: what is not on this stream is not measured."""

    def record(self, event: Any | None) -> Any:
        """Record an event (a new or pooled one for None) on the current stream; return it."""

    def ready(self, event: Any) -> bool:
        """Return whether the device has reached the event."""

    def elapsed_ns(self, first: Any, second: Any) -> int:
        """Return the device's time from one event to another, both ready, in ns."""

    def release(self, event: Any) -> None:
        """Give an event back for reuse."""

    def usable(self) -> bool:
        """Return whether events may be touched now: not while a graph is captured, not on another device or stream."""

    def saw(self, device: Any) -> None:
        """Note a tensor's device: one that is none of ours is foreign."""


class DeviceTimes(msgspec.Struct, frozen=True, gc=False):
    """What the device did in one piece of a step. Times in ns. Made in the training thread: a struct, for its speed."""

    gap_ns: int | None
    """From the last launch before to this batch: the stream was empty for so long, 0 while work was queued.
    None: nothing was measured before."""
    transfer_ns: int
    compute_ns: int
    launch_seen: bool
    """Whether the piece's end is its last known launch; else it is the moment the host asked for the next batch."""
    drained: bool
    """The device had nothing left to do when the host had finished the step, or before this batch was in hand: no run-ahead."""
    observed_ns: int
    """Host time at which the end was found to be reached: the end is not later."""
    read_back: bool = False
    """A result was read back from the device meanwhile: the host waited until it was there."""


class _Piece:
    """The events of one open piece. Pieces are reused, like events."""

    __slots__ = ("batch", "copies", "drained_ns", "end", "follows", "launch_seen", "previous", "read_back")

    def __init__(self) -> None:
        self.previous: Any | None = None
        """The end of the piece before, while `batch` is another event."""
        self.batch: Any = None
        self.follows = False
        """The stream had work when the batch was in hand, and did not run dry: `batch` is the end of the piece before."""
        self.reset()

    def reset(self) -> None:
        self.copies: Sequence[tuple[Any, Any]] = ()
        """Begin and end of each run of copies to the device."""
        self.end: Any | None = None
        self.launch_seen = False
        self.drained_ns = 0
        """When the host had finished the step, if the device had too by then; else 0."""
        self.read_back = False


class DeviceTimeline:
    """Records events for the training thread and harvests them in order. Every call is made in that thread."""

    __slots__ = (
        "_begun_elsewhere",
        "_drained",
        "_ended",
        "_events",
        "_foreign_told",
        "_harvested_ns",
        "_last",
        "_open",
        "_pending",
        "_spare",
        "given_up",
        "launches",
    )

    def __init__(self, events: Events) -> None:
        self._events = events
        self._open: _Piece | None = None
        self._last: Any | None = None
        """The end of the piece before the next one; kept until that one is harvested."""
        self._drained = False
        """Whether that was reached by the end of the piece."""
        self._pending: deque[_Piece] = deque()
        self._spare: list[_Piece] = []
        self.given_up = 0
        """Pieces that were left to the host's clock."""
        self.launches = 0
        """How often the last launch of a step was noted."""
        self._harvested_ns = self._ended = 0
        """When the pieces were last read, as far as they could be; and how many have ended since."""
        self._foreign_told = 0
        self._begun_elsewhere = 0

    def begin(self) -> None:
        """A batch is in hand, or the step goes on after a phase.

        Said again before anything was launched (a second loader feeds the step too), it moves the moment.
        """
        piece, events = self._open, self._events
        if piece is not None and not piece.launch_seen and events.usable():
            if not piece.copies:  # else it was copied while it was fetched, and is on the device already
                self._move_batch(piece)
            return
        self._open = None
        if len(self._pending) >= RING:
            self.given_up += 1
            self._last = None
            return
        foreign = events.foreign
        if not events.usable():
            self._begun_elsewhere = self._begun_elsewhere + 1 if events.foreign > foreign else 0
            self._last = None
            return
        self._begun_elsewhere = 0
        self._open = piece = self._spare.pop() if self._spare else _Piece()
        last, self._last = self._last, None
        if last is None or self._drained or events.ready(last):
            piece.previous, piece.batch, piece.follows = last, events.record(None), False
        else:  # what follows is queued behind it: one event serves two purposes
            piece.previous, piece.batch, piece.follows = None, last, True

    def _move_batch(self, piece: _Piece) -> Any:
        """Record the piece's batch event now; return it."""
        if not piece.follows:
            return self._events.record(piece.batch)
        piece.previous, piece.batch, piece.follows = piece.batch, self._events.record(None), False
        return piece.batch

    def copy_begins(self, follows: bool, in_fetch: bool = False) -> Any | None:
        """A copy to the device is about to be launched. `follows`: right after the batch came or the copy before it.
        `in_fetch`: the loader copies the batch itself, so the wait for it ends here.

        Return what `copy_ends` wants to be given.
        """
        piece = self._open
        if piece is None or not self._events.usable():
            return None
        if in_fetch and not piece.copies:
            return self._move_batch(piece)
        if not follows:
            return self._events.record(None)
        return piece.copies[-1][1] if piece.copies else piece.batch

    def copy_ends(self, begin: Any | None) -> None:
        """The copy has been launched."""
        piece = self._open
        if piece is None or begin is None or not self._events.usable():
            return
        if piece.copies and piece.copies[-1][1] is begin:
            self._events.record(begin)  # the run of copies goes on: its end moves
        else:
            piece.copies = [*piece.copies, (begin, self._events.record(None))]

    def launched(self) -> None:
        """The optimizer has launched its work: the last launch of the step that is known of."""
        self.launches += 1
        piece, events = self._open, self._events
        if piece is not None and events.usable():
            piece.end = events.record(piece.end)
            piece.launch_seen = True

    def read_back(self) -> None:
        """The host asks for a result, and waits until the device has it."""
        if self._open is not None:
            self._open.read_back = True

    def end(self, at_ns: int) -> int:
        """The host is done with the piece. Return AWAITED if `harvest` will tell its times, else the host's clock must do;
        FOREIGN if work on another device or stream was seen since this was last said; DUE if others wait to be told."""
        piece, events = self._open, self._events
        self._open = None
        told = 0
        if piece is not None:
            if events.usable():
                end = piece.end
                if end is None:
                    piece.end = end = events.record(None)
                elif events.ready(end):
                    piece.drained_ns = at_ns
                self._last, self._drained = end, bool(piece.drained_ns)
                self._pending.append(piece)
                told = AWAITED
            else:
                self.given_up += 1
                self._last = None
        if events.foreign > self._foreign_told:
            self._foreign_told = events.foreign
            told |= FOREIGN
        self._ended += 1
        if at_ns - self._harvested_ns >= HARVESTED_AFTER_NS or self._ended >= HARVESTED_AFTER:
            told |= DUE
        return told

    def harvest(self, now_ns: int) -> list[DeviceTimes]:
        """Return the times of the pieces that the device has finished, in order. Costs one query at least, or none."""
        pending, events = self._pending, self._events
        if not pending or not events.usable():
            return []
        self._harvested_ns, self._ended = now_ns, 0
        newest = pending[-1]
        if newest.drained_ns or events.ready(newest.end):  # then so are those before it: they are of one stream
            done = list(pending)
            pending.clear()
        else:
            done = []
            while events.ready(pending[0].end):
                done.append(pending.popleft())
        observed_ns, times = now_ns, []
        for piece in reversed(done):
            observed_ns = piece.drained_ns or observed_ns
            times.append(self._read(piece, observed_ns))
        times.reverse()
        return times

    def interrupt(self) -> None:
        """Something else than the next step follows: the time until then is no gap."""
        self._open = self._last = None

    def resume(self) -> None:
        """Measure again after a rest, from the next piece on: what is queued now comes before it."""
        self._open = None
        self._last, self._drained = self._events.record(None) if self._events.usable() else None, False

    def look(self) -> None:
        """Note whether another device or stream is current: a loader may copy on one of its own while it fetches."""
        self._events.usable()

    def saw(self, device: Any) -> None:
        """Note the device that a tensor of the step came to."""
        self._events.saw(device)

    @property
    def is_astray(self) -> bool:
        """Whether the training goes on on another device or stream than it began on."""
        return self._begun_elsewhere >= _ASTRAY

    def abandon(self) -> int:
        """Let the pieces go that are still open; return how many were promised and will never be told."""
        lost = len(self._pending)
        self.given_up += lost
        self._pending.clear()
        self._open = self._last = None
        return lost

    @property
    def pending(self) -> int:
        return len(self._pending)

    def _read(self, piece: _Piece, observed_ns: int) -> DeviceTimes:
        elapsed, release = self._events.elapsed_ns, self._events.release
        previous, batch = piece.previous, piece.batch
        transfer_ns = sum([max(0, elapsed(begin, end)) for begin, end in piece.copies]) if piece.copies else 0
        gap_ns = 0 if piece.follows else None if previous is None else max(0, elapsed(previous, batch))
        times = DeviceTimes(
            gap_ns,
            transfer_ns,
            max(0, elapsed(batch, piece.end) - transfer_ns),
            piece.launch_seen,
            bool(piece.drained_ns or gap_ns),
            observed_ns,
            piece.read_back,
        )
        # The end is the next piece's `previous`: it goes back to the pool with that one.
        release(batch)
        if previous is not None:
            release(previous)
        if piece.copies:  # runs of copies share events: one ends where the next one begins
            shared = {id(event): event for pair in piece.copies for event in pair}
            shared.pop(id(batch), None)
            for event in shared.values():
                release(event)
        piece.reset()
        self._spare.append(piece)
        return times
