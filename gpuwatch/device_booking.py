"""Book a step by the device's own timeline: what the wait for data really cost. Pure arithmetic, all times in ns.

The device's times are differences between events. They are laid onto the host's clock where both clocks meet: a batch event on an
empty stream is reached the moment that the host records it.
"""

from __future__ import annotations

import msgspec

from gpuwatch.device import DeviceTimes
from gpuwatch.ledger import COMPUTE, HOST_WAIT, INPUT_WAIT, TRANSFER, Ledger

_REMEMBERED = 512


class Exposed(msgspec.Struct, frozen=True, gc=False):
    """What of a step's time the device felt, in ns."""

    input_wait_ns: int
    """The part of the data wait in which the device was idle; the rest was hidden behind its work."""
    host_wait_ns: int | None
    """Idle while the host did something else after its last launch; None where no last launch was seen."""
    transfer_ns: int
    compute_ns: int
    drained: bool = False
    """The device had nothing left to do when the host had finished the step; False too where no last launch was seen."""
    read_back: bool = False
    """A result was read back from the device."""
    measured: bool = True
    """False for an estimate by the steps that were measured."""

    def plus(self, other: Exposed) -> Exposed:
        """Return this piece of a step and a later one together."""
        waits = [wait for wait in (self.host_wait_ns, other.host_wait_ns) if wait is not None]
        return Exposed(
            self.input_wait_ns + other.input_wait_ns,
            sum(waits) if waits else None,
            self.transfer_ns + other.transfer_ns,
            self.compute_ns + other.compute_ns,
            other.drained,
            self.read_back or other.read_back,
            self.measured and other.measured,
        )


class _Measured:
    """Sums over the pieces that were measured, the last ones weighing most: what those left out are estimated by."""

    def __init__(self) -> None:
        self.data_ns = self.input_ns = self.transfer_ns = self.compute_ns = self.host_ns = 0
        self.drained = self.read_back = 0
        self._pieces = 0

    def add(self, data_ns: int, exposed: Exposed) -> None:
        if self._pieces >= _REMEMBERED:  # forget the older half
            for name in vars(self):
                setattr(self, name, getattr(self, name) // 2)
        self._pieces += 1
        self.data_ns += data_ns
        self.input_ns += exposed.input_wait_ns
        self.transfer_ns += exposed.transfer_ns
        self.compute_ns += exposed.compute_ns
        self.host_ns += exposed.host_wait_ns or 0
        self.drained += exposed.drained
        self.read_back += exposed.read_back

    def estimate(self, piece_ns: int, data_ns: int) -> Exposed:
        """Return what the device felt of a piece, most likely: the same part of the wait, the rest divided as usual."""
        input_ns = data_ns * self.input_ns // self.data_ns if self.data_ns else data_ns
        rest_ns, usual_ns = piece_ns - input_ns, self.transfer_ns + self.compute_ns + self.host_ns
        transfer_ns = rest_ns * self.transfer_ns // usual_ns if usual_ns else 0
        host_ns = rest_ns * self.host_ns // usual_ns if usual_ns else 0
        compute_ns = rest_ns - transfer_ns - host_ns
        usual = 2 * self.drained > self._pieces, 2 * self.read_back > self._pieces
        return Exposed(input_ns, host_ns, transfer_ns, compute_ns, *usual, measured=False)


class DeviceBooking:
    """Lays pieces of steps, in order, into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._measured = _Measured()
        self._host_end_ns = 0
        self._tail: str | None = None
        """What the time is from the device's last work to the end of the host's piece."""

    def book(self, begin_ns: int, end_ns: int, data_ns: int, between: str, times: DeviceTimes) -> Exposed:
        """Book one piece: the host's begin, end and data wait, and the device's times for it.

        `between` is the state of time before `begin_ns` that nothing has claimed.
        """
        ledger = self._ledger
        batch_ns = begin_ns + data_ns
        host_wait: int | None = None
        if times.gap_ns is None:  # nothing ran before, as far as is known: the whole wait was felt
            self.settle()
            ledger.book(between, begin_ns)
            input_wait = ledger.book(INPUT_WAIT, batch_ns)
        else:
            input_wait = min(times.gap_ns, data_ns)
            idle_from_ns = batch_ns - times.gap_ns
            if times.gap_ns > 0:
                ledger.book(COMPUTE, idle_from_ns)
                ledger.book(HOST_WAIT if self._tail == HOST_WAIT else between, batch_ns - input_wait)
                ledger.book(INPUT_WAIT, batch_ns)
            if self._tail == HOST_WAIT:
                host_wait = times.gap_ns - input_wait
        at_ns = max(ledger.watermark_ns, batch_ns) if times.gap_ns != 0 else ledger.watermark_ns
        ledger.book(TRANSFER, at_ns + times.transfer_ns)
        done_ns = min(at_ns + times.transfer_ns + times.compute_ns, times.observed_ns)
        ledger.book(COMPUTE, done_ns if times.launch_seen else max(done_ns, end_ns))
        self._host_end_ns = end_ns
        self._tail = HOST_WAIT if times.launch_seen else COMPUTE
        exposed = Exposed(input_wait, host_wait, times.transfer_ns, times.compute_ns, times.drained, times.read_back)
        self._measured.add(data_ns, exposed)
        return exposed

    def estimate(self, begin_ns: int, end_ns: int, data_ns: int, between: str) -> Exposed:
        """Book a piece that the device's timeline left out, divided as those that it measured were."""
        self.settle()
        self._ledger.book(between, begin_ns)
        exposed = self._measured.estimate(end_ns - begin_ns, data_ns)
        parts = {
            INPUT_WAIT: exposed.input_wait_ns,
            TRANSFER: exposed.transfer_ns,
            COMPUTE: exposed.compute_ns,
            HOST_WAIT: exposed.host_wait_ns or 0,
        }
        self._ledger.book_mixture(parts, end_ns)
        return exposed

    def settle(self) -> None:
        """Something else than a next step follows: the host's time after its last launch is booked up to the piece's end."""
        if self._tail is not None:
            self._ledger.book(self._tail, self._host_end_ns)
            self._tail = None

    def tail(self) -> list[tuple[str, int]]:
        """Return what `settle` would book now, as (state, until)."""
        return [] if self._tail is None else [(self._tail, self._host_end_ns)]
