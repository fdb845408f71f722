"""The ledger of a job: all attempts of one training, with the time between them, from the totals of its processes.

An attempt is one process of the job's lowest rank on this node. Attempts of one job share the scheduler's job id,
`GPUWATCH_JOB` or, when a run is resumed, its id. Times in Unix seconds, so that they outlive a reboot.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from gpuwatch import api, wire
from gpuwatch.diagnosis.rules.progress import checkpoint_interval
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.diagnosis.window import JobFacts, Window
from gpuwatch.ledger.states import CHECKPOINT, COMPUTE, STARTUP
from gpuwatch_agent.runs import ENDED, LOST, RUNNING, SENDERS_KEPT, Run
from gpuwatch_agent.runs.records import Counted, Sender

MAX_JOBS = 256
MAX_ATTEMPTS = 256  # of a job; of those before them only sums are known
DOWN, RESTART, REDONE, LOST_WORK = "down", "restart", "redone", "lost"
_MOST_OF_USER = 2048  # attempts of a user's jobs together


class Attempt(NamedTuple):
    """One process, up to its last message."""

    run: str
    rank: int
    sender: Sender
    status: str
    begin_s: float
    """When its ledger begins, after its imports; not before the run's last process ended, whatever the clock says."""
    end_s: float
    alive_s: float  # When its process began, as far as that is known; not more than a minute before `begin_s`.

    @property
    def sent(self) -> wire.Totals:
        assert self.sender.sent is not None
        return self.sender.sent

    @property
    def ended_well(self) -> bool:
        return self.status == ENDED and not self.sender.failed

    def overlap_s(self, later: Attempt) -> float:
        """Return how long it was alive after a later attempt began; below 0: the gap. A process can have several."""
        return self.end_s - (later.begin_s if self.sender.pid == later.sender.pid else later.alive_s)

    def is_before(self, later: Attempt) -> bool:
        """Whether it ended first. What hangs may outlive the next one's begin; an attempt's ranks live side by side."""
        return 2 * self.overlap_s(later) <= min(self.end_s - self.alive_s, later.end_s - later.alive_s)

    def is_resumed_by(self, later: Attempt) -> bool:
        """Whether a later one goes on with its training; after a good end, one from step 0 is another training."""
        return not (self.ended_well and later.sender.first_step == 0)

    def is_interrupted(self, following: Attempt | None) -> bool:
        """Whether it was killed, ended with an exception, or did steps from which the next attempt did not resume."""
        resumed_at = following.sender.first_step if following is not None and self.is_resumed_by(following) else None
        is_cut = resumed_at is not None and resumed_at < (self.sender.next_number or 0)
        return is_cut or (not self.ended_well and self.status != RUNNING)


