"""Turn a recorder's log into a ledger and step records: the host timeline. No I/O, no clock."""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from gpuwatch.ledger import states
from gpuwatch.ledger.device_booking import DeviceBooking, sum_of_known
from gpuwatch.ledger.events import COMM, ENTER, EXIT, FAST_STEP, PART, REST, SECTION, SPAN, STEP, TOKENS, UNVERIFIED
from gpuwatch.ledger.step_records import StepCounts, StepRecord

STALL_FLOOR_NS = 30_000_000_000
STILL_NS = 10_000_000_000
STALL_MEDIANS = 10
_NOTHING = StepRecord()
_ON_HOST = ((), (None,))


class Timeline:
    """The accounts of one watched process, kept by applying log entries in their order."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = self.last_progress_ns = start_ns  # the second: when a step or a phase's edge was last
        self.ledger = states.Ledger(start_ns)
        self.counts = StepCounts()
        # What is to be booked next. Each entry is taken once, whatever a signal handler raises meanwhile.
        self.entries: list[tuple[Any, ...]] = []
        self._at = 0  # how many of `entries` are booked
        self._made: list[StepRecord] = []
        # Open phases and nested loops (None), with the steps around them.
        self._levels: list[tuple[str | None, StepRecord, dict[str, int] | None]] = []
        self._step = StepRecord()  # the step whose pieces come now
        # Its compute so far by section; None: not measured. No part of the record, as many of those are kept.
        self._sections_ns: dict[str, int] | None = {}
        # Of the piece that comes next: its waits for other ranks, and where sections begin, by the host's clock.
        self._comm_ns, self._marks = 0, list[tuple[str, int]]()
        # Entries from the oldest piece on that the device has not finished: they are booked once its times are known.
        self._held: deque[tuple[Any, ...]] = deque()
        self._resting = False
        self._other_phases_ns: dict[str, int] = {}
        self._saved_at = -1  # number of steps at the last save
        self._left = False  # the training loop has ended or was left, and no step has followed
        self._on_device = DeviceBooking(self.ledger)

    @property
    def unread_steps(self) -> int:
        """How many steps the device has still to finish."""
        return sum(entry[0] == STEP for entry in tuple(self._held))

    def apply(self, entries: Iterable[tuple[Any, ...]] = ()) -> list[StepRecord]:
        """Book log entries; return their training steps. What follows a piece the device has not finished is held."""
        self.entries.extend(entries)
        entries, held, steps = self.entries, self._held, self._made
        while self._at < len(entries):
            entry = entries[self._at]
            if entry[0] in (STEP, FAST_STEP) and (whole := self._book_whole_steps(entries, self._at, steps)):
                self._at += whole
                continue
            self._at += 1
            if entry[0] == FAST_STEP:
                _, begin, end, fed, transfer, samples = entry
                entry = STEP, begin, end, fed - begin, transfer, samples, False
                if not fed:  # a signal's exception came just before the batch was noted: it never reached the loop
                    entry = SPAN, begin, end, states.INPUT_WAIT, 0, False
            if held or _waits(entry):
                held.append(entry)
            else:
                self._book(entry, steps)
        while held and not _waits(held[0]):
            self._book(held.popleft(), steps)
        self.entries, self._at, self._made = [], 0, []
        return steps

    def _book_whole_steps(self, entries: list[tuple[Any, ...]], at: int, steps: list[StepRecord]) -> int:
        """Book the uninterrupted run of steps from `at` on, at a tenth of the cost of `_book`; return how many."""
        watermark, counts, whole = self.ledger.watermark_ns, self.counts, list[StepRecord]()
        if not counts.steps or self._levels or self._held or self._resting or self._marks or self._step != _NOTHING:
            return 0
        if watermark < self.last_progress_ns:
            return 0
        between = waited = copied = computed = 0
        for entry in islice(entries, at, None):
            if entry[0] == FAST_STEP:
                _, begin, end, fed, transfer, samples = entry
                data, epoch_start = fed - begin, False
            elif entry[0] == STEP and entry[7:] in _ON_HOST:
                _, begin, end, data, transfer, samples, epoch_start = entry[:7]
            else:
                break
            compute = end - begin - data - transfer
            if begin < watermark or data < 0 or transfer < 0 or compute < 0:
                break
            between += begin - watermark
            watermark = end
            waited += data
            copied += transfer
            computed += compute
            whole.append(StepRecord(begin, data, transfer, compute, samples, epoch_start))
        if whole:
            steps += whole
            counts.add_plain(whole, waited, copied, computed)
            self.ledger.book_parts(
                {states.OTHER: between, states.INPUT_WAIT: waited, states.TRANSFER: copied, states.COMPUTE: computed}
            )
            self.last_progress_ns, self._left = watermark, False
        return len(whole)

    def _book(self, entry: tuple[Any, ...], steps: list[StepRecord]) -> None:
        kind = entry[0]
        if kind == TOKENS:
            self._step.tokens = (self._step.tokens or 0) + entry[1]
        elif kind == COMM:
            self._comm_ns += entry[2] - entry[1]
            self._step.comm_wait_ns = (self._step.comm_wait_ns or 0) + entry[2] - entry[1]
        elif kind == SECTION:
            if len(self._marks) <= states.MOST_MARKS:
                self._marks.append((entry[1], entry[2]))
        elif kind == UNVERIFIED:
            self._step.verified = False
        elif kind == REST:
            self._resting = entry[1]
        elif kind == ENTER:
            self._enter(entry[1], entry[2])
        elif kind == EXIT:
            self._exit(entry[1])
        elif kind == SPAN:
            _, begin, end, state, waited, at_end = entry
            if states.EVAL in (state, self._phase_state):
                self.counts.eval_wait_ns += end - begin if state == states.INPUT_WAIT else waited
            elif at_end and self._phase_state is None:
                self.counts.ends_ns += end - begin
            self._book_between(begin)
            self._book_between(end, state)
            self._on_device.interrupted(states.COMPUTE)
            self._step, self._sections_ns, self._comm_ns, self._marks = StepRecord(), {}, 0, []
            self._left = state == states.OTHER and not self._levels
            self.last_progress_ns = max(self.last_progress_ns, end)
        elif (record := self._book_piece(entry)) is not None:
            steps.append(record)

    def held_tail(self) -> tuple[list[tuple[str, int]], str]:
        """Return the time after the ledger that held pieces take, as (state, until), and the state of what follows."""
        if not self._held:
            return [], self._between_state
        parts: list[tuple[str, int]] = []
        names = [name for name, *_ in self._levels]
        state = _state_in(names)
        for kind, *entry in self._held:
            if kind in (ENTER, EXIT):
                parts.append((state, entry[0]))
                names = [*names, entry[1]] if kind == ENTER else names[:-1]
                state = _state_in(names)
            elif kind in (STEP, PART, SPAN):
                doing = entry[2] if kind == SPAN else states.COMPUTE
                parts.append((doing if state == states.OTHER else state, entry[1]))
        return parts, state

    def book_certain(self, now_ns: int, in_step: bool) -> None:
        """Book what is certain already although it has not ended: an open phase, or the start-up before any step."""
        if in_step or self._held:
            return
        if self._phase_state is not None:
            self._book_between(now_ns)
        elif not self.counts.steps and not self._levels:
            self.ledger.book(states.STARTUP, now_ns)

    def book_quiet(self, now_ns: int, step_ns: int | None = None) -> str | None:
        """Book the open time as what `quiet` returns, where that is not None; return the state."""
        found = self.quiet(now_ns, step_ns)
        if found is None:
            return None
        for state, until_ns in self.held_tail()[0]:  # meanwhile the device is not polled for steps that have ended
            self.ledger.book(state, until_ns)
        if self._is_left:
            self.ledger.book(states.OTHER, found[1])
        self.ledger.book(found[0], now_ns)
        return found[0]

    def quiet(self, now_ns: int, step_ns: int | None = None) -> tuple[str, int] | None:
        """Return state and start of time without progress: `stalled`, or after a loop `other`; None if too short."""
        if not self.counts.steps or self._phase_state is not None or any(entry[0] == ENTER for entry in self._held):
            return None
        held, is_left = self.held_tail()[0], self._is_left
        since_ns = max(self.last_progress_ns, held[-1][1]) if held else self.last_progress_ns
        if is_left and step_ns is not None:  # the first batch of another pass does not come
            since_ns = max(since_ns, step_ns)
        if now_ns - since_ns <= max(STALL_FLOOR_NS, STALL_MEDIANS * self.counts.median_ns):
            return None
        return states.OTHER if is_left and step_ns is None else states.STALLED, since_ns

    def is_still(self, now_ns: int) -> bool:
        """Whether nothing has moved for a time, less than `quiet` needs, in a phase or not, once the loop has begun."""
        least_ns = max(STILL_NS, STALL_MEDIANS * self.counts.median_ns)
        return self.counts.steps > 0 and now_ns - self.last_progress_ns > least_ns

    @property
    def _is_left(self) -> bool:
        """Whether the training loop has ended or was left, by what is booked and what is held."""
        last = next((entry for entry in reversed(self._held) if entry[0] in (STEP, PART, SPAN)), None)
        return self._left if last is None else last[0] == SPAN and last[3] == states.OTHER and not self._levels

    @property
    def open_phase(self) -> str | None:
        return next((name for name, *_ in reversed(self._levels) if name is not None), None)

    @property
    def excluded_ns(self) -> int:
        """Return the time so far in evaluations, checkpoints and compilations, and between a notebook's cells."""
        in_phases_ns = sum(self.ledger.totals_ns[state] for state in (states.EVAL, states.CHECKPOINT, states.COMPILE))
        return in_phases_ns + self.counts.declared_ns.get(states.PAUSE, 0)

    @property
    def in_phases_ns(self) -> int:
        """Return the time in declared phases so far, evaluations and start-up among them."""
        booked_ns, declared_ns = self.ledger.totals_ns, [*self.counts.declared_ns.values()]
        return sum(booked_ns[state] for state in states.PHASE_STATES) + sum(declared_ns)

    @property
    def _phase_state(self) -> str | None:
        name = self.open_phase
        return None if name is None else states.phase_state(name)

    @property
    def _between_state(self) -> str:
        return self._phase_state or (states.OTHER if self.counts.steps else states.STARTUP)

    def _book_between(self, until_ns: int, state: str | None = None) -> None:
        """Book the time up to then under the open phase, else under `state`, else as time between steps."""
        name = self.open_phase
        state = state or self._between_state if name is None else states.phase_state(name)
        booked_ns = self.ledger.book(state, until_ns)
        if booked_ns and name is not None and state == states.OTHER:
            states.add_declared(self.counts.declared_ns, name, booked_ns, self._other_phases_ns)

    def _enter(self, at_ns: int, name: str | None) -> None:
        self._book_between(at_ns)
        self._on_device.interrupted(states.COMPUTE)
        if name == states.CHECKPOINT and self.counts.steps != self._saved_at:  # else one more file of that save
            self.counts.saves, self._saved_at = self.counts.saves + 1, self.counts.steps
        self._levels.append((name, self._step, self._sections_ns))
        self._step, self._sections_ns = StepRecord(), {}
        self.last_progress_ns = at_ns

    def _exit(self, at_ns: int) -> None:
        self._book_between(at_ns)
        self._on_device.interrupted(self._phase_state or states.COMPUTE)
        if not self._levels:  # what entered it was lost to a signal handler's exception
            return
        _, self._step, self._sections_ns = self._levels.pop()
        self.last_progress_ns = at_ns

    def _book_piece(self, entry: tuple[Any, ...]) -> StepRecord | None:
        """Book a step or a part of one; return the training step that it ends."""
        kind, begin, end, data, transfer, samples, epoch_start, piece = (*entry, None)[:8]
        ledger, phase, step = self.ledger, self._phase_state, self._step
        times = None if piece is None else piece.times
        # What a user's contexts say may overlap (`data()` around a whole `step()`): no moment is counted in two steps.
        begin = max(begin, self.last_progress_ns)
        end = max(begin, end)
        data = min(data, end - begin)
        transfer = min(transfer, end - begin - data)
        compute = end - begin - data - transfer
        comm, self._comm_ns = min(self._comm_ns, compute), 0
        if phase is not None:
            self._book_between(end)
            self.counts.eval_wait_ns += data if phase == states.EVAL else 0
        elif times is not None or self._resting:
            where = begin, end, data, self._between_state
            device = self._on_device
            exposed = device.estimate(*where) if times is None else device.book(*where, times, kind == STEP)
            step.comm_wait_ns = sum_of_known(step.comm_wait_ns, exposed.comm_wait_ns)
            step.exposed = exposed if step.exposed is None else step.exposed.plus(exposed)
        else:
            ledger.book(self._between_state, begin)
            ledger.book(states.INPUT_WAIT, begin + data)
            ledger.book(states.TRANSFER, begin + data + transfer)
            ledger.book(states.COMPUTE, end - comm)
            ledger.book(states.COMM_WAIT, end)
        sections = None if times is None else times.sections_ns
        if self._marks:
            sections = states.sections_ns(self._marks, lambda at, to: to - at, compute)
        before, self._sections_ns, self._marks = self._sections_ns, None, []
        if before is not None and sections is not None:
            self._sections_ns = Counter(before) + Counter(sections)
        self.last_progress_ns, self._left = end, False
        if step.start_ns < 0:  # this is its first piece
            step.start_ns = begin
            step.excluded_ns = -1 if kind == STEP else self.excluded_ns
        step.data_wait_ns += data
        step.transfer_ns += transfer
        step.compute_ns += compute
        if kind != STEP:
            return None
        whole_ns, self._sections_ns, self._step = self._sections_ns, {}, StepRecord()
        if phase is not None:
            return None
        step.samples, step.epoch_start = samples, epoch_start
        if whole_ns and states.BACKWARD in whole_ns and self.counts.steps:  # the first one warms up
            self.counts.breakdown_ns.update(whole_ns)
        self.counts.add(step)
        return step


def _state_in(names: list[str | None]) -> str:
    """Return the state of time between steps within these phases and nested loops (None), outermost first."""
    return states.phase_state(next((name for name in reversed(names) if name is not None), ""))


def _waits(entry: tuple[Any, ...]) -> bool:
    """Whether the device has still to finish the piece that this entry describes."""
    piece = entry[7] if entry[0] in (STEP, PART) and len(entry) > 7 else None
    return piece is not None and piece.times is None and not piece.is_lost
