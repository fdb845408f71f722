"""Turn a recorder's log into a ledger, step records and phases: the host timeline. No I/O, no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import msgspec

from gpuwatch.device import DeviceTimes
from gpuwatch.device_booking import DeviceBooking, Exposed
from gpuwatch.ledger import COMM_WAIT, COMPUTE, INPUT_WAIT, OTHER, STALLED, STARTUP, TRANSFER, Ledger, phase_state
from gpuwatch.recorder import AWAIT, COMM, DEVICE, ENTER, EXIT, SPAN, STEP, TOKENS
from gpuwatch.wire import STEP_BUCKETS_S

STALL_FLOOR_NS = 30_000_000_000
STALL_MEDIANS = 10
_MEDIAN_OF = 64
_BUCKETS_NS = tuple(int(bound * 1e9) for bound in STEP_BUCKETS_S)


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
    """The part of `compute_ns` that waited for other ranks' gradients; None where that was not measured."""

    @property
    def hidden_ns(self) -> int | None:
        """The part of the wait for data that the device did not feel: the head-room that is left."""
        return None if self.exposed is None else max(0, self.data_wait_ns - self.exposed.input_wait_ns)

    @property
    def total_ns(self) -> int:
        return self.data_wait_ns + self.transfer_ns + self.compute_ns


@dataclass(frozen=True)
class PhaseRecord:
    """A declared phase that began (`end_ns` None) or ended."""

    name: str
    start_ns: int
    end_ns: int | None


@dataclass
class _Carry:
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

    def waited(self, ns: int) -> None:
        self.open_comm_ns += ns
        self.comm_wait_ns = (self.comm_wait_ns or 0) + ns

    def add(self, begin: int, end: int, data: int, transfer: int) -> None:
        if self.start_ns is None:
            self.start_ns = begin
        self.data_ns += data
        self.transfer_ns += transfer
        self.total_ns += end - begin


_NOTHING = _Carry()


@dataclass
class _Level:
    name: str | None
    start_ns: int
    carry: _Carry