@dataclass
class Job:
    job: str
    declared: bool  # by the scheduler or the user; else it is a run, and a job only once it was resumed
    uid: int | None  # whose runs alone belong to it: another user's job of the same name is "NAME@UID"
    attempts: dict[tuple[str, int, str], Attempt] = field(default_factory=dict)
    forgotten_s: float = 0.0  # when the last attempt ended that is no longer in `attempts`
    counted: Counted = field(default_factory=Counted)  # what metrics have
    before: api.Job | None = None  # the attempts that are in no other record: None without any
    view: api.Job | None = None  # None for a run that was not resumed
    part: api.Job | None = None  # what metrics have of it: no attempts whose rank 0 was on another node, which has them

    def place(self, sender: Sender) -> None:
        """Move a process's begin to its distance from others' by the boot's clock: the wall clock may have been set."""
        boot, at_s, moved_s = sender.boot_id, sender.started_s, 0.0
        last = max(self.attempts.values(), key=lambda each: (each.sender.boot_id == boot, each.end_s), default=None)
        if last is not None and last.sender.boot_id == boot:
            moved_s = last.sender.started_s + (sender.started_ns - last.sender.started_ns) / 1e9 - at_s
        elif last is not None:
            moved_s = last.sender.moved_s or 0.0
            if last.end_s > at_s + moved_s:  # the clock was set back: how far is not known
                moved_s, sender.began_ns = last.end_s - at_s, sender.started_ns
        sender.started_s, sender.moved_s = at_s + moved_s, moved_s

    def senders_of(self, run: Run) -> dict[str, Sender]:
        """Return the processes of a run's last attempts, as far as the run does not have them itself."""
        of_run = [(each.begin_s, key, each.sender) for (*at, key), each in self.attempts.items() if (*at,) == run.key]
        return {key: sender for _, key, sender in sorted(of_run)[-SENDERS_KEPT:] if key not in run.senders}

    def one_after_another(self) -> list[Attempt]:
        """Return the attempts that followed each other, oldest first; of simultaneous ones the lowest rank's."""
        chosen: list[Attempt] = []
        for attempt in sorted(self.attempts.values(), key=lambda attempt: (attempt.rank, attempt.begin_s)):
            at = bisect(chosen, attempt.begin_s, key=lambda each: each.begin_s)
            follows = at == 0 or chosen[at - 1].is_before(attempt)
            if follows and (at == len(chosen) or attempt.is_before(chosen[at])):
                chosen.insert(at, attempt)
        first = 0  # a name that was used again after a good end, from its beginning, names another job
        for number in range(1, len(chosen)):
            before, step = chosen[number - 1], chosen[number].sender.first_step
            if before.ended_well and (
                step == 0 and before.run == chosen[number].run if self.declared and "/" not in self.job else not step
            ):
                first = number
        return chosen[first:]

    def count(self, attempts: list[Attempt], kept: Iterable[Counted], thresholds: Thresholds) -> JobFacts:
        """Make its views of these attempts; forget all but the last ones. `kept`: its counters by its runs' records."""
        self.view, facts = _view(self.job, attempts, thresholds)
        if own := [attempt for attempt in attempts if attempt.rank == 0]:
            found = self.view if len(own) == len(attempts) else _view(self.job, own, thresholds)[0]
            counted = max((self.counted, *kept), key=lambda each: each.end_s)
            if any(counted.seconds.values()) and counted.end_s <= own[0].begin_s:  # another job of its name
                counted, self.before = Counted(), None
            elif counted is not self.counted:
                self.before = self._forgotten(counted, own, thresholds)
            self.counted, now = counted, _added(found, self.before)
            self.part = counted.grow(now, own[-1].end_s)
            self.view = now if found is self.view else self.view
            if len(attempts) > MAX_ATTEMPTS:
                self.before = self._forgotten(counted, attempts[-MAX_ATTEMPTS:], thresholds)
        if len(self.attempts) > MAX_ATTEMPTS:
            self.forgotten_s = max([self.forgotten_s, *(each.end_s for each in attempts[:-MAX_ATTEMPTS])])
            senders = {id(attempt.sender) for attempt in attempts[-MAX_ATTEMPTS:]}
            self.attempts = {key: each for key, each in self.attempts.items() if id(each.sender) in senders}
        return replace(facts, attempts=self.view.attempts, goodput_ratio=self.view.goodput_ratio)

    def _forgotten(self, counted: Counted, known: list[Attempt], thresholds: Thresholds) -> api.Job | None:
        """Return what was counted of attempts that are not among these; None without any."""
        known = [attempt for attempt in known if attempt.rank == 0 and attempt.begin_s <= counted.end_s]
        left = _added(counted.job, _view(self.job, known, thresholds)[0], -1) if counted.job and known else counted.job
        return left if left is not None and left.attempts > 0 else None

    def done_before(self, attempt: Attempt) -> int:
        """Return the number after the last step of its training that was done before this attempt."""
        done = 0
        for each in sorted(self.attempts.values(), key=lambda each: each.end_s, reverse=True):
            if 2 * each.overlap_s(attempt) > each.end_s - each.alive_s:
                continue
            if not each.is_resumed_by(attempt):
                break
            done, attempt = max(done, each.sender.reached), each
        return done


