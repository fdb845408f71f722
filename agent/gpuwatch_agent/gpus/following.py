"""A GPU's ledger follows those of the runs that hold it: one run's to the nanosecond, several runs' merged by priority.

No I/O and no clock. Times in ns of the agent's monotonic clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from gpuwatch.ledger.states import (
    CHECKPOINT,
    COMM_WAIT,
    COMPILE,
    COMPUTE,
    EVAL,
    HOST_WAIT,
    INPUT_WAIT,
    OTHER,
    STALLED,
    STARTUP,
    TRANSFER,
    UNKNOWN,
    Ledger,
)
from gpuwatch_agent.runs import Run
from gpuwatch_agent.runs.timeline import Segment, Stretch, arrange, cut, parts_of


class OwnerRecord(msgspec.Struct):
    """A run that holds a GPU, and its totals as far as they are in the GPU's ledger."""

    run: str
    rank: int
    applied_ns: dict[str, int]


class GpuRecord(msgspec.Struct):
    """A GPU's ledger as it outlives the agent."""

    uuid: str
    gpu: str
    boot_id: str
    start_ns: int
    watermark_ns: int
    states_ns: dict[str, int]
    owner: tuple[str, int] | None = None
    """(run, rank) of the one run that held it, as version 0.1's first records have it; `owners` since."""
    applied_ns: dict[str, int] = msgspec.field(default_factory=dict)
    free_ns: int | None = None
    """Up to when it was seen to be free; not all of that time is in the ledger yet."""
    owners: list[OwnerRecord] = msgspec.field(default_factory=list)

    def all_owners(self) -> list[OwnerRecord]:
        """Return the runs that held the GPU, of either form."""
        if self.owner is not None:
            return [OwnerRecord(*self.owner, self.applied_ns)]
        return self.owners


@dataclass(frozen=True)
class GpuReading:
    """What the driver says of a GPU now. None: not measured."""

    gpu: str
    uuid: str
    pids: tuple[int, ...] | None
    utilization_ratio: float | None
    list_age_ns: int = 0
    """For how long `pids` have been known."""


PRIORITY = (
    COMPUTE,
    TRANSFER,
    EVAL,
    CHECKPOINT,
    COMPILE,
    STARTUP,
    COMM_WAIT,
    OTHER,
    INPUT_WAIT,
    HOST_WAIT,
    STALLED,
    UNKNOWN,
)
"""The first of these that some run is in is the GPU's state: one that computes keeps the GPU busy, whatever others wait for."""

_RANK = {state: rank for rank, state in enumerate(PRIORITY)}


def fuse(timelines: Sequence[Sequence[Segment]], begin_ns: int, until_ns: int) -> Iterator[tuple[str | None, int]]:
    """Yield (state, until) from begin to end without a gap; None where no run says anything.

    Each timeline is one run's, in order and without overlaps.
    """
    edges = {begin_ns, until_ns}
    for timeline in timelines:
        for begin, end, _ in timeline:
            edges.update((begin, end))
    moments = sorted(edge for edge in edges if begin_ns <= edge <= until_ns)
    at = [0] * len(timelines)
    pending: tuple[str | None, int] | None = None
    for moment, following in itertools.pairwise(moments):
        state: str | None = None
        for number, timeline in enumerate(timelines):
            while at[number] < len(timeline) and timeline[at[number]][1] <= moment:
                at[number] += 1
            if at[number] < len(timeline) and timeline[at[number]][0] <= moment:
                seen = timeline[at[number]][2]
                if state is None or _RANK[seen] < _RANK[state]:
                    state = seen
        if pending is not None and pending[0] != state:
            yield pending
        pending = (state, following)
    if pending is not None:
        yield pending


_Key = tuple[str, int]


@dataclass
class _Followed:
    """One run on the GPU."""

    run: Run
    head: Stretch | None = None
    """What it did before its trace begins and is not in the GPU's ledger yet: between two agents."""
    left_ns: int | None = None
    """It no longer holds the GPU: its time counts up to here."""

    @property
    def end_ns(self) -> int:
        """Up to when its time is final."""
        if self.left_ns is not None:
            return self.left_ns
        return self.run.ledger.watermark_ns if self.run.ledger is not None else 0

    def segments(self, after_ns: int, until_ns: int) -> list[Segment]:
        head = cut(arrange(self.head), after_ns, until_ns) if self.head is not None else []
        return head + self.run.trace.segments(after_ns, min(until_ns, self.end_ns))

    def parts_after(self, at_ns: int) -> dict[str, int]:
        """Return what is not yet in a ledger whose watermark is `at_ns`."""
        parts = self.run.trace.parts_after(at_ns)
        for state, ns in (parts_of(cut(arrange(self.head), at_ns)) if self.head is not None else {}).items():
            parts[state] = parts.get(state, 0) + ns
        return parts


