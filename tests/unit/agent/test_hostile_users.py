"""What one user sends costs another user's run nothing: quotas, memory and disk are bounded by user, also over time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuwatch import wire
from gpuwatch_agent.receiver import Arrival
from tests.unit.agent.hooks import MS, NOW_S, FakeHook, S
from tests.unit.agent.test_hostile_messages import ALICE, BEGIN_NS, MALLORY, check_honest, columns, honest
from tests.unit.agent.whole_agent import WholeAgent


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholeAgent]:
    agent = WholeAgent(tmp_path, monkeypatch, BEGIN_NS)
    yield agent
    agent.close()


def test_a_users_many_processes_cost_another_user_nothing(agent: WholeAgent) -> None:
    """A thousand processes within their own quotas, and each second others: together they are beyond their user's."""
    hook, hello = FakeHook(BEGIN_NS, run="honest"), wire.encode(FakeHook(BEGIN_NS, run="bad", pid=666).hello())

    def disturb(second: int) -> None:
        for process in range(1000):
            agent.hear(*[hello] * 30, peer=MALLORY._replace(pid=second * 1000 + process))

    honest(agent, hook, 4, disturb)
    check_honest(agent, hook)
    assert agent.receiver.received == pytest.approx(20_000 + 3 * 4000, abs=2000)
    assert len(agent.receiver._quotas) <= 4096 + 2