class Jobs:
    """The jobs of this node."""

    def __init__(self, thresholds: Thresholds = THRESHOLDS) -> None:
        self._jobs: dict[str, Job] = {}
        self._thresholds = thresholds

    def update(self, runs: Iterable[Run]) -> None:
        """Take over what is known of these runs' processes."""
        changed: dict[str, tuple[Job, list[Run]]] = {}
        for run in runs:
            if run.earlier is None:
                of_user = (job for job in self._jobs.values() if job.uid == run.uid)
                run.earlier = {key: sender for job in of_user for key, sender in job.senders_of(run).items()}
            if run.hello is None:  # whose it is comes with that
                continue
            name = run.hello.job or run.run
            job = self._jobs.get(name)
            if job is not None and run.uid is not None and job.uid not in (None, run.uid):
                name = f"{name}@{run.uid}"
                job = self._jobs.get(name)
            if job is None:
                if len(self._jobs) >= MAX_JOBS:
                    self._forget_oldest(Counter(job.uid for job in self._jobs.values()).most_common(1)[0][0])
                job = self._jobs[name] = Job(name, bool(run.hello.job), run.uid)
            if job.uid != run.uid:
                continue
            changed.setdefault(name, (job, []))[1].append(run)
            last, end_s = next(reversed(run.senders.values()), None), 0.0
            for key, sender in (run.earlier | run.senders).items():
                status = run.status if sender is last else ENDED if sender.said_bye else LOST
                if sender.sent is None or (sender.began_ns is None and status == RUNNING):
                    continue
                if sender.moved_s is None and sender.started_ns:
                    job.place(sender)
                begin_s = max(sender.started_s, end_s)
                alive_s = min(begin_s, max(sender.began_s, end_s, begin_s - 60))
                end_s = begin_s + sum(sender.sent.states_ns.values()) / 1e9
                attempt = Attempt(run.run, run.rank, sender, status, begin_s, end_s, alive_s)
                if sender.done_before is None and sender.first_step is not None:
                    job.attempts.pop((run.run, run.rank, key), None)  # as it was before its number was known
                    sender.follow(job.done_before(attempt))
                if end_s > job.forgotten_s:
                    job.attempts[run.run, run.rank, key] = attempt
        for uid in {job.uid for job, _ in changed.values()}:
            while sum(len(job.attempts) for job in self._jobs.values() if job.uid == uid) > _MOST_OF_USER:
                self._forget_oldest(uid)
        for each, of_job in changed.values():
            attempts, each.view, each.part, facts = each.one_after_another(), None, None, None
            if attempts and (each.declared or len(attempts) > 1 or attempts[0].sender.rewinds):
                facts = each.count(attempts, (run.counted for run in of_job), self._thresholds)
            for run in of_job:
                run.job, run.counted = facts, each.counted

    def _forget_oldest(self, uid: int | None) -> None:
        """Forget the one of a user's jobs that ended first."""
        of_user = {name: job.attempts.values() for name, job in self._jobs.items() if job.uid == uid}
        ended_s = {name: max((each.end_s for each in attempts), default=0.0) for name, attempts in of_user.items()}
        del self._jobs[min(ended_s, key=ended_s.__getitem__)]

    def runs_of(self, names: Container[str]) -> dict[str, set[str]]:
        """Return those of these runs that belong to each job."""
        return {name: {run for run, *_ in job.attempts if run in names} for name, job in self._jobs.items()}

    def views(self, served: bool = False) -> list[api.Job]:
        """Return the jobs that are declared or were resumed; `served`: what metrics have of them."""
        return [view for job in self._jobs.values() if (view := job.part if served else job.view) is not None]


def _added(job: api.Job, other: api.Job | None, sign: int = 1) -> api.Job:
    """Return a job with another one's attempts before its own, or without these."""
    if other is None:
        return job
    sums: dict[str, Any] = {}
    for name in ("states", "restart", "lost"):
        one, more = getattr(job, name), getattr(other, name)
        sums[name] = {key: max(0.0, one.get(key, 0.0) + sign * more.get(key, 0.0)) for key in {**one, **more}}
    for name in ("attempts", "interruptions", "steps", "redone_steps", "lost_steps"):
        one, more = getattr(job, name), getattr(other, name)
        sums[name] = None if one is None or more is None else max(0, one + sign * more)
    if job.numbers is not None and other.numbers is not None:
        sums["numbers"] = min(job.numbers[0], other.numbers[0]), job.numbers[1]
    wall_s = sum(sums["states"].values())
    goodput_ratio = sums["states"].get(COMPUTE, 0.0) / wall_s if wall_s > 0 else None
    return replace(job, started_s=job.last_message_s - wall_s, goodput_ratio=goodput_ratio, **sums)


