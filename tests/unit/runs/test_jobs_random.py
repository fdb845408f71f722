"""Random jobs on one node against what really happened: attempts killed, agents restarted, clocks set, reboots."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from msgspec.structs import replace

from gpuwatch import api, wire
from gpuwatch.wire.sockets import Peer
from gpuwatch_agent.exporter import job_samples
from gpuwatch_agent.runs import RunKey, RunRegistry, read_record
from gpuwatch_agent.runs.jobs import Jobs
from tests.unit.agent.hooks import MS, NOW_S, FakeHook, S


@dataclass
class Truth:
    """One attempt as the agent can know it. Times in ns of a clock that nothing sets."""

    boot: str
    begin_ns: int
    pieces: list[tuple[int, int]]  # from each checkpoint on: steps that were made before, global number of the next one
    end_ns: int = 0  # of its last message that an agent took and kept; 0: of none
    steps: int = 0
    has_hello: bool = False


class Node:
    """A node with an agent, which ticks once a second and keeps its records."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.records: dict[RunKey, bytes] = {}
        self.wall_off_s, self.boots = 0.0, 0
        self.boot_ns = 0
        self.reboot(0)

    def reboot(self, at_ns: int) -> None:
        self.boots, self.boot_ns = self.boots + 1, at_ns - 30 * S
        self.boot = f"boot-{self.boots}"
        self.alive.clear()
        self.start(at_ns)

    def now(self, at_ns: int) -> tuple[int, float]:
        return at_ns - self.boot_ns, NOW_S + at_ns / 1e9 + self.wall_off_s

    def start(self, at_ns: int) -> None:
        self.is_up, self.jobs = True, Jobs()
        self.registry = RunRegistry(self.boot, lambda hello: None if hello is None else hello.pid in self.alive)
        records = [read_record(record) for record in self.records.values()]
        self.registry.restore(records, *self.now(at_ns))
        self.jobs.update(sorted(records, key=lambda run: run.started_s))

    def send(self, message: wire.Message, at_ns: int, pid: int) -> bool:
        if self.is_up:
            origin = replace(message.origin, monotonic_ns=at_ns - self.boot_ns)
            self.registry.apply(replace(message, origin=origin), *self.now(at_ns), Peer(1000, pid))
        return self.is_up

    def tick(self, at_ns: int) -> None:
        now_ns, now_s = self.now(at_ns)
        self.registry.excuse_pause(now_ns)
        self.registry.forget_ended(now_s)
        for run in self.registry.runs.values():
            run.pass_time(now_ns, now_s, None if run.hello is None else run.hello.pid in self.alive)
        self.jobs.update(run for run in self.registry.runs.values() if run.changed)
        for run in self.registry.runs.values():
            record = run.record() if run.changed else None
            if record is not None:
                self.records[run.key], run.changed = record, False


def count(jobs: Jobs, served: dict[tuple[str, ...], float]) -> api.Job:
    """Return the only job, whose counters have not fallen since they were served; serve them."""
    ((job,), (part,)) = jobs.views(), jobs.views(served=True)
    for each in job, part:
        assert sum(each.states.values()) == pytest.approx(each.last_message_s - each.started_s, abs=1e-3)
    samples = job_samples([part], {part.job: []})
    counters = {(each.metric, *each.labels): each.value for each in samples if each.metric.endswith("_total")}
    fallen = {key: (value, counters.get(key)) for key, value in served.items() if counters.get(key, 0.0) < value}
    assert not fallen
    served.update(counters)
    return job


def check(job: api.Job, attempts: list[Truth]) -> None:
    """Compare the job with what happened."""
    wall_s = sum(job.states.values())
    assert (job.attempts, job.steps) == (len(attempts), sum(each.steps for each in attempts))
    done = redone = 0
    for each in attempts:
        for (at, first), (until, _) in pairwise([*each.pieces, (each.steps, 0)]):
            after = first + max(0, min(until, each.steps) - at)
            redone, done = redone + max(0, min(done, after) - first), max(done, after)
    assert (job.redone_steps, job.numbers) == (redone, (0, done))
    if len({each.boot for each in attempts}) == 1:  # else only the wall clock knows the time between
        assert wall_s == pytest.approx((attempts[-1].end_ns - attempts[0].begin_ns) / 1e9, abs=1e-3)


