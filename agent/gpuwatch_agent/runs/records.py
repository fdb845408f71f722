"""What a run is made of: its processes, their counters and clocks."""

from __future__ import annotations

from collections.abc import Mapping
from operator import lt
from typing import Any

import msgspec

from gpuwatch import wire
from gpuwatch.ledger.states import add_declared

_OLDEST_MESSAGE_NS = 3_600_000_000_000
"""A message can have waited for the agent, but no longer than this."""


def add_counters(one: wire.Counters, other: wire.Counters | None) -> wire.Counters:
    """Return the sum of two processes' counters; -1 where neither knows a count."""
    if other is None:
        return one
    return wire.Counters(*(_sum(getattr(one, name), getattr(other, name)) for name in wire.Counters.__struct_fields__))


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    if isinstance(one, int):
        return -1 if one < 0 and other < 0 else max(0, one) + max(0, other)
    both = dict(one)
    for name, ns in other.items():
        add_declared(both, name, ns)
    return both


def went_back(new: wire.Totals, old: wire.Totals) -> bool:
    """Return whether totals, which only grow, are older than others of the same process (or false)."""
    return any(_is_less(getattr(new, name), getattr(old, name)) for name in _GROWING)


_GROWING = tuple(name for name in wire.Totals.__struct_fields__ if name not in ("start_ns", "records_dropped"))


def _is_less(new: Any, old: Any) -> bool:
    if isinstance(new, int):
        return bool(new < old)
    if isinstance(new, list):
        return any(map(lt, new, old))
    return new != old and any(new.get(name, 0) < ns for name, ns in old.items())


class Sender(msgspec.Struct):
    """One process that sends messages for a run."""

    offset_ns: int
    """The agent's clock minus the process's."""
    sent: wire.Totals | None = None
    """Its last totals."""
    next_step: int = 0
    """Index of the step record that is expected next."""
    said_bye: bool = False
    pid: int = 0
    """Of the peer, by the kernel; 0: not known."""
    started_s: float = 0.0
    """Unix time at which its ledger begins."""
    process_began_s: float = 0.0
    """Unix time at which the process began; 0: not known."""
    first_step: int | None = None
    """Global number of its step 0; None: not known."""
    done_before: int | None = None
    """Steps of the job before it, by global number: what it does again is `redone`. None: not known yet."""
    redone_steps: int = 0
    redone_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """By state, a part of `sent`."""

    def follow(self, done: int) -> None:
        """An earlier attempt had done the steps before `done`: count what it did again up to now."""
        self.done_before = done
        totals, self.sent = self.sent, None
        if totals is not None:
            self.count_redone(totals, totals.states_ns)
            self.sent = totals

    def count_redone(self, totals: wire.Totals, grown_ns: Mapping[str, int]) -> None:
        """Count the steps since the last totals, and the time that they took, as far as an earlier attempt had done them."""
        if self.first_step is None or not self.done_before:
            return
        left = self.done_before - self.first_step
        redone = max(0, min(left, totals.steps))
        steps = totals.steps - (self.sent.steps if self.sent is not None else 0)
        share = min(1.0, (redone - self.redone_steps) / steps) if steps > 0 else float(totals.steps < left)
        self.redone_steps = redone
        for state, ns in grown_ns.items():
            if ns > 0 and share > 0 and state not in ("startup", "unknown"):
                self.redone_ns[state] = self.redone_ns.get(state, 0) + int(ns * share)


class WorkerIo(msgspec.Struct, frozen=True):
    """What loader workers have read, written and waited; None: not readable."""

    read_bytes: int | None = None
    written_bytes: int | None = None
    run_queue_s: float | None = None

    def grown(self, now: WorkerIo, before: WorkerIo) -> WorkerIo:
        """Return these totals and what one worker did between two samples."""
        grown = {}
        for name in self.__struct_fields__:
            total, seen = getattr(self, name), getattr(now, name)
            grown[name] = total if seen is None else (total or 0) + max(0, seen - (getattr(before, name) or 0))
        return WorkerIo(**grown)


def clock_offset_ns(origin: wire.Origin, boot_id: str, now_ns: int, now_s: float) -> int:
    """Return the agent's monotonic clock minus a sender's: 0 for the same clock; else by the wall clocks, or by the arrival alone."""
    arrival_ns = now_ns - origin.monotonic_ns
    if origin.boot_id == boot_id and -wire.CLOCK_SLACK_NS <= arrival_ns <= _OLDEST_MESSAGE_NS:
        return 0
    wall_ns = origin.time_ns - origin.monotonic_ns - (int(now_s * 1e9) - now_ns)
    return wall_ns if 0 <= arrival_ns - wall_ns <= _OLDEST_MESSAGE_NS else arrival_ns
