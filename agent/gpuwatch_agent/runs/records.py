"""What the agent keeps of a run: records that outlive the agent, and the totals of the last minute.

Times in ns of the agent's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from operator import lt

import msgspec

from gpuwatch import wire
from gpuwatch.diagnosis.window import MemoryKills
from gpuwatch.ledger.states import Ledger
from gpuwatch_agent.processes.owners import NO_OWNER, Owner

PHASES = ("data_wait", "transfer", "compute")
_OLDEST_MESSAGE_NS = 3_600_000_000_000
"""A message can have waited for the agent, but no longer than this."""
_CLOCK_SLACK_NS = 1_000_000_000


class Counts(msgspec.Struct):
    """What a run has done, cumulative over its processes so far."""

    steps: int = 0
    samples: int = -1
    """-1 while no batch size is known."""
    phases_ns: dict[str, int] = msgspec.field(default_factory=dict)
    histogram: list[int] = msgspec.field(default_factory=lambda: [0] * (len(wire.STEP_BUCKETS_S) + 1))
    overhead_ns: int = 0
    hidden_ns: int = 0
    device_steps: int = 0
    tokens: int = -1
    """-1 while none were counted."""
    comm_steps: int = 0
    drained_steps: int = 0
    kept_up_steps: int = 0
    read_back_steps: int = 0
    unverified_steps: int = 0
    fetches_sampled: int = 0
    worker_fetches: int = 0
    ready_batches: int = 0
    empty_fetches: int = 0

    def plus(self, totals: wire.Totals | None) -> Counts:
        """Return these counts and a process's own."""
        if totals is None:
            return self
        summed = {name: getattr(self, name) + getattr(totals, name) for name in SUMMED}
        return Counts(
            samples=_sum_known(self.samples, totals.samples),
            tokens=_sum_known(self.tokens, totals.tokens),
            phases_ns={name: self.phases_ns.get(name, 0) + totals.phases_ns.get(name, 0) for name in PHASES},
            histogram=[a + b for a, b in zip(self.histogram, totals.step_histogram, strict=True)],
            **summed,
        )


SUMMED = tuple(
    name for name, kind in Counts.__annotations__.items() if kind == "int" and name not in ("samples", "tokens")
)
"""The plain counters, named as in `wire.Totals`."""


class Speaker(msgspec.Struct):
    """One process that speaks for a run."""

    sender: str
    offset_ns: int
    """The agent's clock minus the process's."""
    sent: wire.Totals | None = None
    """The last totals that it sent."""
    next_step: int = 0
    """Index of the step record that is expected next."""
    said_bye: bool = False


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
    """All of a run that outlives the agent: kept in the history, in one transaction with what is served."""

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
    speakers: list[Speaker]
    before: Counts
    lost: int
    last_step_s: float | None
    worker_cpu_s: float = 0.0
    worker_seen_s: dict[int, float] = msgspec.field(default_factory=dict)
    """CPU time of each worker as far as it is in `worker_cpu_s`."""
    user: str = ""
    ended_s: float | None = None
    owner: Owner = NO_OWNER
    worker_io: WorkerIo = WorkerIo()
    worker_io_seen: dict[int, WorkerIo] = msgspec.field(default_factory=dict)
    """What each worker had done as far as it is in `worker_io`."""
    gpus: dict[str, str] = msgspec.field(default_factory=dict)
    """Models of the GPUs that it held last, by UUID."""
    oom: MemoryKills | None = None


def _sum_known(one: int, other: int) -> int:
    """Return the sum of two counts, -1 where neither is known."""
    return -1 if one < 0 and other < 0 else max(0, one) + max(0, other)


def went_back(new: wire.Totals, old: wire.Totals) -> bool:
    """Return whether totals, which only grow, are older than others of the same process (or not to be believed)."""
    return (
        any(getattr(new, name) < getattr(old, name) for name in ("watermark_ns", "samples", "tokens", *SUMMED))
        or any(map(lt, new.step_histogram, old.step_histogram))
        or (new.phases_ns != old.phases_ns and any(new.phases_ns.get(n, 0) < ns for n, ns in old.phases_ns.items()))
        or any(new.states_ns.get(state, 0) < ns for state, ns in old.states_ns.items())
    )


def clock_offset_ns(origin: wire.Origin, boot_id: str, now_ns: int, now_s: float) -> int:
    """Return what turns a sender's monotonic clock into the agent's: 0 for the same one.

    Another clock (a virtual machine's, a time namespace's) is placed by the two wall clocks where they agree with the
    message's arrival, else by its arrival alone.
    """
    arrival_ns = now_ns - origin.monotonic_ns
    if origin.boot_id == boot_id and -_CLOCK_SLACK_NS <= arrival_ns <= _OLDEST_MESSAGE_NS:
        return 0
    wall_ns = origin.time_ns - origin.monotonic_ns - (int(now_s * 1e9) - now_ns)
    return wall_ns if 0 <= arrival_ns - wall_ns <= _OLDEST_MESSAGE_NS else arrival_ns


MINUTE_NS = 60_000_000_000


class LastMinute:
    """A run's totals of every second of the last minute; of a younger run all that it has done counts."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, dict[str, int], Counts]] = deque()
        self._young = True

    def keep(self, now_ns: int, ledger: Ledger, counts: Counts) -> None:
        """Take the totals of this moment."""
        self._seen.append((now_ns, dict(ledger.totals_ns), counts))
        self._young = ledger.sum_ns <= MINUTE_NS
        while len(self._seen) > 2 and self._seen[1][0] <= now_ns - MINUTE_NS:
            self._seen.popleft()

    def states_ns(self, ledger: Ledger) -> tuple[int, dict[str, int]]:
        """Return (time covered, time by state)."""
        then = self._seen[0][1] if self._seen and ledger.sum_ns > MINUTE_NS else {}
        states = {s: ns - then.get(s, 0) for s, ns in ledger.totals_ns.items() if ns > then.get(s, 0)}
        return sum(states.values()), states

    def tokens_a_step(self) -> float | None:
        """Return the tokens a step; None where they are not counted."""
        if len(self._seen) < 2:
            return None
        then, now = self._then(), self._seen[-1][2]
        steps = now.steps - then.steps
        return (now.tokens - max(0, then.tokens)) / steps if now.tokens >= 0 and steps > 0 else None

    def counts(self) -> tuple[Counts, Counts]:
        """Return the counts of then and of now."""
        return (self._then(), self._seen[-1][2]) if self._seen else (Counts(), Counts())

    def _then(self) -> Counts:
        return Counts() if self._young else self._seen[0][2]