@pytest.mark.parametrize("seed", [*range(40), 173, 185, 276])
def test_random_jobs(seed: int) -> None:
    chance, node = random.Random(seed), Node()
    attempts: list[Truth] = []
    served: dict[tuple[str, ...], float] = {}
    tick_ns = up_ns = at_ns = S
    reboots, checked, done = chance.choice([0.0, 0.3]), 0, 0

    def tick() -> None:
        nonlocal tick_ns, up_ns, checked
        if node.is_up:
            node.tick(tick_ns)
            known = [each for each in attempts if each.end_ns]
            if known and all(each.has_hello for each in known):
                check(count(node.jobs, served), known)
                checked += 1
        if node.is_up and chance.random() < 0.03:
            node.is_up, up_ns = False, tick_ns + chance.choice([1, 3, 20, 200]) * S
        elif not node.is_up and tick_ns >= up_ns:
            node.start(tick_ns)
        if chance.random() < 0.03:
            node.wall_off_s += chance.choice([-3600, -5, -0.5, 0.5, 5, 3600])
        tick_ns += S

    for number in range(chance.randint(2, 7)):
        if chance.random() < reboots:
            at_ns += chance.randint(5, 60) * S
            while tick_ns <= at_ns:
                node.is_up, tick_ns = False, tick_ns + S
            node.reboot(at_ns)
        pid, began_ns = 100 + number, at_ns
        node.alive.add(pid)
        begin_ns = began_ns + chance.choice([0, 2, 20, 90]) * S
        end_ns = begin_ns + 50 * MS + int(chance.choice([0.3, 2, 10, 60]) * chance.random() * S)
        first, rewinds = chance.choice([0, max(0, done - 50), max(0, done - 5), done]), ()
        truth = Truth(node.boot, begin_ns, [(0, first)])
        attempts.append(truth)
        hook = FakeHook(
            begin_ns - node.boot_ns, run=f"slurm-7.{number}", sender=str(number), boot_id=node.boot, pid=pid
        )
        every_ns, step_ns = chance.choice([100, 300, 500]) * MS, chance.choice([20, 100, 700]) * MS
        message_ns, hello_ns = begin_ns + chance.randrange(every_ns), 0
        while (next_ns := min(tick_ns, message_ns)) < end_ns:
            if next_ns == tick_ns:
                tick()
                continue
            while hook.at_ns + step_ns <= message_ns - node.boot_ns:
                hook.step(step_ns // 3, step_ns - step_ns // 3)
            at, number_at = [(0, first), *rewinds][-1]
            if goes_back := chance.random() < 0.05:
                rewinds += ((hook.steps, max(0, number_at + hook.steps - at - chance.randrange(1, 50))),)
            if message_ns - hello_ns >= S or goes_back:
                ticks, hello_ns = (began_ns - node.boot_ns) * 100 // S, message_ns
                hello = hook.hello(start_ticks=ticks, first_step=first, rewinds=rewinds)
                if node.send(hello, message_ns, pid):
                    truth.has_hello, truth.pieces = True, [(0, first), *rewinds]
            if node.send(hook.message(), message_ns, pid):
                truth.end_ns, truth.steps = hook.at_ns + node.boot_ns, hook.steps
            message_ns += every_ns
        node.alive.discard(pid)
        at, number_at = truth.pieces[-1]
        done = number_at + max(0, truth.steps - at)
        at_ns = end_ns + int(chance.choice([1.0, 4.0, 30.0, 1200.0]) * chance.random() * S)
        while tick_ns <= max(at_ns, end_ns + S):  # what it sent last is kept
            tick()
        at_ns = max(at_ns, tick_ns - S + 1)
    assert checked or not all(each.has_hello for each in attempts)


@pytest.mark.parametrize("seed", range(60))
def test_no_counter_falls_where_attempts_overlap(seed: int) -> None:
    """An attempt that hangs outlives the beginning of the next one, by less than half of what either lives.

    Or agents are restarted meanwhile.
    """
    chance, node = random.Random(seed), Node()
    served: dict[tuple[str, ...], float] = {}
    begin_ns, hooks, events = 5 * S, list[FakeHook](), list[tuple[int, int, str]]()
    end_ns, lived_ns, lives = begin_ns, 10 * S, list[tuple[int, int]]()
    for number in range(chance.randint(2, 4)):
        if number:
            overlap_ns = int(chance.random() * lived_ns / 3)
            begin_ns = end_ns + chance.choice([-overlap_ns, -min(overlap_ns, S // 2), 3 * S])
        lived_ns = int(chance.uniform(4, 30) * S)
        lived_ns = max(lived_ns, 3 * (end_ns - begin_ns))
        hooks.append(
            FakeHook(begin_ns + 30 * S, run=f"slurm-7.{number}", sender=str(number), boot_id="boot-1", pid=number)
        )
        end_ns = begin_ns + lived_ns
        lives.append((begin_ns, end_ns))
        at_ns = begin_ns + chance.randrange(S // 2)
        while at_ns < end_ns:
            events.append((at_ns, number, "send"))
            at_ns += S // 2
    events += [(at_ns, -1, "tick") for at_ns in range(0, end_ns + 5 * S, S)]
    for at_ns, number, what in sorted(events):
        if what == "tick":
            node.alive = {pid for pid, lived in enumerate(lives) if lived[0] <= at_ns < lived[1]}
            node.tick(at_ns)
            if node.jobs.views():
                count(node.jobs, served)
            if chance.random() < 0.05:
                node.start(at_ns)
            continue
        hook = hooks[number]
        while hook.at_ns < at_ns + 30 * S:
            hook.step(chance.randrange(1, 300) * MS, chance.randrange(1, 300) * MS)
            if chance.random() < 0.1:
                hook.spend(chance.choice(["eval", "checkpoint", "stalled"]), chance.randrange(1, 500) * MS)
        node.send(hook.hello(start_ticks=hook.ledger.start_ns * 100 // S, first_step=10 * number), at_ns, number)
        node.send(hook.message(), at_ns, number)
    job = count(node.jobs, served)
    assert job.attempts == len(hooks)
    assert sum(job.states.values()) == pytest.approx((hooks[-1].at_ns - hooks[0].ledger.start_ns) / 1e9, abs=1e-3)
