"""A GPU's ledger follows those of the runs on it: one run's to the nanosecond, several runs' merged by priority.

No I/O and no clock. Times in ns of the agent's monotonic clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gpuwatch.ledger import states as st
from gpuwatch_agent.processes.owners import Owner
from gpuwatch_agent.runs import Run
from gpuwatch_agent.runs.timeline import Segment, Stretch, arrange, cut, parts_of


class OwnerRecord(msgspec.Struct):
    """A run that holds a GPU, and those of its totals that are in the GPU's ledger."""

    run: str
    rank: int
    applied_ns: dict[str, int]


class GpuRecord(msgspec.Struct):
    """A GPU's ledger as it is kept over a restart of the agent."""

    uuid: str
    gpu: str
    boot_id: str
    start_ns: int
    watermark_ns: int
    states_ns: dict[str, int]
    free: list[tuple[str, int]] = msgspec.field(default_factory=list)
    """(state, until when) without a process, oldest first; not all of that time is in the ledger yet."""
    owners: list[OwnerRecord] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class GpuReading:
    """A GPU now, from the driver. None: not measured."""

    gpu: str
    uuid: str
    pids: tuple[int, ...] | None
    utilization_ratio: float | None
    list_age_ns: int = 0
    """Age of `pids`."""
    allocated: tuple[Owner, ...] | None = None
    """Those whom a scheduler has given the GPU to. None: not known."""


PRIORITY = (
    *(st.COMPUTE, st.TRANSFER, st.EVAL, st.CHECKPOINT, st.COMPILE, st.STARTUP),
    *(st.COMM_WAIT, st.OTHER, st.INPUT_WAIT, st.HOST_WAIT, st.STALLED, st.UNKNOWN),
)
"""The GPU is in the first of these that some run on it is in: one run that computes keeps it busy, whatever others wait for."""


def fuse(timelines: Sequence[Sequence[Segment]], begin_ns: int, until_ns: int) -> Iterator[tuple[str | None, int]]:
    """Yield (state, until) from begin to end without a gap; None where no run has a state. Each timeline is in order, without overlaps."""
    edges = {
        begin_ns,
        until_ns,
        *(edge for timeline in timelines for begin, end, _ in timeline for edge in (begin, end)),
    }
    moments = sorted(edge for edge in edges if begin_ns <= edge <= until_ns)
    at = [0] * len(timelines)
    pending: tuple[str | None, int] | None = None
    for moment, following in itertools.pairwise(moments):
        states = []
        for number, timeline in enumerate(timelines):
            while at[number] < len(timeline) and timeline[at[number]][1] <= moment:
                at[number] += 1
            if at[number] < len(timeline) and timeline[at[number]][0] <= moment:
                states.append(timeline[at[number]][2])
        state = min(states, key=PRIORITY.index, default=None)
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
    """Its time before the trace that is not in the GPU's ledger yet: between two agents."""
    left_ns: int | None = None
    """Up to when its time counts, once it no longer holds the GPU."""

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
    """The runs on a GPU. True while there is one, or one that left and whose time is not booked yet."""

    def __init__(self, ledger: st.Ledger) -> None:
        self._ledger = ledger
        self._followed: dict[_Key, _Followed] = {}
        self._awaited: dict[_Key, OwnerRecord] = {}

    def __bool__(self) -> bool:
        return bool(self._followed)

    def await_owners(self, owners: Sequence[OwnerRecord]) -> None:
        """Set the runs that held the GPU when a former agent stopped: their next messages cover the time without an agent."""
        self._awaited = {(owner.run, owner.rank): owner for owner in owners}

    def resume_awaited(self, running: Sequence[Run]) -> bool:
        """Follow those awaited runs that hold the GPU now; return whether there is one."""
        for run in running:
            owner = self._awaited.get(run.key)
            if owner is not None:
                self._followed[run.key] = _Followed(run, self._head(run, owner))
        self._awaited = {}
        return bool(self._followed)

    def advance(self, running: Sequence[Run], renamed: Mapping[str, str]) -> dict[str, int]:
        """Book the time that is final for all runs; return it by state, in ns. `renamed` states are booked as others."""
        keys = {run.key for run in running}
        for run in running:
            followed = self._followed.setdefault(run.key, _Followed(run))
            followed.run, followed.left_ns = run, None
        for key, followed in self._followed.items():
            if key not in keys and followed.left_ns is None:
                followed.left_ns = followed.end_ns
        booked: dict[str, int] = {}
        if self._followed:
            ends = [one.end_ns for one in self._followed.values() if one.left_ns is None]
            until_ns = min(ends) if ends else max(one.end_ns for one in self._followed.values())
            for state, moment_ns in self._states(until_ns):
                name = st.UNKNOWN if state is None else renamed.get(state, state)
                booked[name] = booked.get(name, 0) + self._ledger.book(name, moment_ns)
        watermark_ns = self._ledger.watermark_ns
        gone = [k for k, one in self._followed.items() if one.left_ns is not None and one.left_ns <= watermark_ns]
        for key in gone:
            del self._followed[key]
        return {state: ns for state, ns in booked.items() if ns}

    def records(self) -> list[OwnerRecord]:
        """Return the runs on the GPU, and those of their totals that are in its ledger."""
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
            if sum(parts.values()) == until_ns - begin_ns:  # no gap: the order does not matter
                ends_ns = itertools.accumulate(parts.values(), initial=begin_ns)
                return list(zip(parts, itertools.islice(ends_ns, 1, None), strict=True))
        timelines = [one.segments(begin_ns, until_ns) for one in self._followed.values()]
        return list(fuse(timelines, begin_ns, until_ns))

    def _head(self, run: Run, owner: OwnerRecord) -> Stretch | None:
        """Return a restored run's time that the former agent's GPU ledger did not have yet."""
        if run.ledger is None:
            return None
        traced, before = run.trace.parts_after(0), owner.applied_ns
        begin_ns = self._ledger.watermark_ns
        end_ns = run.trace.begin_ns() or run.ledger.watermark_ns
        totals = run.ledger.totals_ns.items()
        parts = {state: left for state, ns in totals if (left := ns - traced.get(state, 0) - before.get(state, 0)) > 0}
        if sum(parts.values()) != end_ns - begin_ns or not parts:
            return None  # inconsistent: no timeline
        return Stretch(begin_ns, end_ns, parts)
