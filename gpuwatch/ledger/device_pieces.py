"""What is measured of one piece of a step: its events while the device works on it, then its times."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

# pieces that take longer on average are all measured in detail; of shorter ones one in sixteen
DETAILED_NS = 20_000_000
MOST_COPIES = 64  # runs of copies that a piece measures at most; later ones count as other work


class Events(Protocol):
    """Timing events of one device's current stream, its home stream. None of its methods waits for the device."""

    foreign: int  # how often work on another device or stream was seen that is not measured

    def record(self, event: Any | None) -> Any:
        """Record an event (a new or pooled one for None) on the home stream; return it."""

    def record_aside(self) -> Any | None:
        """Record an event on the current stream if that is another stream of the same device; None if it is not."""

    def ready(self, event: Any) -> bool:
        """Return whether the device has reached the event."""

    def elapsed_ns(self, first: Any, second: Any) -> int:
        """Return the device's time in ns from one ready event to another; negative where the second came first."""

    def release(self, event: Any) -> None:
        """Give an event back for reuse."""

    def usable(self) -> bool:
        """Return whether events may be touched now: not while a graph is captured, not on another device or stream."""

    def saw(self, device: Any) -> None:
        """Note a tensor's device: one that is none of ours is foreign."""


class DeviceTimes(msgspec.Struct, frozen=True, gc=False):
    """What the device did in one piece of a step. Times in ns; moments on the host's clock."""

    reached_ns: int  # when the device reached the batch
    done_ns: int  # when it had reached the end
    gap_ns: int | None  # the stream was empty so long before the batch; 0 while work was queued, None: not known
    compute_ns: int  # up to the end but for copies and waits of the host, idle moments between launches included
    transfer_ns: int = 0  # copies to the device that the training had to wait for
    host_wait_ns: int | None = None  # idle between the optimizer's last launch and the end; None: no optimizer was seen
    # how far it was behind the host after the launches, or the longest wait for a result; None: not measured
    lag_ns: int | None = None
    # False: it was behind when measuring began, and may have been later than `reached_ns` and `done_ns`
    is_anchored: bool = True
    read_back: bool = False  # a result was read back from the device meanwhile: the host waited until it was there
    # the part of `transfer_ns` before `reached_ns`: idle, while the batch was copied on another stream
    aside_ns: int = 0
    observed_ns: int | None = None  # when the end was found to be reached; None: not noted
    comm_ns: int | None = None  # the part of `compute_ns` that waited for other ranks; None: not measured
    sections_ns: dict[str, int] | None = None  # `compute_ns` by section; None: not measured


class Piece(msgspec.Struct, eq=False):
    """One piece of a step: its events while the device works on it, then its times."""

    begin_ns: int  # when the batch was in hand
    detailed: bool
    draw: float = 0.0  # from 0 to 1, evenly spread: the lowest are sampled
    previous: Any | None = None  # the end of the piece before, while `batch` is another event
    batch: Any = None
    chained: bool = False  # the one before it is the end of the piece that is read before this one
    started_ns: int = 0  # else: when measuring began, where the one before it was recorded
    reads: Sequence[tuple[int, int]] = ()  # when the host began and ended long waits for results
    follows: bool = False  # the stream had work when the batch was in hand
    copied: bool = False
    copies: Sequence[tuple[Any, Any]] = ()  # begin and end of each run of copies to the device on the home stream
    copies_until_ns: int = 0  # when the last call of the first run of copies, which begins with the batch, had returned
    launching_ns: int = 0  # the part of that run's time in which the host launched its copies
    asides: Sequence[tuple[Any, Any]] = ()  # begin and end of copies on other streams, before the batch
    asides_missed: bool = False  # there were such copies, and they are not measured
    awaits_asides: bool = False  # the home stream was made to wait for copies on other streams later in the piece
    waits_seen: int | None = None  # how often the home stream waited for other ranks; None where that is not watched
    times_waits: bool = False
    waits: list[tuple[Any, Any]] = []  # before and after each that is timed
    marks: list[tuple[str, Any]] | None = None  # where each section begins; None: it is not divided
    launch: Any | None = None  # after the optimizer's last launch
    launch_ns: int = 0  # when the host had made it; 0: no optimizer was seen
    late_copies: int = 0  # how many of `copies` came before that
    blocked_ns: int = 0  # the longest that the host waited for a result
    paused_ns: int = 0  # how long it waited for results after the optimizer's last launch
    read_back: bool = False
    in_run_ns: tuple[int, int] | None = None  # its share of a run of pieces that were measured as one
    end: Any = None
    end_ns: int = 0
    times: DeviceTimes | None = None
    is_lost: bool = False  # the host's clock must do
