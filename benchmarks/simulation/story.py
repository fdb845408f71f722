"""What happens on a simulated node: jobs that begin and end, run well or badly, and faults. Deterministic by seed.

A story is a sequence of pieces with constant rates, so that a counter at any time is the sum of the finished pieces
plus a linear term. Times in seconds since the simulation's start; a story starts up to an hour before it.
"""

import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuwatch.ledger import states as s

TRIAL_S = 180.0  # about how long a run of a sweep is; all of them are one job of the scheduler
GROUP = 4  # in every other group of this many neighbouring nodes, runs span all nodes of the group
_STATES = (s.COMPUTE, s.INPUT_WAIT, s.TRANSFER, s.HOST_WAIT, s.COMM_WAIT, s.EVAL, s.CHECKPOINT, s.OTHER)
_HEALTHY = (0.80, 0.03, 0.02, 0.03, 0.06, 0.04, 0.02, 0.0)
MIXES = {
    kind: dict(zip(_STATES, shares, strict=True))
    for kind, shares in {
        "healthy": _HEALTHY,
        "starved": (0.50, 0.36, 0.04, 0.03, 0.03, 0.03, 0.01, 0.0),
        "straggler": (0.57, 0.05, 0.02, 0.03, 0.24, 0.03, 0.01, 0.05),
        "hang": _HEALTHY,
        "sweep": (0.66, 0.16, 0.02, 0.03, 0.06, 0.04, 0.03, 0.0),
    }.items()
}
KINDS = {
    "healthy": 0.47,
    "sweep": 0.08,
    "starved": 0.12,
    "straggler": 0.03,
    "hang": 0.03,
    "no_hook": 0.1,
    "held_idle": 0.07,
    "free": 0.1,
}
FINDINGS = {"starved": "input_cpu", "straggler": "straggler", "hang": "stalled"}


@dataclass(frozen=True)
class Job:
    number: int
    kind: str
    begin_s: float
    end_s: float
    run: str
    user: str
    step_s: float
    hang_s: float  # when a job of the kind "hang" hangs
    id: str  # of the scheduler


@dataclass(frozen=True)
class Piece:
    """A part of a job with constant rates."""

    job: Job
    begin_s: float
    end_s: float
    mix: Mapping[str, float]  # share of time by state; the shares add up to 1
    utilization: float
    power_w: float


@dataclass(frozen=True)
class Node:
    seed: int
    number: int
    gpus: int

    @property
    def name(self) -> str:
        return f"sim-{self.number:05d}"

    @property
    def shares_runs(self) -> bool:
        """Whether its runs span the nodes of its group."""
        return self.number // GROUP % 2 == 0

    @property
    def first_rank(self) -> int:
        return self.number % GROUP * self.gpus if self.shares_runs else 0

    @property
    def begin_s(self) -> float:
        """When its agent was started, 0 or less."""
        return -3600 * random.Random(f"{self.seed}/{self._schedule}/begin").random()

    @property
    def _schedule(self) -> str:
        return f"group-{self.number // GROUP}" if self.shares_runs else f"node-{self.number}"

    def jobs(self) -> Iterator[Job]:
        dice = random.Random(f"{self.seed}/{self._schedule}/jobs")
        begin_s, number = self.begin_s, 0
        while True:
            kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
            length_s = dice.uniform(300, 1800) if kind == "free" else dice.uniform(1200, 14400)
            run = f"{self._schedule}-{number}" if kind in MIXES else ""
            hang_s = begin_s + length_s * dice.uniform(0.2, 0.7)
            user = f"user{dice.randrange(40):02d}"
            step_s, trials = dice.uniform(0.05, 1.5), max(1, int(length_s / TRIAL_S)) if kind == "sweep" else 1
            for trial in range(trials):
                end_s, own = begin_s + length_s / trials, f"{run}.{trial}" if trials > 1 else run
                job_id = f"{zlib.crc32(self._schedule.encode()) % 10**5}{number:03d}"
                yield Job(number, kind, begin_s, end_s, own, user, step_s, hang_s, job_id)
                begin_s = end_s
            number += 1

    def pieces(self) -> Iterator[Piece]:
        for job in self.jobs():
            yield from _pieces(job)

    def agent_is_down(self, time_s: float) -> bool:
        """Return whether its agent does not answer: a few minutes in every six hours."""
        hours6, offset = divmod(time_s, 21600)
        dice = random.Random(f"{self.seed}/{self.number}/down/{hours6}")
        begin_s = dice.uniform(0, 21000)
        return begin_s <= offset < begin_s + dice.uniform(60, 600)

    @property
    def gpu_lost_s(self) -> float | None:
        """When its last GPU falls off the bus; None for most nodes."""
        dice = random.Random(f"{self.seed}/{self.number}/lost")
        return dice.uniform(0, 86400) if dice.random() < 0.02 else None

    @property
    def throttled(self) -> bool:
        """Whether its first GPU is too hot."""
        return random.Random(f"{self.seed}/{self.number}/hot").random() < 0.02


def _pieces(job: Job) -> Iterator[Piece]:
    without_hook = {
        "free": (s.UNALLOCATED, 0.0, 70.0),
        "held_idle": (s.HELD_IDLE, 0.0, 95.0),
        "no_hook": (s.BUSY_UNATTRIBUTED, 0.9, 520.0),
    }
    if job.kind in without_hook:
        state, utilization, power_w = without_hook[job.kind]
        yield Piece(job, job.begin_s, job.end_s, {state: 1.0}, utilization, power_w)
    else:
        early_s = min(60, (job.end_s - job.begin_s) / 6)
        started_s, compiled_s = job.begin_s + early_s, job.begin_s + 2 * early_s
        yield Piece(job, job.begin_s, started_s, {s.STARTUP: 1.0}, 0.05, 110.0)
        yield Piece(job, started_s, compiled_s, {s.COMPILE: 1.0}, 0.2, 150.0)
        mix = MIXES[job.kind]
        busy = mix[s.COMPUTE] + mix[s.COMM_WAIT] + 0.05
        trained_s = job.hang_s if job.kind == "hang" else job.end_s
        yield Piece(job, compiled_s, trained_s, mix, busy, 150 + 520 * mix[s.COMPUTE])
        if job.kind == "hang":
            yield Piece(job, trained_s, job.end_s, {s.STALLED: 1.0}, 1.0, 140.0)