@dataclass
class Timeline:
    """The accounts of one watched process, kept by folding log entries in their order."""

    start_ns: int
    ledger: Ledger = field(init=False)
    steps: int = 0
    samples: int = 0
    samples_known: bool = False
    phases_ns: dict[str, int] = field(default_factory=lambda: {"data_wait": 0, "transfer": 0, "compute": 0})
    histogram: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    last_progress_ns: int = 0
    """End of the last thing that happened: a step, a phase's edge."""
    hidden_ns: int = 0
    """Data wait that was hidden behind the device's work, of `device_steps`."""
    device_steps: int = 0
    """Steps that the device's timeline measured."""
    tokens: int = 0
    tokens_known: bool = False
    comm_steps: int = 0
    """Steps whose wait for other ranks was measured."""

    drained_steps: int = 0
    """Of the `device_steps` those at whose end the device had nothing left to do."""
    read_back_steps: int = 0
    """Of the `device_steps` those in which a result was read back from the device."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.start_ns)
        self.last_progress_ns = self.start_ns
        self._levels: list[_Level] = []
        self._carry = _Carry()
        self._recent_ns: deque[int] = deque(maxlen=_MEDIAN_OF)
        self._held: deque[tuple[Any, ...]] = deque()
        """Entries from the oldest piece on whose device times are not known yet."""
        self._told: deque[DeviceTimes | None] = deque()
        self._on_device = DeviceBooking(self.ledger)

    def fold(self, entries: Iterable[tuple[Any, ...]]) -> tuple[list[StepRecord], list[PhaseRecord]]:
        """Book log entries; return the training steps and the phase edges among them, in order.

        What follows a piece that the device has not finished is held until its times are told.
        """
        steps: list[StepRecord] = []
        phases: list[PhaseRecord] = []
        entries = list(entries)
        at = 0
        while at < len(entries):
            entry = entries[at]
            if entry[0] == STEP and (whole := self._book_whole_steps(entries, at, steps)):
                at += whole
                continue
            at += 1
            if entry[0] == DEVICE:
                self._told.append(entry[1])
            elif self._held or entry[0] == AWAIT:
                self._held.append(entry)
            else:
                self._book(entry, None, steps, phases)
        held = self._held
        while held:
            if held[0][0] != AWAIT:
                self._book(held.popleft(), None, steps, phases)
            elif self._told and len(held) > 1:
                held.popleft()
                self._book(held.popleft(), self._told.popleft(), steps, phases)
            else:
                break
        return steps, phases

    def _book_whole_steps(self, entries: list[tuple[Any, ...]], at: int, steps: list[StepRecord]) -> int:
        """Book the run of steps from `at` on that nothing interrupts; return how many, 0 where the next one is not of that kind.

        What `_book` does for any entry, at a tenth of its cost: the background thread takes the interpreter from the training thread meanwhile.
        """
        if not self.steps or self._levels or self._held or self._carry != _NOTHING or self._on_device.tail():
            return 0
        ledger, first = self.ledger, len(steps)
        made, bucket, histogram = steps.append, bisect_left, self.histogram
        watermark = ledger.watermark_ns
        if watermark < self.last_progress_ns:
            return 0
        between = waited = copied = computed = samples_seen = 0
        for index in range(at, len(entries)):
            entry = entries[index]
            if entry[0] != STEP:
                break
            _, begin, end, data, transfer, samples, epoch_start = entry
            compute = end - begin - data - transfer
            if begin < watermark or data < 0 or transfer < 0 or compute < 0:
                break
            between += begin - watermark
            watermark = end
            waited += data
            copied += transfer
            computed += compute
            if samples >= 0:
                samples_seen += samples
                self.samples_known = True
            histogram[bucket(_BUCKETS_NS, end - begin)] += 1
            made(StepRecord(begin, data, transfer, compute, samples, epoch_start))
        count = len(steps) - first
        if count:
            self.steps += count
            self.samples += samples_seen
            for phase, spent in (("data_wait", waited), ("transfer", copied), ("compute", computed)):
                self.phases_ns[phase] += spent
            ledger.book_parts({OTHER: between, INPUT_WAIT: waited, TRANSFER: copied, COMPUTE: computed})
            self.last_progress_ns = watermark
            self._recent_ns.extend(step.total_ns for step in steps[max(first, len(steps) - _MEDIAN_OF) :])
        return count

    def _book(
        self,
        entry: tuple[Any, ...],
        times: DeviceTimes | None,
        steps: list[StepRecord],
        phases: list[PhaseRecord],
    ) -> None:
        kind = entry[0]
        if kind == TOKENS:
            self._carry.tokens = (self._carry.tokens or 0) + entry[1]
            return
        if kind == COMM:
            self._carry.waited(entry[2] - entry[1])
            return
        if times is None:
            self._on_device.settle()
        if kind == ENTER:
            self._enter(entry[1], entry[2], phases)
        elif kind == EXIT:
            self._exit(entry[1], phases)
        elif kind == SPAN:
            _, begin, end, state = entry
            self.ledger.book(self._between_state, begin)
            self.ledger.book(self._phase_state or state, end)
            self._carry = _Carry()
            self.last_progress_ns = max(self.last_progress_ns, end)
        else:
            record = self._piece(*entry, times=times)
            if record is not None:
                steps.append(record)

    def held_tail(self) -> tuple[list[tuple[str, int]], str]:
        """Return how time after the ledger looks now, as (state, until) in order, and the state of what follows it.

        A held piece is one that the device still works on; before it comes what the host did after the last launch of the
        piece before.
        """
        parts: list[tuple[str, int]] = self._on_device.tail()
        names = [level.name for level in self._levels]

        def between() -> str:
            name = next((name for name in reversed(names) if name is not None), None)
            return OTHER if name is None else phase_state(name)

        for entry in self._held:
            if entry[0] == ENTER:
                parts.append((between(), entry[1]))
                names.append(entry[2])
            elif entry[0] == EXIT:
                parts.append((between(), entry[1]))
                names.pop()
            elif entry[0] == SPAN:
                parts.append((entry[3] if between() == OTHER else between(), entry[2]))
            elif entry[0] not in (AWAIT, TOKENS):
                parts.append((COMPUTE if between() == OTHER else between(), entry[2]))
        return parts, between() if self._held else self._between_state

    @property
    def holds(self) -> bool:
        """Whether entries wait for the device."""
        return bool(self._held)

    def book_certain(self, now_ns: int, in_step: bool) -> None:
        """Book what is certain already although it has not ended: an open phase, or the start-up before any step."""
        if in_step or self._held:
            return
        if self._phase_state is not None:
            self.ledger.book(self._phase_state, now_ns)
        elif not self.steps and not self._levels:
            self.ledger.book(STARTUP, now_ns)

    def book_stall(self, now_ns: int) -> bool:
        """Book the open time as stalled when the run is past its threshold; return whether it is stalled."""
        if not self.is_stalled(now_ns):
            return False
        self.ledger.book(STALLED, now_ns)
        return True

    def is_stalled(self, now_ns: int) -> bool:
        if not self.steps or self._phase_state is not None or any(entry[0] == ENTER for entry in self._held):
            return False
        return now_ns - self.last_progress_ns > max(STALL_FLOOR_NS, STALL_MEDIANS * self.median_step_ns)

    @property
    def median_step_ns(self) -> int:
        """Median of the last 64 steps, 0 before the first."""
        return int(median(self._recent_ns)) if self._recent_ns else 0

    def state_between(self) -> str:
        """Return the state of time in which no step is open."""
        return self._between_state

    @property
    def open_phase(self) -> str | None:
        return next((level.name for level in reversed(self._levels) if level.name is not None), None)

    @property
    def _phase_state(self) -> str | None:
        name = self.open_phase
        return None if name is None else phase_state(name)

    @property
    def _between_state(self) -> str:
        return self._phase_state or (OTHER if self.steps else STARTUP)

    def _enter(self, at_ns: int, name: str | None, phases: list[PhaseRecord]) -> None:
        self.ledger.book(self._between_state, at_ns)
        self._levels.append(_Level(name, at_ns, self._carry))
        self._carry = _Carry()
        self.last_progress_ns = at_ns
        if name is not None:
            phases.append(PhaseRecord(name, at_ns, None))

    def _exit(self, at_ns: int, phases: list[PhaseRecord]) -> None:
        self.ledger.book(self._between_state, at_ns)
        level = self._levels.pop()
        self._carry = level.carry
        self.last_progress_ns = at_ns
        if level.name is not None:
            phases.append(PhaseRecord(level.name, level.start_ns, at_ns))

    def _piece(
        self,
        kind: int,
        begin: int,
        end: int,
        data: int,
        transfer: int,
        samples: int,
        epoch_start: bool,
        *,
        times: DeviceTimes | None,
    ) -> StepRecord | None:
        ledger, phase = self.ledger, self._phase_state
        # What a user's contexts say may overlap (`data()` around a whole `step()`): no moment is counted in two steps.
        begin = max(begin, self.last_progress_ns)
        end = max(begin, end)
        data = min(data, end - begin)
        transfer = min(transfer, end - begin - data)
        comm, self._carry.open_comm_ns = min(self._carry.open_comm_ns, end - begin - data - transfer), 0
        if phase is not None:
            ledger.book(self._between_state, begin)
            ledger.book(phase, end)
        elif times is not None:
            exposed = self._on_device.book(begin, end, data, self._between_state, times)
            self._carry.exposed = exposed if self._carry.exposed is None else self._carry.exposed.plus(exposed)
        else:
            ledger.book(self._between_state, begin)
            ledger.book(INPUT_WAIT, begin + data)
            ledger.book(TRANSFER, begin + data + transfer)
            ledger.book(COMPUTE, end - comm)
            ledger.book(COMM_WAIT, end)
        self.last_progress_ns = end
        self._carry.add(begin, end, data, transfer)
        if kind != STEP:
            return None
        carry, self._carry = self._carry, _Carry()
        if phase is not None or carry.start_ns is None:
            return None
        compute = max(0, carry.total_ns - carry.data_ns - carry.transfer_ns)
        record = StepRecord(
            carry.start_ns,
            carry.data_ns,
            carry.transfer_ns,
            compute,
            samples,
            epoch_start,
            carry.exposed,
            carry.tokens,
            carry.comm_wait_ns,
        )
        self._count(record)
        return record

    def _count(self, record: StepRecord) -> None:
        self.steps += 1
        if record.samples >= 0:
            self.samples += record.samples
            self.samples_known = True
        if record.tokens is not None:
            self.tokens += record.tokens
            self.tokens_known = True
        if record.comm_wait_ns is not None:
            self.comm_steps += 1
        self.phases_ns["data_wait"] += record.data_wait_ns
        self.phases_ns["transfer"] += record.transfer_ns
        self.phases_ns["compute"] += record.compute_ns
        if record.hidden_ns is not None:
            self.device_steps += 1
            self.hidden_ns += record.hidden_ns
        if record.exposed is not None:
            self.drained_steps += record.exposed.drained
            self.read_back_steps += record.exposed.read_back
        self.histogram[bisect_left(_BUCKETS_NS, record.total_ns)] += 1
        self._recent_ns.append(record.total_ns)
