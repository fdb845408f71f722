"""What happens on a simulated node: jobs that begin and end, run well or badly, and faults. Pure and deterministic by seed.

A story is a sequence of pieces in which everything goes at a constant pace, so that a counter at any time is the sum of finished
pieces and a straight line. Times in seconds since the simulation's begin; a story begins up to an hour before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuwatch.ledger.states import (
    BUSY_UNATTRIBUTED,
    CHECKPOINT,
    COMM_WAIT,
    COMPILE,
    COMPUTE,
    EVAL,
    HELD_IDLE,
    HOST_WAIT,
    INPUT_WAIT,
    STALLED,
    STARTUP,
    TRANSFER,
    UNALLOCATED,
)

GROUP = 4
"""So many neighbouring nodes share their runs, in every other group: runs of several nodes."""

HEALTHY = {
    COMPUTE: 0.80,
    INPUT_WAIT: 0.03,
    TRANSFER: 0.02,
    HOST_WAIT: 0.03,
    COMM_WAIT: 0.06,
    EVAL: 0.04,
    CHECKPOINT: 0.02,
}
STARVED = {
    COMPUTE: 0.50,
    INPUT_WAIT: 0.36,
    TRANSFER: 0.04,
    HOST_WAIT: 0.03,
    COMM_WAIT: 0.03,
    EVAL: 0.03,
    CHECKPOINT: 0.01,
}
LATE = {COMPUTE: 0.62, INPUT_WAIT: 0.05, TRANSFER: 0.02, HOST_WAIT: 0.03, COMM_WAIT: 0.24, EVAL: 0.03, CHECKPOINT: 0.01}

KINDS = {
    "healthy": 0.55,
    "starved": 0.12,
    "straggler": 0.03,
    "hang": 0.03,
    "no_hook": 0.10,
    "held_idle": 0.07,
    "free": 0.10,
}
"""What a job is, by its share of all jobs."""
MIXES = {"healthy": HEALTHY, "starved": STARVED, "straggler": LATE, "hang": HEALTHY}
FINDINGS = {"starved": "input_cpu", "straggler": "straggler", "hang": "stalled"}


@dataclass(frozen=True)
class Job:
    """One tenancy of a node's GPUs."""

    number: int
    kind: str
    begin_s: float
    end_s: float
    run: str
    """Empty without a hook."""
    user: str
    step_s: float
    hang_s: float
    """When a job of the kind "hang" does so."""


@dataclass(frozen=True)
class Piece:
    """A part of a job in which everything goes at a constant pace."""

    job: Job
    begin_s: float
    end_s: float
    mix: Mapping[str, float]
    """Share of time by state; the shares add up to 1."""
    utilization: float
    power_w: float


@dataclass(frozen=True)
class Node:
    """One simulated node."""

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
        """Yield its jobs, without end."""
        dice = random.Random(f"{self.seed}/{self._schedule}/jobs")
        begin_s, number = self.begin_s, 0
        while True:
            kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
            length_s = dice.uniform(300, 1800) if kind == "free" else dice.uniform(1200, 14400)
            run = f"{self._schedule}-{number}" if kind in MIXES else ""
            hang_s = begin_s + length_s * dice.uniform(0.2, 0.7)
            yield Job(
                number,
                kind,
                begin_s,
                begin_s + length_s,
                run,
                f"user{dice.randrange(40):02d}",
                dice.uniform(0.05, 1.5),
                hang_s,
            )
            begin_s, number = begin_s + length_s, number + 1

    def pieces(self) -> Iterator[Piece]:
        """Yield the parts of its jobs, without end."""
        for job in self.jobs():
            yield from _pieces(job)

    def agent_is_down(self, time_s: float) -> bool:
        """Return whether its agent does not answer: a few minutes in every six hours, by turns."""
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
    if job.kind == "free":
        yield Piece(job, job.begin_s, job.end_s, {UNALLOCATED: 1.0}, 0.0, 70.0)
    elif job.kind == "held_idle":
        yield Piece(job, job.begin_s, job.end_s, {HELD_IDLE: 1.0}, 0.0, 95.0)
    elif job.kind == "no_hook":
        yield Piece(job, job.begin_s, job.end_s, {BUSY_UNATTRIBUTED: 1.0}, 0.9, 520.0)
    else:
        started_s, compiled_s = job.begin_s + 60, job.begin_s + 120
        yield Piece(job, job.begin_s, started_s, {STARTUP: 1.0}, 0.05, 110.0)
        yield Piece(job, started_s, compiled_s, {COMPILE: 1.0}, 0.2, 150.0)
        mix = MIXES[job.kind]
        busy = mix[COMPUTE] + mix[COMM_WAIT] + 0.05
        trained_s = job.hang_s if job.kind == "hang" else job.end_s
        yield Piece(job, compiled_s, trained_s, mix, busy, 150 + 520 * mix[COMPUTE])
        if job.kind == "hang":
            yield Piece(job, trained_s, job.end_s, {STALLED: 1.0}, 1.0, 140.0)
