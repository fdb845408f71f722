"""A run's step records: the last minute of steps as columns, and its states as segments in time (for shared GPUs).

Pure arithmetic; times in ns of the agent's monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from msgspec.structs import astuple

from gpuwatch import wire
from gpuwatch.diagnosis.window import StepColumns
from gpuwatch.ledger.states import COMM_WAIT, COMPUTE, HOST_WAIT, INPUT_WAIT, RUN_STATES, TRANSFER

KEPT = 1200  # steps kept of one run: a minute at 20 per second, less time of a faster run
KEPT_OF_ALL = 96_000  # steps kept of all runs together: beyond 80 runs each has fewer
_ROW = wire.STEP_COLUMNS
_NEEDED = frozenset(_ROW[:4])


class RecentColumns(StepColumns, frozen=True):
    """Steps with their ends, samples and waits for other ranks; columns of equal length, oldest first."""

    end_ns: Sequence[int] = ()  # on the agent's clock
    samples: Sequence[int] = ()  # -1: not known
    comm_wait_ns: Sequence[int] = ()  # part of the compute time spent waiting for other ranks; -1: not measured

    @property
    def last_end_ns(self) -> int | None:
        return self.end_ns[-1] if self.end_ns else None

    def followed_by(self, later: RecentColumns, since_ns: int = 0, most: int = KEPT) -> RecentColumns:
        """Return these and a later message's steps since then, the last `most`. Former results are changed in place."""
        columns = [each if isinstance(each, list) else [*each] for each in astuple(self)]
        for column, new in zip(columns, astuple(later), strict=True):
            column.extend(new)
        found = RecentColumns(*columns)
        old = max(0, bisect_left(found.end_ns, since_ns), len(found) - most)
        for column in columns:
            del column[:old]
        return found


def _rows(packed: Mapping[str, bytes]) -> Iterable[tuple[int, ...]]:
    """Return the steps in a message's columns, each with its values in the order of `_ROW`; none of incomplete ones."""
    if not packed.keys() >= _NEEDED:
        return ()
    missing = wire.pack([wire.MISSING] * wire.step_count(packed))
    return zip(*(wire.unpack(packed.get(name, missing)) for name in _ROW), strict=True)


def read_columns(packed: Mapping[str, bytes], offset_ns: int) -> RecentColumns:
    """Return a message's steps, by the device's timeline where that measured them; none of incomplete columns."""
    steps = []
    for start, wait, copy, compute, samples, first, felt, host_wait, device_copy, device_compute, comm in _rows(packed):
        end, hidden = start + wait + copy + compute + offset_ns, 0
        if felt >= 0 and device_copy >= 0 and device_compute >= 0:  # else the host's timeline is complete
            hidden, wait, copy = max(0, wait - felt), felt, device_copy
            compute = device_compute + max(0, host_wait)
        steps.append((wait / 1e9, copy / 1e9, compute / 1e9, first == 1, hidden / 1e9, end, samples, comm))
    return RecentColumns(*zip(*steps, strict=True))


Segment = tuple[int, int, str]  # (begin, end, state)

_NEVER_NS = 1 << 63
_SHORT_NS = 1_000_000_000
_KEPT = 128
"""Stretches: a minute at two messages per second. Older ones are joined: their sums stay, their order is lost."""
KEPT_BYTES, KEPT_BYTES_OF_ALL = 128 << 10, 10 << 20
"""Of step records, of a run and of all runs; older stretches are without: their phases are in RUN_STATES order."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The time that one message added to a ledger; the parts' sum is end - begin."""

    begin_ns: int
    end_ns: int
    parts_ns: Mapping[str, int]
    columns: Mapping[str, bytes] | None = None  # the message's step records, which place the steps' phases in time
    offset_ns: int = 0  # the agent's clock minus that of the records


def arrange(stretch: Stretch, recorded: bool = True) -> list[Segment]:
    """Return a stretch's states in time: steps at their records' times, the rest in the gaps, in order of RUN_STATES.

    Each state gets exactly its part, even where records contradict that. All are in that order if `recorded` is False.
    """
    left = {state: stretch.parts_ns[state] for state in RUN_STATES if stretch.parts_ns.get(state, 0) > 0}
    if len(left) == 1:
        return [(stretch.begin_ns, stretch.end_ns, next(iter(left)))]
    placed: list[Segment] = []
    at_ns = stretch.begin_ns
    for begin_ns, end_ns, state in _recorded(stretch) if recorded else ():
        begin_ns = max(begin_ns, at_ns)
        end_ns = min(end_ns, stretch.end_ns, begin_ns + left.get(state, 0))
        if end_ns > begin_ns:
            placed.append((begin_ns, end_ns, state))
            left[state] -= end_ns - begin_ns
            at_ns = end_ns
    return list(_fill_gaps(stretch, placed, left))


