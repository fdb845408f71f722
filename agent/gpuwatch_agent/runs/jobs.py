"""The ledger of a job: all attempts of one training, with the time between them, from the totals of its processes.

An attempt is one process of the job's lowest rank on this node. Attempts of one job share the scheduler's job id, `GPUWATCH_JOB` or, when
a run is resumed, its id. Times in Unix seconds, so that they outlive a reboot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from gpuwatch import api, wire
from gpuwatch_agent.runs import ENDED, LOST, RUNNING, Run
from gpuwatch_agent.runs.records import Sender

MAX_JOBS = 256
MAX_ATTEMPTS = 256
"""Of a job; of one with more, only the last ones are in its ledger."""


class Attempt(NamedTuple):
    """One process, up to its last message."""

    run: str
    rank: int
    sender: Sender
    status: str

    @property
    def begin_s(self) -> float:
        """When its ledger begins; before that it imported."""
        return self.sender.started_s

    @property
    def sent(self) -> wire.Totals:
        assert self.sender.sent is not None
        return self.sender.sent

    @property
    def end_s(self) -> float:
        return self.begin_s + sum(self.sent.states_ns.values()) / 1e9


@dataclass
class Job:
    job: str
    declared: bool
    """By the scheduler or the user; else it is a run, and a job only once it was resumed."""
    attempts: dict[tuple[str, int, str], Attempt] = field(default_factory=dict)
    done: int = 0
    """Global number of the step after the last one that was done."""
    view: api.Job | None = None
    """What is served of it; None for a run that was not resumed."""

    @property
    def end_s(self) -> float:
        return max((attempt.end_s for attempt in self.attempts.values()), default=0.0)


class Jobs:
    """The jobs of this node."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def update(self, runs: Iterable[Run]) -> None:
        """Take over what is known of these runs' processes."""
        changed: dict[str, Job] = {}
        for run in runs:
            name = run.run if run.hello is None else run.hello.job or run.run
            job = self._jobs.get(name)
            if job is None:
                if len(self._jobs) >= MAX_JOBS:
                    del self._jobs[min(self._jobs, key=lambda name: self._jobs[name].end_s)]
                job = self._jobs[name] = Job(name, run.hello is not None and bool(run.hello.job))
            changed[name] = job
            last = next(reversed(run.senders.values()), None)
            for key, sender in run.senders.items():
                if sender.sent is None:
                    continue
                if sender.done_before is None and sender.first_step is not None:
                    sender.follow(job.done)
                status = run.status if sender is last else ENDED if sender.said_bye else LOST
                job.attempts[run.run, run.rank, key] = Attempt(run.run, run.rank, sender, status)
                if sender.first_step is not None:
                    job.done = max(job.done, sender.first_step + sender.sent.steps)
            while len(job.attempts) > MAX_ATTEMPTS:
                del job.attempts[min(job.attempts, key=lambda key: job.attempts[key].begin_s)]
        for each in changed.values():
            attempts = _one_after_another(each)
            each.view = _view(each, attempts) if attempts and (each.declared or len(attempts) > 1) else None

    def views(self) -> list[api.Job]:
        """Return the jobs that are declared or were resumed."""
        return [job.view for job in self._jobs.values() if job.view is not None]


def _one_after_another(job: Job) -> list[Attempt]:
    """Return the attempts that followed each other, oldest first: of ranks and runs at the same time the lowest rank's."""
    chosen: list[Attempt] = []
    for attempt in sorted(job.attempts.values(), key=lambda attempt: (attempt.rank, attempt.begin_s)):
        if all(attempt.begin_s >= other.end_s - 1 or attempt.end_s <= other.begin_s + 1 for other in chosen):
            chosen.append(attempt)
    chosen.sort(key=lambda attempt: attempt.begin_s)
    if job.declared:
        return chosen
    first = 0  # a run's name that was used again after a good end, from its beginning, names another job
    for number in range(1, len(chosen)):
        if chosen[number - 1].status == ENDED and not chosen[number].sender.first_step:
            first = number
    return chosen[first:]


def _view(job: Job, attempts: list[Attempt]) -> api.Job:
    states: dict[str, float] = {}

    def add(state: str, seconds: float) -> None:
        if seconds > 0:
            states[state] = states.get(state, 0.0) + seconds

    for number, attempt in enumerate(attempts):
        redone_ns = attempt.sender.redone_ns
        for state, ns in attempt.sent.states_ns.items():
            add("restart" if number and state == "startup" else state, (ns - redone_ns.get(state, 0)) / 1e9)
        add("redone", sum(redone_ns.values()) / 1e9)
        if number:
            gap_s = max(0.0, attempt.begin_s - attempts[number - 1].end_s)
            imports_s = min(gap_s, max(0.0, attempt.begin_s - (attempt.sender.process_began_s or attempt.begin_s)))
            add("down", gap_s - imports_s)
            add("restart", imports_s)
    wall_s, last, later = sum(states.values()), attempts[-1], [attempt.sender for attempt in attempts[1:]]
    return api.Job(
        job=job.job,
        status=cast(api.RunStatus, last.status),
        started_s=attempts[0].begin_s,
        last_message_s=last.end_s,
        attempts=len(attempts),
        interruptions=sum(attempt.status != ENDED for attempt in attempts[:-1]) + (last.status not in (ENDED, RUNNING)),
        states=states,
        goodput_ratio=states.get("compute", 0.0) / wall_s if wall_s > 0 else None,
        steps=sum(attempt.sent.steps for attempt in attempts),
        redone_steps=(
            None if any(each.first_step is None for each in later) else sum(each.redone_steps for each in later)
        ),
        runs=tuple(dict.fromkeys(attempt.run for attempt in reversed(attempts)))[::-1],
    )
