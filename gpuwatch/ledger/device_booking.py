"""Book a step by the device's own timeline: what the wait for data really cost. Pure arithmetic, all times in ns."""

from __future__ import annotations

import msgspec

from gpuwatch.ledger.device_pieces import DeviceTimes
from gpuwatch.ledger.states import COMM_WAIT, COMPUTE, HOST_WAIT, INPUT_WAIT, TRANSFER, Ledger

_REMEMBERED = 512
_AT_ONCE_NS = 50_000  # an event on an empty stream is reached within this time
KEPT_UP_RATIO = 0.04
"""A device behind the host by less than this share of the step, once that is launched, has next to no work queued: it
runs each kernel as it is launched. On recorded GPUs such steps idled for 23–93 %, those from 9.6 % on for 4–17 %."""


class Exposed(msgspec.Struct, frozen=True, gc=False):
    """What of a step's time the device felt, in ns."""

    input_wait_ns: int  # the part of the data wait in which the device was idle; the rest was hidden behind its work
    host_wait_ns: int | None  # idle while the host did something else after its last launch; None: none was seen
    transfer_ns: int
    compute_ns: int
    drained: bool = False  # the device had nothing left to do when the host asked for the next batch
    kept_up: bool = False  # the device ran each kernel as it was launched: see `KEPT_UP_RATIO`
    read_back: bool = False  # a result was read back from the device
    measured: bool = True  # False for an estimate by the steps that were measured
    comm_wait_ns: int | None = None  # the part of `compute_ns` that waited for other ranks; None: not measured

    def plus(self, other: Exposed) -> Exposed:
        """Return this piece of a step and a later one together."""
        return Exposed(
            self.input_wait_ns + other.input_wait_ns,
            sum_of_known(self.host_wait_ns, other.host_wait_ns),
            self.transfer_ns + other.transfer_ns,
            self.compute_ns + other.compute_ns,
            other.drained,
            other.kept_up,
            self.read_back or other.read_back,
            self.measured and other.measured,
            sum_of_known(self.comm_wait_ns, other.comm_wait_ns),
        )


def sum_of_known(*parts_ns: int | None) -> int | None:
    """Return the sum of those that are not None; None where all are."""
    known = [ns for ns in parts_ns if ns is not None]
    return sum(known) if known else None