def wide(run: str, number: int) -> tuple[wire.Hello, wire.Steps]:
    """Messages with nearly as much in them as is taken, but for steps."""
    hook = FakeHook(BEGIN_NS, run=run, sender=f"{run} {number}", pid=700 + number, job="j" * 256).step()
    hook.declared_ns = {f"{n:0136}": 1 for n in range(9)}
    hook.spend("other", S // 2)
    tags = {f"{n:0256}": "x" * 256 for n in range(32)}
    loader = wire.Loader(num_workers=1024, worker_pids=tuple(range(1 << 20, (1 << 20) + 1024)))
    return msgspec.structs.replace(hook.hello(), tags=tags, versions=tags, loader=loader), hook.message()


def test_what_is_kept_of_a_users_runs_is_bounded_in_bytes(agent: WholeAgent) -> None:
    hook = FakeHook(BEGIN_NS, run="honest")

    def disturb(second: int) -> None:
        for number in range(150):
            agent.hear(*wide(f"wide-{number}", second), peer=MALLORY._replace(pid=700 + second))

    honest(agent, hook, 5, disturb)
    check_honest(agent, hook)
    runs = agent.sampler._runs.runs
    assert 20 < len(runs) < 120 and agent.failures().keys() == {"serve"}
    assert sum(run.kept_bytes for run in runs.values()) < 5 << 20
    assert len(msgspec.json.encode(agent.sampler.snapshot.runs)) < 5 << 20  # type: ignore[union-attr]


def test_a_hello_has_a_size_and_a_run_a_name_that_can_be_served(agent: WholeAgent) -> None:
    hello = wide("large", 1)[0]
    deaths = tuple(wire.WorkerDeath(pid=1 << 20, signal=9, memory_limit_bytes=1 << 40) for _ in range(256))
    phases = FakeHook(BEGIN_NS, run="phases").step()
    phases.phases_ns |= {f"phase {n}": 1 for n in range(20)}
    agent.clock.now_ns = BEGIN_NS + S
    agent.hear(msgspec.structs.replace(hello, worker_deaths=deaths), peer=MALLORY)
    agent.hear(FakeHook(BEGIN_NS, run="r" * 137).hello(), phases.message(), peer=MALLORY)
    assert dict(agent.receiver.rejected) == {"too_large": 1, "malformed": 2}
    agent.hear(FakeHook(BEGIN_NS, run="r" * 136).hello(), peer=MALLORY)
    assert agent.receiver.received == 1


def test_steps_kept_of_many_runs_are_bounded_together(agent: WholeAgent) -> None:
    hooks = [FakeHook(BEGIN_NS, run=f"run-{n}", sender=str(n), pid=1000 + n) for n in range(160)]
    for second in range(1, 8):
        for hook in hooks:
            for _ in range(200):
                hook.step(3 * MS, 2 * MS)
            agent.hear(hook.message(), peer=ALICE._replace(pid=hook.pid))
        agent.tick(BEGIN_NS + second * S)
    runs = list(agent.sampler._runs.runs.values())
    assert [len(run.steps) for run in runs] == [96_000 // 160] * 160
    traces = [stretch.columns for run in runs for stretch in run.trace._stretches if stretch.columns]
    assert sum(len(column) for found in traces for column in found.values()) <= 10 << 20
    for hook in hooks[1:]:
        agent.hear(hook.bye(), peer=ALICE._replace(pid=hook.pid))
    agent.tick(BEGIN_NS + 10 * S)
    agent.tick(BEGIN_NS + 50 * S)
    ended = [run for run in agent.sampler._runs.runs.values() if run.status == "ended"]
    assert len(ended) == 64 and not any(run.steps or run.seconds for run in ended)


def test_a_job_is_of_its_first_user(agent: WholeAgent) -> None:
    """Another user's run of the same job is no attempt of it, and has no series of the same labels."""
    hook, other = FakeHook(BEGIN_NS, run="honest"), FakeHook(BEGIN_NS, run="bad", sender="bad", pid=666)

    def disturb(second: int) -> None:
        agent.hear(other.hello(), other.spend("stalled", S).message(), peer=MALLORY)

    honest(agent, hook, 4, disturb)
    check_honest(agent, hook)
    job, its = agent.sampler.snapshot.jobs  # type: ignore[union-attr]
    assert (its.job, its.runs) == (f"job-7@{MALLORY.uid}", ("bad",))
    assert (job.job, job.runs, job.attempts, "stalled" in job.states) == ("job-7", ("honest",), 1, False)


def test_a_users_jobs_are_bounded_and_cost_no_other_ones(agent: WholeAgent) -> None:
    hook = FakeHook(BEGIN_NS, run="honest")

    def disturb(second: int) -> None:
        for number in range(300):
            names = {"run": f"bad-{number % 100}", "sender": f"{second}-{number}", "job": f"bad-{number % 290}"}
            bad = FakeHook(hook.at_ns - S, **names).spend("compute", S)  # type: ignore[arg-type]
            agent.hear(bad.hello(), bad.bye(), peer=MALLORY._replace(pid=second * 300 + number + 1))

    honest(agent, hook, 12, disturb)
    check_honest(agent, hook)
    jobs = agent.sampler._jobs._jobs
    assert len(jobs) <= 256 and sum(len(job.attempts) for job in jobs.values()) <= 2049
    assert "job-7" in jobs


def test_a_flood_of_steps_takes_the_place_of_its_own_users_history(agent: WholeAgent) -> None:
    agent.history._keep_bytes = 4 << 20
    hook, bad = FakeHook(BEGIN_NS, run="honest"), FakeHook(BEGIN_NS, run="bad", sender="bad", pid=666)

    def disturb(second: int) -> None:
        for _ in range(16):
            message = bad.spend("compute", 60 * MS).message()
            agent.hear(
                bad.hello(), msgspec.structs.replace(message, columns=columns(1024), first_step=bad.steps), peer=MALLORY
            )
            bad.steps += 1024

    honest(agent, hook, 40, disturb)
    check_honest(agent, hook)
    kept = agent.history.reader.steps("bad", 0, 20)
    assert 0 < kept.steps < bad.steps / 4 and agent.receiver.rejected.total() == 0
    assert agent.history._used_bytes() < 8 << 20 and agent.history.failures == 0


def test_the_last_of_many_kept_runs_are_read(agent: WholeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 short runs a minute leave 400,000 in a day: an answer with all of them would not fit into memory."""
    hook = FakeHook(BEGIN_NS, run="honest")
    monkeypatch.setattr("gpuwatch_agent.history.reader._MOST_RUN_BYTES", 20_000)
    monkeypatch.setattr("gpuwatch_agent.history._MOST_RUNS_BYTES", 40_000)

    def disturb(second: int) -> None:
        for number in range(20):
            short = FakeHook(hook.at_ns - S, run=f"{second}-{number}", sender=f"{second}-{number}", pid=number + 1)
            agent.hear(short.hello(), short.step().bye(), peer=MALLORY._replace(pid=number + 1))

    honest(agent, hook, 10, disturb)
    records = agent.history.reader.records()
    assert 5 < len(records) < 40 and any(run.run.startswith("9-") for run in records)
    count, size = agent.history._connection.execute("SELECT count(*), sum(length(record)) FROM run").fetchone()
    assert len(records) < count < 200 and size <= 88_000  # what five seconds add, and the limit
    check_honest(agent, hook)


def test_a_node_that_was_suspended_books_nothing_for_it_and_deletes_nothing(agent: WholeAgent) -> None:
    """The monotonic clock stands still; at the next tick the agent's and the hooks' wall clock is eight hours ahead."""
    hook = FakeHook(BEGIN_NS, run="honest")
    honest(agent, hook, 5)
    started_s = agent.sampler.snapshot.runs[0].started_s  # type: ignore[union-attr]
    agent.clock.suspended_s = 8 * 3600.0
    hook.wall_offset_ns += 8 * 3600 * S
    honest(agent, hook, 5)
    check_honest(agent, hook)
    (run,) = agent.sampler.snapshot.runs  # type: ignore[union-attr]
    assert (run.status, run.activity) == ("running", "step")
    assert sum(run.states.values()) == pytest.approx(10.0) and "unknown" not in run.states
    assert run.started_s == started_s and run.last_message_s == pytest.approx(agent.clock.time(), abs=1)
    asked = {"start_s": NOW_S, "end_s": agent.clock.time(), "points": 100_000}
    (served,) = agent.history.reader.series("gpuwatch_steps_total", {}, **asked)  # type: ignore[arg-type]
    assert [value for _, value in served.points] == [10.0 * second for second in range(1, 11)]
    assert served.points[5][0] - served.points[4][0] == pytest.approx(8 * 3600 + 1)


def test_no_tick_is_kept_by_a_collectors_error(agent: WholeAgent) -> None:
    """The error of a node without a driver was raised each second; its traceback kept the messages of all seconds."""

    def kept() -> int:
        gc.collect()
        return sum(type(each) is Arrival for each in gc.get_objects())

    before = kept()  # other tests' agents may have some
    hook = FakeHook(BEGIN_NS, run="honest")
    honest(agent, hook, 5)
    assert kept() - before <= 4, "those of a second"