class RunsOnGpu:
    """The runs that hold a GPU. True while there are any, those among them that left but whose time is not booked yet."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._followed: dict[_Key, _Followed] = {}
        self._awaited: dict[_Key, OwnerRecord] = {}

    def __bool__(self) -> bool:
        return bool(self._followed)

    def await_owners(self, owners: Sequence[OwnerRecord]) -> None:
        """Note who held the GPU when a former agent stopped: their later messages explain the time without one."""
        self._awaited = {(owner.run, owner.rank): owner for owner in owners}

    def resume_awaited(self, running: Sequence[Run]) -> bool:
        """Take up those of the awaited runs that hold the GPU now; return whether there is one."""
        for run in running:
            owner = self._awaited.get((run.run, run.rank))
            if owner is not None:
                self._followed[run.run, run.rank] = _Followed(run, self._head(run, owner))
        self._awaited = {}
        return bool(self._followed)

    def advance(self, running: Sequence[Run], doubted: Collection[str] = ()) -> dict[str, int]:
        """Book what is final of all runs on the GPU; return that by state, in ns. `doubted` states are booked as unknown."""
        keys = {(run.run, run.rank) for run in running}
        for run in running:
            followed = self._followed.setdefault((run.run, run.rank), _Followed(run))
            followed.run, followed.left_ns = run, None
        for key, followed in self._followed.items():
            if key not in keys and followed.left_ns is None:
                followed.left_ns = followed.end_ns
        booked: dict[str, int] = {}
        if self._followed:
            ends = [one.end_ns for one in self._followed.values() if one.left_ns is None]
            until_ns = min(ends) if ends else max(one.end_ns for one in self._followed.values())
            for state, moment_ns in self._states(until_ns):
                name = UNKNOWN if state is None or state in doubted else state
                booked[name] = booked.get(name, 0) + self._ledger.book(name, moment_ns)
        watermark_ns = self._ledger.watermark_ns
        gone = [k for k, one in self._followed.items() if one.left_ns is not None and one.left_ns <= watermark_ns]
        for key in gone:
            del self._followed[key]
        return {state: ns for state, ns in booked.items() if ns}

    def records(self) -> list[OwnerRecord]:
        """Return the runs that hold the GPU, and how far their totals are in its ledger."""
        records = list(self._awaited.values())
        for (name, rank), followed in self._followed.items():
            ledger = followed.run.ledger
            if followed.left_ns is None and ledger is not None:
                open_ns = followed.parts_after(self._ledger.watermark_ns)
                applied = {state: ns - open_ns.get(state, 0) for state, ns in ledger.totals_ns.items() if ns}
                records.append(OwnerRecord(name, rank, applied))
        return records

    def _states(self, until_ns: int) -> list[tuple[str | None, int]]:
        begin_ns = self._ledger.watermark_ns
        if until_ns <= begin_ns:
            return []
        if len(self._followed) == 1:
            (one,) = self._followed.values()
            parts = one.parts_after(begin_ns) if one.left_ns is None else {}
            if sum(parts.values()) == until_ns - begin_ns:  # no gap: nothing needs to be put in order
                moments, at_ns = [], begin_ns
                for state, ns in parts.items():
                    at_ns += ns
                    moments.append((state, at_ns))
                return list(moments)
        timelines = [one.segments(begin_ns, until_ns) for one in self._followed.values()]
        return list(fuse(timelines, begin_ns, until_ns))

    def _head(self, run: Run, owner: OwnerRecord) -> Stretch | None:
        """Return what a restored run had done that a former agent's GPU ledger did not have yet."""
        if run.ledger is None:
            return None
        traced = run.trace.parts_after(0)
        begin_ns = self._ledger.watermark_ns
        end_ns = run.trace.begin_ns() or run.ledger.watermark_ns
        parts = {
            state: ns - traced.get(state, 0) - owner.applied_ns.get(state, 0)
            for state, ns in run.ledger.totals_ns.items()
        }
        parts = {state: ns for state, ns in parts.items() if ns > 0}
        if sum(parts.values()) != end_ns - begin_ns or not parts:
            return None  # what does not add up is not taken for a timeline
        return Stretch(begin_ns, end_ns, parts)