class _Measured:
    """Sums over the steps that were measured, the last ones weighing most: what those left out are estimated by."""

    def __init__(self) -> None:
        self.steps = self.work_ns = self.transfer_ns = self.host_ns = self.drained = self.read_back = 0
        self.lags_ns = (0, 0)  # the longest lag of the device among the older pieces, and among the later ones
        self.comm_ns = self.comm_work_ns = 0  # waits for other ranks, and the `work_ns` of the pieces with them

    def add(self, exposed: Exposed, lag_ns: int, ends_step: bool) -> None:
        if self.steps >= _REMEMBERED:  # forget the older half
            sums = ("work_ns", "transfer_ns", "host_ns", "comm_ns", "comm_work_ns", "drained", "read_back")
            for name in ("steps", *sums):
                setattr(self, name, getattr(self, name) // 2)
            self.lags_ns = (self.lags_ns[1], 0)
        self.steps += ends_step
        self.work_ns += exposed.transfer_ns + exposed.compute_ns
        self.transfer_ns += exposed.transfer_ns
        self.host_ns += exposed.host_wait_ns or 0
        if exposed.comm_wait_ns is not None:
            self.comm_ns += exposed.comm_wait_ns
            self.comm_work_ns += exposed.transfer_ns + exposed.compute_ns
        self.drained += exposed.drained and ends_step
        self.read_back += exposed.read_back
        self.lags_ns = (self.lags_ns[0], max(self.lags_ns[1], lag_ns))


class DeviceBooking:
    """Lays pieces of steps, in order, into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._measured = _Measured()
        self._kept_up = False
        self._end_ns = 0  # when the device was done with the last piece, measured or estimated
        self._launch_seen = False
        self._running = COMPUTE  # what the device still works on when a piece begins: a phase, right after one

    def interrupted(self, running: str) -> None:
        """Something else than a step came last; the device may still work on that, which is `running`."""
        self._launch_seen = False
        self._running = running

    def book(
        self, begin_ns: int, end_ns: int, data_ns: int, between: str, times: DeviceTimes, ends_step: bool = True
    ) -> Exposed:
        """Book one piece: the host's begin, end and data wait, and the device's times for it.

        `between` is the state of time before `begin_ns` that nothing has claimed.
        """
        ledger = self._ledger
        batch_ns = begin_ns + data_ns
        running, self._running = self._running, COMPUTE
        gap_ns, host_wait_ns = times.gap_ns, times.host_wait_ns
        behind_ns = 0 if times.is_anchored else max(0, self._end_ns - times.reached_ns)
        if times.observed_ns is not None:
            behind_ns = min(behind_ns, max(0, times.observed_ns - times.done_ns))
        reached_ns, done_ns = times.reached_ns + behind_ns, times.done_ns + behind_ns
        if gap_ns is None:  # what ran before is not known: the wait may have been hidden
            ledger.book(between, batch_ns)
            gap_ns = input_wait = 0
        else:
            input_wait = min(gap_ns, data_ns)
            edge_ns = batch_ns - gap_ns if gap_ns else reached_ns
            if not self._end_ns:  # the first piece of all
                ledger.book(between, min(begin_ns, edge_ns))
            ledger.book(running, edge_ns - times.aside_ns)
            ledger.book(TRANSFER, edge_ns)
            if gap_ns:
                ledger.book(HOST_WAIT if self._launch_seen else between, batch_ns - input_wait)
                ledger.book(INPUT_WAIT, batch_ns)
            if self._launch_seen and gap_ns > input_wait:
                host_wait_ns = (host_wait_ns or 0) + gap_ns - input_wait
        ledger.book(COMPUTE, reached_ns)
        copied_ns = min(reached_ns + times.transfer_ns - times.aside_ns, done_ns)
        pause_ns = max(reached_ns, end_ns - (times.host_wait_ns or 0))
        late_ns = max(0, copied_ns - pause_ns) if times.host_wait_ns else 0  # copied when the host's pause was over
        ledger.book(TRANSFER, copied_ns - late_ns)
        worked_ns = end_ns - times.host_wait_ns if times.host_wait_ns else max(done_ns, end_ns)
        ledger.book(COMPUTE, worked_ns - (times.comm_ns or 0))
        ledger.book(COMM_WAIT, worked_ns)
        ledger.book(HOST_WAIT, end_ns if times.host_wait_ns else 0)
        ledger.book(TRANSFER, min(end_ns + late_ns, done_ns))
        ledger.book(COMPUTE, max(done_ns, end_ns))
        self._end_ns = max(done_ns, end_ns)
        self._launch_seen = times.host_wait_ns is not None
        if times.lag_ns is not None:
            self._kept_up = times.lag_ns < KEPT_UP_RATIO * max(1, times.done_ns - times.reached_ns)
        exposed = Exposed(
            input_wait,
            host_wait_ns,
            times.transfer_ns,
            times.compute_ns,
            done_ns - end_ns < _AT_ONCE_NS,
            self._kept_up,
            times.read_back,
            comm_wait_ns=times.comm_ns,
        )
        self._measured.add(exposed, self._end_ns - end_ns, ends_step)
        return exposed

    def estimate(self, begin_ns: int, end_ns: int, data_ns: int, between: str) -> Exposed:
        """Book a piece without device times, as queued work that takes the device as long as measured pieces did."""
        ledger = self._ledger
        ledger.book(between, begin_ns)
        self._running = COMPUTE
        measured, batch_ns = self._measured, begin_ns + data_ns
        input_ns = min(data_ns, max(0, batch_ns - self._end_ns))  # of the wait, what came after the piece before
        steps = max(1, measured.steps)
        host_ns = min(measured.host_ns // steps, end_ns - batch_ns)
        work_ns = measured.work_ns // steps
        busy_ns = end_ns - begin_ns - input_ns - host_ns
        transfer_ns = busy_ns * measured.transfer_ns // measured.work_ns if measured.work_ns else 0
        comm_ns = None
        if measured.comm_work_ns:
            comm_ns = min(busy_ns * measured.comm_ns // measured.comm_work_ns, busy_ns - transfer_ns)
        done_ns = max(self._end_ns, batch_ns) + work_ns + host_ns
        self._end_ns = min(max(done_ns, end_ns), end_ns + 3 * max(measured.lags_ns))
        exposed = Exposed(
            input_ns,
            host_ns,
            transfer_ns,
            busy_ns - transfer_ns,
            2 * measured.drained > measured.steps,
            self._kept_up,
            2 * measured.read_back > measured.steps,
            measured=False,
            comm_wait_ns=comm_ns,
        )
        ledger.book(COMPUTE, batch_ns - input_ns)
        ledger.book(INPUT_WAIT, batch_ns)
        # The copies and waits for other ranks belong wholly to this piece; part of its compute lies before the batch.
        for state, spent_ns in ((TRANSFER, transfer_ns), (HOST_WAIT, host_ns), (COMM_WAIT, comm_ns or 0)):
            ledger.book(state, min(ledger.watermark_ns + spent_ns, end_ns))
        ledger.book(COMPUTE, end_ns)
        return exposed
