"""What is measured of one piece of a step: its events while the device works on it, then its times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

DETAILED_NS = 20_000_000
"""Pieces that take longer than this on average are all measured in detail; of shorter ones one in sixteen is."""
MOST_COPIES = 64
"""Runs of copies that one piece measures at most, on its own stream and on others; what comes after them counts as other work."""


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


class Piece(msgspec.Struct, eq=False):
    """One piece of a step: its events while the device works on it, then its times."""

    begin_ns: int
    """When the batch was in hand."""
    detailed: bool
    draw: float = 0.0
    """From 0 to 1, evenly spread: the lowest are sampled."""
    previous: Any | None = None
    """The end of the piece before, while `batch` is another event."""
    batch: Any = None
    chained: bool = False
    """The one before it is the end of the piece that is read before this one."""
    started_ns: int = 0
    """Else: when measuring began, where the one before it was recorded."""
    follows: bool = False
    """The stream had work when the batch was in hand."""
    copied: bool = False
    copies: Sequence[tuple[Any, Any]] = ()
    """Begin and end of each run of copies to the device on the home stream."""
    copies_until_ns: int = 0
    """When the last call of the first run of copies, which begins with the batch, had returned."""
    launching_ns: int = 0
    """The part of that run's time in which the host launched its copies, or was between two of them."""
    asides: Sequence[tuple[Any, Any]] = ()
    """Begin and end of copies on other streams, launched before the batch was in hand."""
    asides_missed: bool = False
    """There were such copies, and they are not measured."""
    awaits_asides: bool = False
    """The home stream was made to wait for copies on other streams later in the piece."""
    waits_seen: int | None = None
    """How often the home stream waited for other ranks; None where that is not watched."""
    times_waits: bool = False
    waits: list[tuple[Any, Any]] = []
    """Before and after each of these waits; fewer than `waits_seen` where they are not timed."""
    launch: Any | None = None
    """After the optimizer's last launch."""
    launch_ns: int = 0
    """When the host had made it; 0: no optimizer was seen."""
    late_copies: int = 0
    """How many of `copies` came before that."""
    blocked_ns: int = 0
    """The longest that the host waited for a result."""
    paused_ns: int = 0
    """How long it waited for results after the optimizer's last launch."""
    read_back: bool = False
    in_run_ns: tuple[int, int] | None = None
    """From when to when it takes in a run of pieces that were measured as one; None where it is measured by itself."""
    end: Any = None
    end_ns: int = 0
    times: DeviceTimes | None = None
    is_lost: bool = False
    """The host's clock must do."""

    @property
    def is_pending(self) -> bool:
        """Whether its times may still come."""
        return self.times is None and not self.is_lost
