"""What a log tells: steps and phases as they were, and the parts of a step that is not complete yet. Times in ns."""

from __future__ import annotations

import msgspec

from gpuwatch.ledger.device_booking import Exposed


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """One training step on the host's clock, in ns; pauses for phases inside it are left out.

    A struct, for it is made once a step: a frozen dataclass took seven times as long.
    """

    start_ns: int
    data_wait_ns: int
    transfer_ns: int
    compute_ns: int
    samples: int
    epoch_start: bool
    exposed: Exposed | None = None
    """What the device felt of it; None where the device's timeline did not measure it."""
    tokens: int | None = None
    """None where nobody counted them."""
    comm_wait_ns: int | None = None
    """The part of the compute (the device's where it was measured) that waited for other ranks; None where that was not measured."""
    verified: bool = True
    """False where work on another device or stream was seen: what the device felt of the wait is not certain."""

    @property
    def hidden_ns(self) -> int | None:
        """The part of the wait for data that the device did not feel: the head-room that is left."""
        return None if self.exposed is None else max(0, self.data_wait_ns - self.exposed.input_wait_ns)

    @property
    def total_ns(self) -> int:
        return self.data_wait_ns + self.transfer_ns + self.compute_ns


class PhaseRecord(msgspec.Struct, frozen=True):
    """A declared phase that began (`end_ns` None) or ended."""

    name: str
    start_ns: int
    end_ns: int | None


class Carry(msgspec.Struct):
    """The parts of an interrupted step so far."""

    start_ns: int | None = None
    data_ns: int = 0
    transfer_ns: int = 0
    total_ns: int = 0
    exposed: Exposed | None = None
    tokens: int | None = None
    comm_wait_ns: int | None = None
    open_comm_ns: int = 0
    """What of it came in the piece that is open."""
    verified: bool = True

    def waited(self, ns: int) -> None:
        self.open_comm_ns += ns
        self.comm_wait_ns = (self.comm_wait_ns or 0) + ns

    def add(self, begin: int, end: int, data: int, transfer: int) -> None:
        if self.start_ns is None:
            self.start_ns = begin
        self.data_ns += data
        self.transfer_ns += transfer
        self.total_ns += end - begin


class Level(msgspec.Struct):
    name: str | None
    start_ns: int
    carry: Carry
