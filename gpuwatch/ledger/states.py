"""The states of a GPU-second and their arithmetic. No I/O, no clock: every time is an argument, in ns.

A ledger is final up to its watermark. Time is only ever appended after the watermark, each nanosecond to exactly one
state, so that `sum(totals) == watermark - start` holds by construction and no value ever goes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

STARTUP, COMPILE, INPUT_WAIT, TRANSFER = "startup", "compile", "input_wait", "transfer"
COMPUTE, HOST_WAIT, COMM_WAIT, EVAL = "compute", "host_wait", "comm_wait", "eval"
CHECKPOINT, OTHER, STALLED, UNKNOWN = "checkpoint", "other", "stalled", "unknown"
IN_STEPS = (INPUT_WAIT, TRANSFER, COMPUTE, HOST_WAIT, COMM_WAIT)
RUN_STATES = (STARTUP, COMPILE, *IN_STEPS, EVAL, CHECKPOINT, OTHER, STALLED, UNKNOWN)  # of a run's wall clock

BUSY_UNATTRIBUTED, HELD_IDLE = "busy_unattributed", "held_idle"
WITHOUT_PROCESS = UNALLOCATED, FREE, ALLOCATED_UNUSED = ("unallocated", "free", "allocated_unused")
# a run's, without a hook, and without a process
GPU_STATES = (*RUN_STATES, BUSY_UNATTRIBUTED, HELD_IDLE, *WITHOUT_PROCESS)
LOST_KINDS = ("starved", "idle", "stalled")  # of what the recording rules keep: time that is paid for and not used
ENERGY_KINDS = {
    "working": (COMPUTE, EVAL, BUSY_UNATTRIBUTED),
    "waiting": (INPUT_WAIT, TRANSFER, HOST_WAIT, COMM_WAIT, CHECKPOINT, COMPILE, STARTUP, STALLED),
    "idle": (HELD_IDLE, *WITHOUT_PROCESS),
    "unknown": (OTHER, UNKNOWN),
}
"""The states whose energy is of each kind. Whether the GPU worked while training did something else is not known."""


PHASE_STATES = {name: name for name in (EVAL, CHECKPOINT, STARTUP, COMPILE)}  # a phase of any other name is `other`


def phase_state(name: str) -> str:
    """Return the state that a declared phase is booked under."""
    return PHASE_STATES.get(name, OTHER)


CHECKPOINT_LOAD, RENDEZVOUS, PAUSE = "checkpoint_load", "rendezvous", "between cells"
"""Phases that gpuwatch declares, part of `other`. PAUSE: the time between two notebook cells, which no share counts."""

MAX_DECLARED = 8
_MOST_OTHERS = 1024
REST = "rest"


def add_declared(declared_ns: dict[str, int], name: str, ns: int, others_ns: dict[str, int] | None = None) -> None:
    """Count time of a declared phase by its name: of eight names, the others as "rest".

    With `others_ns`, the time of the others by name, one that comes to twice the least of the eight takes its place.
    What the new one had before stays with the rest, so that no counter goes back.
    """
    names = declared_ns.keys() - {REST}
    if name not in (REST, *names) and len(names) >= MAX_DECLARED:
        least = min(names, key=declared_ns.__getitem__)
        spent_ns = ns if others_ns is None else others_ns.pop(name, 0) + ns
        if others_ns is not None and spent_ns > 2 * declared_ns[least]:
            others_ns[least] = declared_ns.pop(least)
            declared_ns[REST] = declared_ns.get(REST, 0) + others_ns[least]
        else:
            if others_ns is not None and len(others_ns) < _MOST_OTHERS:
                others_ns[name] = spent_ns
            name = REST
    declared_ns[name] = declared_ns.get(name, 0) + ns


SECTIONS = FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
"""What compute is divided into on request. FORWARD is the rest: also loss, metrics, gradient clipping, Python code."""
MOST_MARKS = 1024  # of a piece of a step: one with more is not divided


def sections_ns(
    marks: Sequence[tuple[str, Any]], elapsed_ns: Callable[[Any, Any], int], compute_ns: int
) -> dict[str, int] | None:
    """Return the compute of a piece of a step by section, given where each one begins (None: not measured).

    FORWARD is the rest, and a closure's forward pass before a backward pass inside an optimizer's step. Return None
    where the sections are not known, or one goes on after the piece.
    """
    if marks and (marks[-1][0] != FORWARD or len(marks) > MOST_MARKS or any(at is None for _, at in marks)):
        return None
    found = Counter[str]()
    for (section, begin), (following, end) in pairwise(marks):
        if section == BACKWARD or (section == OPTIMIZER and following != BACKWARD):
            found[section] += max(0, elapsed_ns(begin, end))
    rest_ns = compute_ns - found.total()
    return {FORWARD: rest_ns, **found} if rest_ns >= 0 else None


class Ledger:
    """Seconds by state, final up to a watermark. All times in ns of one monotonic clock."""

    __slots__ = ("start_ns", "totals_ns", "watermark_ns")

    def __init__(self, start_ns: int, states: tuple[str, ...] = RUN_STATES) -> None:
        self.start_ns = start_ns
        self.watermark_ns = start_ns
        self.totals_ns: dict[str, int] = dict.fromkeys(states, 0)

    def kept(self) -> tuple[int, int, dict[str, int]]:
        """Return what `restore` takes."""
        return self.start_ns, self.watermark_ns, {state: ns for state, ns in self.totals_ns.items() if ns}

    def restore(self, start_ns: int, watermark_ns: int, totals_ns: Mapping[str, int]) -> Ledger:
        """Continue from what another one kept; return this ledger."""
        self.start_ns, self.watermark_ns = start_ns, watermark_ns
        self.totals_ns.update(totals_ns)
        return self

    def book(self, state: str, until_ns: int) -> int:
        """Book the time from the watermark to `until_ns` under `state`, nothing if that is final; return its ns."""
        booked = until_ns - self.watermark_ns
        if booked <= 0:
            return 0
        self.totals_ns[state] += booked
        self.watermark_ns = until_ns
        return booked

    def book_parts(self, parts_ns: Mapping[str, int]) -> None:
        """Book so much time under each state, from the watermark on: the sum of several bookings."""
        for state, part in parts_ns.items():
            self.totals_ns[state] += part
            self.watermark_ns += part

    def book_mixture(self, parts_ns: Mapping[str, int], until_ns: int) -> None:
        """Book time to `until_ns` in proportion to `parts_ns`, exactly if they cover it; without any, as `unknown`."""
        open_ns = until_ns - self.watermark_ns
        if open_ns <= 0:
            return
        whole = sum(parts_ns.values())
        if whole <= 0:
            self.book(UNKNOWN, until_ns)
            return
        seen, begin = 0, self.watermark_ns
        for state, part in parts_ns.items():
            seen += part
            self.book(state, begin + open_ns * seen // whole)

    def shift(self, gap_ns: int) -> None:
        """Move start and watermark by `gap_ns`: time that is not this ledger's (between two processes of one run)."""
        self.start_ns += gap_ns
        self.watermark_ns += gap_ns

    @property
    def sum_ns(self) -> int:
        return sum(self.totals_ns.values())


def by_kind(of_states: Mapping[str, float]) -> dict[str, float]:
    """Return the sum over the states of each kind of energy."""
    return {kind: sum(of_states.get(state, 0.0) for state in states) for kind, states in ENERGY_KINDS.items()}


def shares(states: Mapping[str, float]) -> dict[str, float]:
    """Return each state's share of the sum of all states, 0–1, largest first; empty when nothing was booked."""
    whole = sum(states.values())
    if whole <= 0:
        return {}
    return {s: v / whole for s, v in sorted(states.items(), key=lambda item: -item[1]) if v > 0}


def median(values: Iterable[float]) -> float:
    """Return the middle one, or the mean of the middle two. `statistics`, which has the same, takes 3 ms to import."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the value below which so many per cent of the ordered values lie (the nearest one)."""
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
