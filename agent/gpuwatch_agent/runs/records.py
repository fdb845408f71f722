"""What the agent keeps of a run: records that outlive the agent, and the totals of the last minute.

Times in ns of the agent's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from operator import lt

import msgspec

from gpuwatch import wire
from gpuwatch.diagnosis.window import MemoryKills
from gpuwatch.ledger.states import Ledger, add_declared
from gpuwatch_agent.processes.owners import NO_OWNER, Owner

PHASES = ("data_wait", "transfer", "compute")
_OLDEST_MESSAGE_NS = 3_600_000_000_000
"""A message can have waited for the agent, but no longer than this."""


SUMMED = tuple(
    name
    for name in wire.Counters.__struct_fields__
    if name not in ("samples", "tokens", "phases_ns", "declared_ns", "step_histogram")
)
"""The plain counters."""


def add_counters(one: wire.Counters, other: wire.Counters | None) -> wire.Counters:
    """Return the sum of two processes' counters."""
    if other is None:
        return one
    declared_ns = dict(one.declared_ns)
    for name, ns in other.declared_ns.items():
        add_declared(declared_ns, name, ns)
    return wire.Counters(
        declared_ns=declared_ns,
        samples=_sum_known(one.samples, other.samples),
        tokens=_sum_known(one.tokens, other.tokens),
        phases_ns={name: one.phases_ns.get(name, 0) + other.phases_ns.get(name, 0) for name in PHASES},
        step_histogram=[a + b for a, b in zip(one.step_histogram, other.step_histogram, strict=True)],
        **{name: getattr(one, name) + getattr(other, name) for name in SUMMED},
    )


def _sum_known(one: int, other: int) -> int:
    """Return the sum of two counts, -1 where neither is known."""
    return -1 if one < 0 and other < 0 else max(0, one) + max(0, other)


class Sender(msgspec.Struct):
    """One process that sends messages for a run."""

    sender: str
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


class RunRecord(msgspec.Struct):
    """What is kept of a run over a restart of the agent: in the history, in one transaction with what is served."""

    run: str
    rank: int
    boot_id: str
    start_ns: int
    watermark_ns: int
    states_ns: dict[str, int]
    status: str
    started_s: float
    last_message_s: float
    hello: wire.Hello | None
    senders: list[Sender] = msgspec.field(name="speakers")
    before: wire.Counters
    """Counters of processes that are no longer among the senders."""
    lost: int
    """Step records that never arrived."""
    last_step_s: float | None
    worker_cpu_s: float = 0.0
    worker_seen_s: dict[int, float] = msgspec.field(default_factory=dict)
    """CPU time of each worker that is in `worker_cpu_s` already."""
    user: str = ""
    """Owner of its process, remembered after its end."""
    ended_s: float | None = None
    owner: Owner = NO_OWNER
    worker_io: WorkerIo = WorkerIo()
    worker_io_seen: dict[int, WorkerIo] = msgspec.field(default_factory=dict)
    """What each worker had done that is in `worker_io` already."""
    gpus: dict[str, str] = msgspec.field(default_factory=dict)
    """Models of the GPUs that it held last, by UUID: its time is charged for them."""
    oom: MemoryKills | None = None
    """What the kernel's OOM killer did as the run was lost."""
    uid: int | None = None
    """The user whose processes alone send for it; None: not known."""


def went_back(new: wire.Totals, old: wire.Totals) -> bool:
    """Return whether totals, which only grow, are older than others of the same process (or false)."""
    return (
        any(getattr(new, name) < getattr(old, name) for name in ("watermark_ns", "samples", "tokens", *SUMMED))
        or any(map(lt, new.step_histogram, old.step_histogram))
        or any(
            now != then and any(now.get(name, 0) < ns for name, ns in then.items())
            for now, then in (
                (new.phases_ns, old.phases_ns),
                (new.declared_ns, old.declared_ns),
                (new.states_ns, old.states_ns),
            )
        )
    )


def clock_offset_ns(origin: wire.Origin, boot_id: str, now_ns: int, now_s: float) -> int:
    """Return the agent's monotonic clock minus a sender's: 0 for the same clock.

    Another clock (a virtual machine's, a time namespace's) is mapped by the two wall clocks where they agree with the message's
    arrival, else by its arrival alone.
    """
    arrival_ns = now_ns - origin.monotonic_ns
    if origin.boot_id == boot_id and -wire.CLOCK_SLACK_NS <= arrival_ns <= _OLDEST_MESSAGE_NS:
        return 0
    wall_ns = origin.time_ns - origin.monotonic_ns - (int(now_s * 1e9) - now_ns)
    return wall_ns if 0 <= arrival_ns - wall_ns <= _OLDEST_MESSAGE_NS else arrival_ns


MINUTE_NS = 60_000_000_000


class LastMinute:
    """A run's totals of every second of the last minute; for a younger run, since its start."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, dict[str, int], wire.Counters]] = deque()
        self._young = True

    def keep(self, now_ns: int, ledger: Ledger, counts: wire.Counters) -> None:
        """Record the totals of this moment."""
        self._seen.append((now_ns, dict(ledger.totals_ns), counts))
        self._young = ledger.sum_ns <= MINUTE_NS
        while len(self._seen) > 2 and self._seen[1][0] <= now_ns - MINUTE_NS:
            self._seen.popleft()

    def states_ns(self, ledger: Ledger) -> tuple[int, dict[str, int]]:
        """Return (time covered, time by state)."""
        then = self._seen[0][1] if self._seen and ledger.sum_ns > MINUTE_NS else {}
        states = {s: ns - then.get(s, 0) for s, ns in ledger.totals_ns.items() if ns > then.get(s, 0)}
        return sum(states.values()), states

    def tokens_per_step(self) -> float | None:
        """Return the tokens per step; None where they are not counted."""
        then, now = self.counts()
        steps = now.steps - then.steps
        return (now.tokens - max(0, then.tokens)) / steps if now.tokens >= 0 and steps > 0 else None

    def counts(self) -> tuple[wire.Counters, wire.Counters]:
        """Return the counters at the minute's beginning and now."""
        if not self._seen:
            return wire.Counters(), wire.Counters()
        return wire.Counters() if self._young else self._seen[0][2], self._seen[-1][2]