def _fill_gaps(stretch: Stretch, placed: list[Segment], left: dict[str, int]) -> Iterator[Segment]:
    at_ns = stretch.begin_ns
    for begin_ns, end_ns, state in (*placed, (stretch.end_ns, stretch.end_ns, "")):
        for filler in left:
            if (ns := min(left[filler], begin_ns - at_ns)) > 0:
                yield at_ns, at_ns + ns, filler
                left[filler] -= ns
                at_ns += ns
        if state:
            yield begin_ns, end_ns, state
        at_ns = end_ns


def _recorded(stretch: Stretch) -> Iterator[Segment]:
    """Yield the phases of the recorded steps, by the device's timeline where it measured them, else by the host's."""
    rows = _rows(stretch.columns or {})
    for start, wait, copy, compute, _, _, felt, host_wait, device_copy, device_compute, comm in rows:
        batch = start + stretch.offset_ns + wait
        if min(felt, device_copy, device_compute) >= 0:
            wait, copy, compute = felt, device_copy, device_compute
            yield batch - wait - max(0, host_wait), batch - wait, HOST_WAIT
        copied, done = batch + copy, batch + copy + compute
        yield batch - wait, batch, INPUT_WAIT
        yield batch, copied, TRANSFER
        yield copied, done - max(0, comm), COMPUTE
        yield done - max(0, comm), done, COMM_WAIT


def parts_of(segments: list[Segment]) -> dict[str, int]:
    """Return the time of each state, in ns."""
    parts: dict[str, int] = {}
    for begin_ns, end_ns, state in segments:
        parts[state] = parts.get(state, 0) + end_ns - begin_ns
    return parts


class Trace:
    """A run's stretches, oldest first, without the time between two of its processes."""

    def __init__(self) -> None:
        self._stretches: deque[Stretch] = deque()
        self._recorded: deque[int] = deque()  # bytes of the columns of the last stretches, which alone have any
        self.most_bytes = KEPT_BYTES

    def add(self, stretch: Stretch) -> None:
        """Append a stretch; past `_KEPT` the two oldest are joined."""
        if stretch.end_ns <= stretch.begin_ns:
            return
        self._stretches.append(stretch)
        self._recorded.append(sum(map(len, (stretch.columns or {}).values())))
        if len(self._recorded) > len(self._stretches):
            self._recorded.popleft()
        while sum(self._recorded) > self.most_bytes:
            self._recorded.popleft()
            place = len(self._stretches) - 1 - len(self._recorded)
            self._stretches[place] = replace(self._stretches[place], columns=None)
        if len(self._stretches) > _KEPT:
            one, two = self._stretches.popleft(), self._stretches.popleft()
            if one.end_ns != two.begin_ns:  # a gap between them: the older one is dropped
                self._stretches.appendleft(two)
                return
            parts = Counter(one.parts_ns) + Counter(two.parts_ns)
            self._stretches.appendleft(Stretch(one.begin_ns, two.end_ns, parts))

    def begin_ns(self) -> int | None:
        """Return when it begins; None while it is empty."""
        return self._stretches[0].begin_ns if self._stretches else None

    def segments(self, after_ns: int, until_ns: int = _NEVER_NS, exact: bool = True) -> list[Segment]:
        """Return the states between two moments, in order; unless `exact`, one message's may be in another order."""
        found: list[Segment] = []
        for stretch in reversed([*takewhile(lambda each: each.end_ns > after_ns, reversed(self._stretches))]):
            begin_ns, end_ns = stretch.begin_ns, stretch.end_ns
            if begin_ns < until_ns:
                whole = after_ns <= begin_ns and end_ns <= until_ns and end_ns - begin_ns < _SHORT_NS
                found += arrange(stretch, exact or not whole)
        return cut(found, after_ns, until_ns)


def cut(segments: list[Segment], after_ns: int, until_ns: int) -> list[Segment]:
    """Return the part of these segments that lies between two moments."""
    clipped = [(max(begin_ns, after_ns), min(end_ns, until_ns), state) for begin_ns, end_ns, state in segments]
    return [segment for segment in clipped if segment[1] > segment[0]]
