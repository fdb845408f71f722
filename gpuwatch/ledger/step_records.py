"""Steps, whole ones and what is known of an incomplete one, and what all steps add up to. Times in ns."""

from collections import Counter, deque

import msgspec

from gpuwatch.ledger.device_booking import Exposed
from gpuwatch.ledger.events import UNKNOWN_SAMPLES
from gpuwatch.ledger.states import COMM_WAIT, COMPUTE, HOST_WAIT, INPUT_WAIT, TRANSFER, median
from gpuwatch.wire import Counters

MEDIAN_OF = 64
SLOW_FIRST_MEDIANS, SLOW_FIRST_AMONG = 5, 5


class StepRecord(msgspec.Struct, gc=False):
    """One training step on the host's clock, or its pieces so far; pauses for phases inside it are left out."""

    start_ns: int = -1  # -1: none of it is known
    data_wait_ns: int = 0
    transfer_ns: int = 0
    compute_ns: int = 0
    samples: int = UNKNOWN_SAMPLES
    epoch_start: bool = False
    exposed: Exposed | None = None  # its exposed times; None where the device's timeline did not measure it
    tokens: int | None = None  # None where they are not counted
    comm_wait_ns: int | None = None  # the part of the compute that waited for other ranks; None: not measured
    verified: bool = True  # False: another device or stream worked, so how much of the wait was exposed is not certain
    excluded_ns: int = -1  # `Timeline.excluded_ns` when it began; -1: it is of one piece, with no phase inside

    @property
    def hidden_ns(self) -> int | None:
        """The part of the wait for data that was hidden behind the device's work: the head-room that is left."""
        return None if self.exposed is None else max(0, self.data_wait_ns - self.exposed.input_wait_ns)

    @property
    def total_ns(self) -> int:
        return self.data_wait_ns + self.transfer_ns + self.compute_ns

    def states_ns(self) -> dict[str, int]:
        """Return its time by state, by the device's timeline where that measured it."""
        of, comm_ns = self.exposed or self, self.comm_wait_ns or 0
        parts = {TRANSFER: of.transfer_ns, COMPUTE: of.compute_ns - comm_ns, COMM_WAIT: comm_ns}
        if self.exposed is None:
            return {INPUT_WAIT: self.data_wait_ns, **parts}
        return {INPUT_WAIT: self.exposed.input_wait_ns, **parts, HOST_WAIT: self.exposed.host_wait_ns or 0}


class StepCounts(Counters):
    """The counters of all training steps, and the last steps' times. Overhead and fetches are counted elsewhere."""

    phases_ns: dict[str, int] = msgspec.field(default_factory=lambda: {"data_wait": 0, "transfer": 0, "compute": 0})
    breakdown_ns: Counter[str] = msgspec.field(default_factory=Counter)
    exposed_steps: int = 0  # the `device_steps`, and those at rest that were estimated from them
    first: StepRecord | None = None  # the run's first step
    ends_ns: int = 0  # waits that brought no batch, at the end of a pass: while its workers end, for example
    recent_ns: deque[int] = msgspec.field(default_factory=lambda: deque(maxlen=MEDIAN_OF))

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.first = self.first or record
        self.add_plain([record], record.data_wait_ns, record.transfer_ns, record.compute_ns)
        if record.tokens is not None:
            self.tokens = max(0, self.tokens) + record.tokens
        self.comm_steps += record.comm_wait_ns is not None
        self.unverified_steps += not record.verified
        self.exposed_steps += record.exposed is not None
        if record.exposed is not None and record.exposed.measured:
            self.device_steps += 1
            self.drained_steps += record.exposed.drained
            self.kept_up_steps += record.exposed.kept_up
            self.read_back_steps += record.exposed.read_back
            self.hidden_ns += record.hidden_ns or 0

    def add_plain(self, records: list[StepRecord], waited_ns: int, copied_ns: int, computed_ns: int) -> None:
        """Count steps by the host's clock, given the sums of their parts."""
        self.steps += len(records)
        known = [record.samples for record in records if record.samples >= 0]
        if known:
            self.samples = max(0, self.samples) + sum(known)
        for phase, spent_ns in (("data_wait", waited_ns), ("transfer", copied_ns), ("compute", computed_ns)):
            self.phases_ns[phase] += spent_ns
        self.recent_ns.extend(record.total_ns for record in records[-MEDIAN_OF:])

    @property
    def median_ns(self) -> int:
        """Median of the last 64 steps, 0 before the first."""
        return int(median(self.recent_ns)) if self.recent_ns else 0

    @property
    def slow_first(self) -> StepRecord | None:
        """The first step, if far slower (it compiles, tunes, loads libraries) and enough others followed; else None."""
        first = self.first
        if first is None or self.steps < SLOW_FIRST_AMONG or first.total_ns < SLOW_FIRST_MEDIANS * self.median_ns:
            return None
        return first

    @property
    def total_ns(self) -> int:
        """Time in training steps, by the host's clock."""
        return sum(self.phases_ns.values())
