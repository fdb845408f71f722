"""What a run is made of: its processes, their counters and clocks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter, itemgetter, lt
from typing import Any

import msgspec

from gpuwatch import api, wire
from gpuwatch.ledger.states import CHECKPOINT_LOAD, COMPILE, OTHER, RENDEZVOUS, STARTUP, UNKNOWN, add_declared

_SET_UP = (CHECKPOINT_LOAD, RENDEZVOUS)
_OLDEST_MESSAGE_NS = 3_600_000_000_000  # A message can have waited for the agent, but no longer than this


def add_counters(one: wire.Counters, other: wire.Counters | None) -> wire.Counters:
    """Return the sum of two processes' counters; -1 where neither knows a count."""
    if other is None:
        return one
    return wire.Counters(*(_sum(getattr(one, name), getattr(other, name)) for name in wire.Counters.__struct_fields__))


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, int):
        return -1 if one < 0 and other < 0 else max(0, one) + max(0, other)
    both = dict(one)
    for name, ns in other.items():
        add_declared(both, name, ns)
    return both


def went_back(new: wire.Totals, old: wire.Totals) -> bool:
    """Return whether totals, which only grow, are older than others of the same process (or false)."""
    fallen = sum(new.declared_ns.values()) < sum(old.declared_ns.values())  # a name may join the rest
    return fallen or any(map(lt, _counts(new), _counts(old))) or any(map(_is_less, _times(new), _times(old)))


_TIMES = ("phases_ns", "breakdown_ns", "states_ns")  # by name
_times = attrgetter(*_TIMES)
_counts = attrgetter(*{*wire.Totals.__struct_fields__} - {*_TIMES, "start_ns", "records_dropped", "declared_ns"})


def _is_less(new: Mapping[str, int], old: Mapping[str, int]) -> bool:
    return new != old and any(new.get(name, 0) < ns for name, ns in old.items())