def _view(name: str, attempts: list[Attempt], thresholds: Thresholds) -> tuple[api.Job, JobFacts]:
    states, restart, lost = (defaultdict[str, float](float) for _ in range(3))
    is_known = all(attempt.sender.next_number is not None or not attempt.sent.steps for attempt in attempts)
    lost_steps, interrupted, came_back_s = 0, list[int](), dict[int, float]()
    reached: int | None = None
    for number, attempt in reversed([*enumerate(attempts)]):
        sender, sent, trained_ns = attempt.sender, attempt.sent, attempt.sender.trained_ns()
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        if following is not None and not attempt.is_resumed_by(following):
            reached = following = None
        reached = sender.next_number if reached is None else reached
        # What it still did after the next one's beginning is not in the job's wall clock.
        until_s = attempts[number + 1].begin_s if number + 1 < len(attempts) else attempt.end_s
        per_s = 1e9 * max(1.0, (attempt.end_s - attempt.begin_s) / max(1e-6, until_s - attempt.begin_s))
        # Of its new steps those beyond the job's next one: nothing was built upon them.
        unused = sender.new_steps(reached) if is_known and reached is not None else 0
        lost_steps += unused
        share = unused / max(1, sent.steps - sender.redone_steps)
        for state, ns in sent.states_ns.items():
            redone_s = sender.redone_ns.get(state, 0) / per_s
            lost_s = (trained_ns.get(state, 0) / per_s - redone_s) * share
            lost[state] += lost_s
            states[REDONE] += redone_s
            states[state] += ns / per_s - redone_s - lost_s
        if attempt.is_interrupted(following):
            interrupted.append(number)
        if number:
            gap_s = max(0.0, attempt.begin_s - attempts[number - 1].end_s)
            before_s = min(gap_s, max(0.0, attempt.begin_s - sender.began_s))
            states[DOWN] += gap_s - before_s
            begun_ns = sender.begun_by_state()
            restart["imports"] += before_s
            for part, ns in (*sender.begun_ns.items(), (STARTUP, begun_ns[STARTUP])):
                restart[part] += ns / per_s
            for state, ns in begun_ns.items():
                states[state] -= ns / per_s
            came_back_s[number - 1] = gap_s + (sum(sender.begun_ns.values()) + begun_ns[STARTUP]) / per_s
    states[RESTART], states[LOST_WORK] = sum(restart.values()), sum(lost.values())
    wall_s, last = sum(states.values()), attempts[-1]
    alive_s = sum(sum(attempt.sent.states_ns.values()) for attempt in attempts) / 1e9
    save_s = sum(attempt.sent.states_ns.get(CHECKPOINT, 0) for attempt in attempts) / 1e9
    facts = JobFacts(
        interruptions=len(interrupted),
        alive_s=alive_s,
        trained_s=sum(sum(attempt.sender.trained_ns().values()) for attempt in attempts) / 1e9 - save_s,
        saves=sum(attempt.sent.saves for attempt in attempts),
        save_s=save_s,
        restart_s=sum(came_back_s.get(number, 0.0) for number in interrupted),
        repeated_s=states[REDONE] + states[LOST_WORK] if is_known else None,
        steps=sum(attempt.sent.steps for attempt in attempts),
    )
    firsts = [first for each in attempts for first, _ in each.sender.pieces]
    finding = checkpoint_interval(Window(duration_s=wall_s, job=facts), thresholds)
    view = api.Job(
        job=name,
        status=cast(api.RunStatus, last.status),
        started_s=attempts[0].begin_s - (last.sender.moved_s or 0.0),
        last_message_s=last.end_s - (last.sender.moved_s or 0.0),
        attempts=len(attempts),
        interruptions=facts.interruptions,
        goodput_ratio=states[COMPUTE] / wall_s if wall_s > 0 else None,
        states={state: seconds for state, seconds in states.items() if seconds > 0},
        steps=facts.steps,
        redone_steps=sum(attempt.sender.redone_steps for attempt in attempts) if is_known else None,
        lost_steps=lost_steps if is_known else None,
        numbers=(min(firsts), max(each.sender.reached for each in attempts)) if is_known and firsts else None,
        restart={part: seconds for part, seconds in restart.items() if seconds > 0},
        lost={state: seconds for state, seconds in lost.items() if seconds > 0},
        findings=() if finding is None else (finding,),
        runs=tuple(dict.fromkeys(attempt.run for attempt in reversed(attempts)))[::-1],
    )
    return view, facts
