"""The device's own timeline: when its stream ran dry, from timing events that are polled and never waited for.

A launch returns before the device runs it, so the host's clock alone cannot tell a wait that starves the device from one that
hides behind queued work. Events on the current stream can: one when a batch is in hand, one when it is on the device, one after
the step's last launch. They are read later with `query()`, in the training thread, never while a graph is captured, and nothing
is ever synchronised. No device is initialised here: events begin once the user's code has set one up.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import msgspec

RING = 256
"""Pieces whose events are still open, at most. A device that runs further behind is measured by the host's clock, counted."""


class Events(Protocol):
    """Timing events of one device's current stream. None of its methods waits for the device."""

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
    """The events of one open piece."""

    __slots__ = ("batch", "copies", "drained", "end", "launch_seen", "previous", "read_back")

    def __init__(self, previous: Any | None, batch: Any) -> None:
        self.previous = previous
        self.batch = batch
        self.copies: list[tuple[Any, Any]] = []
        """Begin and end of each run of copies to the device."""
        self.end: Any | None = None
        self.launch_seen = False
        self.drained = False
        self.read_back = False


class DeviceTimeline:
    """Records events for the training thread and harvests them in order. Every call is made in that thread."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._open: _Piece | None = None
        self._last: Any | None = None
        """The end of the piece before the next one; kept until that one is harvested."""
        self._pending: deque[_Piece] = deque()
        self.given_up = 0
        """Pieces that were left to the host's clock."""
        self.measured = 0

    def begin(self) -> None:
        """A batch is in hand, or the step goes on after a phase.

        Said again before anything was launched (a second loader feeds the step too), it moves the moment.
        """
        piece = self._open
        if piece is not None and not piece.launch_seen and self._events.usable():
            if not piece.copies:  # else it was copied while it was fetched, and is on the device already
                self._events.record(piece.batch)
            return
        self._open = None
        if len(self._pending) >= RING:
            self.given_up += 1
            self._last = None
            return
        if not self._events.usable():
            self._last = None
            return
        previous, self._last = self._last, None
        self._open = _Piece(previous, self._events.record(None))

    def copy_begins(self, follows: bool, in_fetch: bool = False) -> Any | None:
        """A copy to the device is about to be launched. `follows`: right after the batch came or the copy before it.
        `in_fetch`: the loader copies the batch itself, so the wait for it ends here.

        Return what `copy_ends` wants to be given.
        """
        piece = self._open
        if piece is None or not self._events.usable():
            return None
        if in_fetch and not piece.copies:
            return self._events.record(piece.batch)
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
            piece.copies.append((begin, self._events.record(None)))

    def launched(self) -> None:
        """The optimizer has launched its work: the last launch of the step that is known of."""
        piece = self._open
        if piece is not None and self._events.usable():
            piece.end = self._events.record(piece.end)
            piece.launch_seen = True

    def read_back(self) -> None:
        """The host asks for a result, and waits until the device has it."""
        if self._open is not None:
            self._open.read_back = True

    def end(self) -> bool:
        """The host is done with the piece. Return whether `harvest` will tell its times; else the host's clock must do."""
        piece, self._open = self._open, None
        if piece is None:
            return False
        if not self._events.usable():
            self.given_up += 1
            self._last = None
            return False
        if piece.end is None:
            piece.end = self._events.record(None)
        else:
            piece.drained = self._events.ready(piece.end)
        self._last = piece.end
        self._pending.append(piece)
        return True

    def harvest(self, now_ns: int) -> list[DeviceTimes]:
        """Return the times of the pieces that the device has finished, in order. Costs one query when there is none."""
        done: list[DeviceTimes] = []
        pending = self._pending
        if not pending or not self._events.usable():
            return done
        while pending and self._events.ready(pending[0].end):
            done.append(self._read(pending.popleft(), now_ns))
        return done

    def interrupt(self) -> None:
        """Something else than the next step follows: the time until then is no gap."""
        self._open = self._last = None

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

    def _read(self, piece: _Piece, now_ns: int) -> DeviceTimes:
        elapsed, release = self._events.elapsed_ns, self._events.release
        previous, batch = piece.previous, piece.batch
        transfer_ns = sum([max(0, elapsed(begin, end)) for begin, end in piece.copies]) if piece.copies else 0
        gap_ns = None if previous is None else max(0, elapsed(previous, batch))
        times = DeviceTimes(
            gap_ns,
            transfer_ns,
            max(0, elapsed(batch, piece.end) - transfer_ns),
            piece.launch_seen,
            piece.drained or bool(gap_ns),
            now_ns,
            piece.read_back,
        )
        self.measured += 1
        # The end is the next piece's `previous`: it goes back to the pool with that one.
        release(batch)
        if previous is not None:
            release(previous)
        if piece.copies:  # runs of copies share events: one ends where the next one begins
            shared = {id(event): event for pair in piece.copies for event in pair}
            shared.pop(id(batch), None)
            for event in shared.values():
                release(event)
        return times


class TorchEvents:
    """Events of torch's current accelerator on the device and stream that were current at first."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._free: list[Any] = []
        self._cuda = torch.cuda.is_available()
        self._device = torch.cuda.current_device() if self._cuda else torch.accelerator.current_device_index()
        self._stream = self._current_stream()
        self.foreign = 0
        """How often another device or stream was current: work there is not seen, so waits are not verified."""

    def record(self, event: Any | None) -> Any:
        if event is None:
            event = self._free.pop() if self._free else self._new()
        event.record()
        return event

    def ready(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed_ns(self, first: Any, second: Any) -> int:
        return int(first.elapsed_time(second) * 1e6)

    def release(self, event: Any) -> None:
        self._free.append(event)

    def usable(self) -> bool:
        torch = self._torch
        if self._cuda and torch.cuda.is_current_stream_capturing():
            return False
        if self._current_device() == self._device and self._current_stream() == self._stream:
            return True
        self.foreign += 1
        return False

    def _new(self) -> Any:
        if self._cuda:
            return self._torch.cuda.Event(enable_timing=True)
        return self._torch.Event(enable_timing=True)

    def _current_device(self) -> int:
        if self._cuda:
            return int(self._torch.cuda.current_device())
        return int(self._torch.accelerator.current_device_index())

    def _current_stream(self) -> Any:
        if self._cuda:
            return self._torch._C._cuda_getCurrentRawStream(self._device)
        return self._torch.accelerator.current_stream(self._device).stream_id


def torch_events(torch: Any) -> TorchEvents | None:
    """Return events of the device that the user's code has set up; None before it has, or where there are no timing events.

    Never sets a device up itself: on CUDA it looks at `is_initialized()` alone.
    """
    try:
        if torch.cuda.is_initialized() and torch.cuda.is_available():
            return TorchEvents(torch)
    except (AttributeError, RuntimeError):
        return None
    return None