class Sender(msgspec.Struct):
    """One process that sends messages for a run."""

    offset_ns: int  # the agent's clock minus the process's
    boot_id: str = ""  # of the agent's clock, on which are `started_ns` and `began_ns`
    sent: wire.Totals | None = None  # its last totals
    next_step: int = 0  # index of the step record that is expected next
    said_bye: bool = False
    pid: int = 0  # of the peer, by the kernel; 0: not known
    started_ns: int = 0  # when its ledger begins
    began_ns: int | None = 0  # when the process began; 0: not known, None: it has sent no Hello yet
    started_s: float = 0.0  # Unix time at which its ledger begins, but for:
    moved_s: float | None = None  # how far its job moved that, against a clock that was set; None: not yet
    first_step: int | None = None  # global number of its step 0; None: not known
    rewinds: tuple[tuple[int, int], ...] = ()  # as in its Hello
    done_before: int | None = None
    """Steps of the job before it, by global number: what it does again is `redone`. None: not known yet."""
    redone_steps: int = 0
    redone_ns: dict[str, int] = msgspec.field(default_factory=dict)  # by state, a part of `sent`
    failed: bool = False  # an exception ended it
    begun_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """What it took before its first step, by name: compile, checkpoint_load, rendezvous; a part of `sent`."""

    def take(self, totals: wire.Totals) -> None:
        """Take new totals, and count what is done again."""
        follows = self.done_before or self.rewinds
        before_ns = self.trained_ns() if follows else {}
        if self.sent is None or not self.sent.steps:
            found = {COMPILE: totals.states_ns.get(COMPILE, 0), **totals.declared_ns}
            self.begun_ns = {name: found[name] for name in (COMPILE, *_SET_UP) if found.get(name)}
        last, self.sent = self.sent, totals
        if follows:
            grown_ns = {state: ns - before_ns.get(state, 0) for state, ns in self.trained_ns().items()}
            self._count_redone(0 if last is None else last.steps, grown_ns)

    def trained_ns(self) -> dict[str, int]:
        """Return the time by state without that up to the first step, and without what is unknown."""
        begun_ns, states_ns = self.begun_by_state(), {} if self.sent is None else self.sent.states_ns
        return {s: ns - begun_ns.get(s, 0) for s, ns in states_ns.items() if s not in (STARTUP, UNKNOWN)}

    def begun_by_state(self) -> dict[str, int]:
        """Return the time up to the first step by the state that it is a part of in `sent`."""
        return {
            STARTUP: 0 if self.sent is None else self.sent.states_ns.get(STARTUP, 0),
            COMPILE: self.begun_ns.get(COMPILE, 0),
            OTHER: sum(self.begun_ns.get(name, 0) for name in _SET_UP),
        }

    @property
    def began_s(self) -> float:
        """Unix time at which the process began; where that is not known, its ledger."""
        return self.started_s - (self.started_ns - self.began_ns) / 1e9 if self.began_ns else self.started_s

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Global numbers (first step, after the last) from each checkpoint that it went on from; empty: not known."""
        if self.first_step is None or self.sent is None:
            return []
        starts = [(0, self.first_step), *sorted(self.rewinds, key=itemgetter(0)), (done := self.sent.steps, 0)]
        return [(number, number + max(0, min(until, done) - at)) for (at, number), (until, _) in pairwise(starts)]

    @property
    def next_number(self) -> int | None:
        """Global number of the step after its last one; None: not known."""
        return self.pieces[-1][1] if self.pieces else None

    @property
    def reached(self) -> int:
        """The highest global number of a step after one that it made; 0: not known."""
        return max((after for _, after in self.pieces), default=0)

    def new_steps(self, least: int = -(2**60)) -> int:
        """Return how many of its steps, from the global number `least` on, had not been done before."""
        done, new = self.done_before or self.first_step or 0, 0
        for first, after in self.pieces:
            new, done = new + max(0, after - max(first, done, least)), max(done, after)
        return new

    def follow(self, done: int) -> None:
        """An earlier attempt had done the steps before `done`: count what it did again up to now."""
        self.done_before = done
        self._count_redone(0, self.trained_ns())

    def _count_redone(self, steps_before: int, grown_ns: Mapping[str, int]) -> None:
        """Count the steps since then, and the time that they took, as far as an earlier attempt had done them."""
        if self.first_step is None or self.sent is None or not (self.done_before or self.rewinds):
            return
        redone, steps = self.sent.steps - self.new_steps(), self.sent.steps - steps_before
        is_behind = (self.next_number or 0) < max(self.done_before or 0, self.reached)
        share = min(1.0, (redone - self.redone_steps) / steps) if steps > 0 else float(is_behind)
        self.redone_steps = redone
        for state, ns in grown_ns.items():
            if ns > 0 and share > 0:
                self.redone_ns[state] = self.redone_ns.get(state, 0) + int(ns * share)


class Counted(msgspec.Struct):
    """What metrics have counted of a job. Kept with its runs, whose records have only their last processes."""

    end_s: float = 0.0  # up to when
    job: api.Job | None = None  # as it was known then: attempts that overlap can have more for a moment
    seconds: dict[str, float] = {}  # by state: what is lost by that in which it was spent
    attempts: int = 0

    def grow(self, job: api.Job, end_s: float) -> api.Job:
        """Return a job as counted. No counter falls: if attempts' overlap makes one too high, growing ones get less."""
        self.job, self.end_s = msgspec.structs.replace(job, findings=(), runs=()), max(self.end_s, end_s)
        self.attempts = max(self.attempts, min(job.attempts, job.interruptions + 1))
        found = {key: job.states.get(key, 0.0) + job.lost.get(key, 0.0) for key in {*job.states, *job.lost} - {"lost"}}
        ahead = {state: s - before_s for state, s in found.items() if s > (before_s := self.seconds.get(state, 0.0))}
        share = max(0.0, sum(found.values()) - sum(self.seconds.values())) / max(1e-9, sum(ahead.values()))
        self.seconds |= {state: self.seconds.get(state, 0.0) + s * min(1.0, share) for state, s in ahead.items()}
        started_s = job.last_message_s - sum(self.seconds.values())
        return msgspec.structs.replace(job, states=dict(self.seconds), attempts=self.attempts, started_s=started_s)


def clock_offset_ns(origin: wire.Origin, boot_id: str, now_ns: int, now_s: float) -> int:
    """Return the agent's monotonic clock minus a sender's: 0 for the same one; else by wall clocks, or by arrival."""
    arrival_ns = now_ns - origin.monotonic_ns
    if origin.boot_id == boot_id and -wire.CLOCK_SLACK_NS <= arrival_ns <= _OLDEST_MESSAGE_NS:
        return 0
    wall_ns = origin.time_ns - origin.monotonic_ns - (int(now_s * 1e9) - now_ns)
    return wall_ns if 0 <= arrival_ns - wall_ns <= _OLDEST_MESSAGE_NS else arrival_ns
