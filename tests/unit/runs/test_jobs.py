"""The ledger of a job over its attempts: it closes, and what was done twice is counted once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from msgspec.structs import asdict, replace
from typer.testing import CliRunner

from gpuwatch import api
from gpuwatch.api.client import Client
from gpuwatch.cli import build
from gpuwatch.diagnosis.rates import cost_of
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.window import Window
from gpuwatch.errors import SourceError
from gpuwatch.hook.identity import identify
from gpuwatch.tools.reports.ledgers import job_text, of_runs
from gpuwatch_agent.exporter import job_samples
from gpuwatch_agent.runs import ENDED, LOST, Run, read_record
from gpuwatch_agent.runs.jobs import MAX_ATTEMPTS, MAX_JOBS, Jobs, _added
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S, wall_s

ENDS = pytest.mark.parametrize("each", [1, 7], ids=["a message a step", "a message for several steps"])


class Node:
    """The runs and jobs of an agent."""

    def __init__(self) -> None:
        self.jobs, self.runs = Jobs(), dict[tuple[str, int], Run]()

    def take(self, hook: FakeHook, *, first_step: int | None = None, bye: bool = False) -> None:
        run = self.runs.setdefault((hook.run, hook.rank), Run(hook.run, hook.rank, BOOT))
        for message in (
            hook.hello(first_step=first_step, start_ticks=0),
            hook.message(),
            *([hook.bye()] if bye else []),
        ):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns))
        self.jobs.update([run])

    def only(self) -> api.Job:
        (view,) = self.jobs.views()
        return view


def attempt(
    node: Node,
    begin_s: int,
    steps: int,
    *,
    each: int = 1,
    first_step: int | None = None,
    bye: bool = False,
    **names: str,
) -> FakeHook:
    """Have a process start up for 2 s and make steps of 100 ms, of which 40 compute."""
    hook = FakeHook(begin_s * S, **{"sender": f"at-{begin_s}", **names})
    hook.spend("startup", 2 * S)
    node.take(hook, first_step=first_step)
    for done in range(1, steps + 1):
        hook.step()
        if done % each == 0 or done == steps:
            node.take(hook, first_step=first_step, bye=bye and done == steps)
    return hook


@ENDS
def test_a_killed_job_that_goes_on_at_its_checkpoint(each: int) -> None:
    node = Node()
    attempt(node, 100, 60, each=each, first_step=0)  # killed at 108.0
    attempt(node, 114, 50, each=each, first_step=40, bye=True)  # 40 … 89; ends at 121.0
    job = node.only()
    assert (job.attempts, job.interruptions, job.steps, job.redone_steps, job.status) == (2, 1, 110, 20, "ended")
    assert job.states == pytest.approx(
        {"startup": 2, "restart": 2, "down": 6, "input_wait": 5.4, "compute": 3.6, "redone": 2.0}, abs=1e-6
    )
    assert sum(job.states.values()) == pytest.approx(21)
    assert job.goodput_ratio == pytest.approx(3.6 / 21)


def test_what_is_not_known_to_be_redone_is_absent() -> None:
    node = Node()
    attempt(node, 100, 60)
    attempt(node, 114, 50)
    assert node.only().redone_steps is None
    assert "redone" not in node.only().states


def test_attempts_of_other_runs_of_the_scheduler_s_job_belong_to_it() -> None:
    node = Node()
    attempt(node, 100, 10, run="slurm-7.0", first_step=0, bye=True)
    attempt(node, 110, 10, run="slurm-7.1", first_step=10)
    job = node.only()
    assert job.runs == ("slurm-7.0", "slurm-7.1")
    assert job.states["down"] == pytest.approx(7) and job.redone_steps == 0 and job.interruptions == 0


def test_ranks_and_runs_at_the_same_time_are_not_added() -> None:
    node = Node()
    for rank in (1, 0, 2):
        hook = FakeHook(100 * S, rank=rank, sender=f"rank-{rank}").spend("startup", (rank + 1) * S).step()
        node.take(hook)
    job = node.only()
    assert job.attempts == 1
    assert job.states["startup"] == pytest.approx(1)


def test_metrics_have_each_attempt_of_a_job_once_where_its_rank_0_changes_nodes() -> None:
    """torchrun on two nodes: rank 0 is on a, then on b, then on a again. Each node has a rank of each attempt."""
    a, b = Node(), Node()
    for begin_s, first, steps, ranks in ((100, 0, 50, (0, 8)), (110, 30, 40, (8, 0)), (120, 60, 20, (0, 8))):
        for node, rank in zip((a, b), ranks, strict=True):
            lives(node, begin_s, begin_s + 2, begin_s + 2 + steps / 10, first_step=first, rank=rank, pid=begin_s + rank)
    for node in (a, b):
        job = node.only()
        assert (job.attempts, job.steps, job.redone_steps, sum(job.states.values())) == (3, 110, 30, pytest.approx(22))
    part_a, part_b = (node.jobs.views(served=True)[0] for node in (a, b))
    assert [(each.attempts, each.steps, each.numbers) for each in (part_a, part_b)] == [
        (2, 70, (0, 80)),
        (1, 40, (30, 70)),
    ]
    assert part_a.states["down"] == pytest.approx(120 - 107) and sum(part_a.states.values()) == pytest.approx(22)
    assert sum(part_b.states.values()) == pytest.approx(4)
    new = sum(each.steps - (each.redone_steps or 0) for each in (part_a, part_b))
    assert (part_a.redone_steps, part_b.redone_steps, new - 80) == (10, 20, 0), "the join finds no more to be redone"


def test_jobs_of_one_name_by_two_users_are_two_jobs() -> None:
    node = Node()
    for uid, run, steps in ((1001, "a-1", 60), (1002, "b-1", 10), (1002, "b-2", 20), (1001, "a-2", 30)):
        node.runs[run, 0] = Run(run, 0, BOOT, uid=uid)
        attempt(node, 100 + 100 * len(node.runs), steps, run=run, job="train")
    found = {job.job: (job.runs, job.attempts, job.steps) for job in node.jobs.views()}
    assert found == {"train": (("a-1", "a-2"), 2, 90), "train@1002": (("b-1", "b-2"), 2, 30)}


def test_a_run_is_a_job_once_it_was_resumed() -> None:
    node = Node()
    attempt(node, 100, 10, job="")
    assert not list(node.jobs.views())
    attempt(node, 105, 10, job="")
    assert node.only().job == "run-a" and node.only().attempts == 2


def test_a_run_s_name_that_is_used_again_after_a_good_end_is_another_job() -> None:
    node = Node()
    attempt(node, 100, 10, job="", first_step=0, bye=True)
    attempt(node, 200, 10, job="", first_step=0, bye=True)
    assert not list(node.jobs.views())
    attempt(node, 300, 10, job="", first_step=10)
    assert node.only().attempts == 2
    assert node.only().states["down"] == pytest.approx(97)


def test_imports_before_the_ledger_are_a_part_of_the_restart() -> None:
    node = Node()
    attempt(node, 100, 10)  # to 103.0
    hook = FakeHook(110 * S, sender="again").spend("startup", S).step()
    run = node.runs["run-a", 0]
    run.apply(hook.hello(start_ticks=10_600), hook.at_ns, wall_s(hook.at_ns))
    run.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
    node.jobs.update([run])
    assert node.only().states["down"] == pytest.approx(3)
    assert node.only().states["restart"] == pytest.approx(4 + 1)


def test_attempts_of_a_run_that_was_dropped_and_resumed_survive_the_agent() -> None:
    """A run that ended a quarter of an hour ago is dropped, so that its resumption begins a new record."""
    node = Node()
    attempt(node, 100, 60, first_step=0, job="")
    del node.runs["run-a", 0]
    attempt(node, 1000, 50, first_step=40, job="")
    assert (node.only().attempts, node.only().redone_steps) == (2, 20)
    for again in range(2):
        record = node.runs["run-a", 0].record()
        assert record is not None
        node = Node()
        node.jobs.update([read_record(record)])
        job = node.only()
        assert (job.attempts, job.interruptions, job.redone_steps) == (2 + again, 1 + again, 20 + 30 * again)
        assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s)
        attempt(node, 2000 + 1000 * again, 30, first_step=60, job="")


@pytest.mark.parametrize("boot", [BOOT, "boot-b"])
def test_it_survives_the_agent(boot: str) -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)
    record = node.runs["run-a", 0].record()
    assert record is not None
    record = read_record(record)
    later = Node()
    later.jobs.update([record])
    attempt(later, 114, 30, first_step=40, run="run-b")
    assert later.only().redone_steps == 20
    assert sum(later.only().states.values()) == pytest.approx(19)


def test_the_number_of_the_first_step_may_come_late() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)
    hook = attempt(node, 114, 30)
    assert node.only().redone_steps is None
    node.take(hook, first_step=40)
    assert node.only().redone_steps == 20
    assert node.only().states["redone"] == pytest.approx(2.0)


def test_a_late_number_of_the_first_step_makes_no_step_of_the_same_process_redone() -> None:
    """Its first Hello came before the loop; imports took longer than its ledger has been open."""
    node = Node()
    hook = FakeHook(110 * S).spend("startup", S)
    run = node.runs["run-a", 0] = Run("run-a", 0, BOOT)
    for first_step in (None, 0):
        for message in (hook.hello(start_ticks=10_000, first_step=first_step), hook.message()):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns))
        node.jobs.update([run])
        hook.step().step()  # done before the second Hello
    assert (node.only().steps, node.only().redone_steps) == (2, 0)
    assert "redone" not in node.only().states


def test_a_first_step_beyond_all_bounds_does_no_harm() -> None:
    node = Node()
    attempt(node, 100, 10, first_step=2**53)
    attempt(node, 110, 10, first_step=-(2**53))
    job = node.only()
    assert job.redone_steps == 10
    assert sum(job.states.values()) == pytest.approx(13)


def test_jobs_and_attempts_are_bounded() -> None:
    node = Node()
    for number in range(MAX_JOBS + 3):
        attempt(node, 100 + number, 1, run=f"run-{number}", job=f"job-{number}")
    assert len(list(node.jobs.views())) == MAX_JOBS
    node = Node()
    for number in range(MAX_ATTEMPTS + 3):
        attempt(node, 100 + 10 * number, 1, run=f"run-{number}")
    assert node.only().attempts == MAX_ATTEMPTS + 3
    assert len(node.only().runs) == MAX_ATTEMPTS


def test_a_step_across_the_border_is_split_by_steps() -> None:
    node = Node()
    attempt(node, 100, 10, first_step=0)
    attempt(node, 110, 10, each=10, first_step=5)
    job = node.only()
    assert job.redone_steps == 5
    assert job.states["redone"] == pytest.approx(0.5, abs=0.1 * MS / MS)


def test_the_page_s_example_is_what_the_command_prints() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0, job="llm-7")
    attempt(node, 114, 50, first_step=40, bye=True, job="llm-7")
    states = {"compute": 7200.0, "input_wait": 5400.0, "startup": 1800.0}  # of each rank
    joules, cost = {"compute": 6.92e6, "input_wait": 4.24e6}, cost_of(states, (2.5,), "EUR")
    rank = api.Run("r", 0, "n", "ended", 0.0, 0.0, 0.0, states=states, energy_joules=joules, gpus=("H100",), cost=cost)
    without_gpu = msgspec.structs.replace(rank, energy_joules={}, gpus=(), cost=None)
    held = of_runs([rank, rank, without_gpu])
    assert held["cost"] == pytest.approx(20) and held["gpu_hours"] == {
        "all": 8.0,
        "useful": 4.0,
        "starved": 3.0,
        "stalled": 0.0,
    }
    page = (Path(__file__).parents[3] / "docs/concepts/jobs.md").read_text()
    assert f"```\n{job_text(asdict(node.only()) | held)}\n```" in page
    assert not {"GPUs", "energy", "cost"} & {
        *job_text(asdict(node.only()) | of_runs([without_gpu])).split()
    }  # not known


def test_a_job_is_printed_without_its_gpus_while_the_history_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0, job="llm-7", bye=True)

    def unreadable(*_: Any, **__: Any) -> Any:
        raise SourceError("the history cannot be read now", "wait")

    monkeypatch.setattr(Client, "caught_up", lambda self: self)
    monkeypatch.setattr(Client, "jobs", lambda self: node.jobs.views())
    monkeypatch.setattr(Client, "runs", unreadable)
    text = CliRunner().invoke(build(typer), ["report", "--job", "llm-7"])
    assert (text.exit_code, text.stdout) == (0, job_text(asdict(node.only())) + "\n")


@pytest.mark.parametrize("given", ["x" * 200, " llm-7 ", "slurm:llm-7", "slurm:" + "x" * 200])
def test_a_job_is_found_by_the_name_that_its_environment_has(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have 128 characters of it, without the spaces around it."""
    node = Node()
    job = identify({"GPUWATCH_JOB": given.removeprefix("slurm:")}).job
    attempt(node, 100, 60, first_step=0, job=job, bye=True)
    monkeypatch.setattr(Client, "caught_up", lambda self: self)
    monkeypatch.setattr(Client, "jobs", lambda self: node.jobs.views())
    monkeypatch.setattr(Client, "runs", lambda self, kept: [])
    text = CliRunner().invoke(build(typer), ["report", "--job", given])
    assert (text.exit_code, text.stdout.splitlines()[0]) == (
        0,
        f"gpuwatch · job {job} · 8.0 s, 1 attempt, 0 interrupted",
    )


def test_the_runs_of_a_job_whatever_its_scheduler_calls_it() -> None:
    node = Node()
    attempt(node, 100, 6, run="slurm-4711.0", job="llm-7")
    attempt(node, 114, 5, run="slurm-4712.0", job="llm-7")
    attempt(node, 114, 5, run="alone", job="")  # not resumed: no job
    assert node.jobs.runs_of({"slurm-4712.0", "another"}) == {"llm-7": {"slurm-4712.0"}, "alone": set()}
    served = [
        each.labels for each in job_samples(node.jobs.views(True), node.jobs.runs_of(["slurm-4711.0", "slurm-4712.0"]))
    ]
    assert {each for each in served if "slurm" in each[-1]} == {("llm-7", "slurm-4711.0"), ("llm-7", "slurm-4712.0")}


def test_where_the_global_step_is_unknown_the_text_asks_for_it() -> None:
    node = Node()
    attempt(node, 100, 60)
    attempt(node, 114, 50)
    assert "of which an unknown number redone" in job_text(asdict(node.only()))
    text = job_text(asdict(node.only()))
    assert (
        "Watch(step=…)" in text and f"  goodput at most {node.only().goodput_ratio:.0%}: spent on new steps\n" in text
    )
    alone = Node()
    attempt(alone, 100, 60)  # nothing came before it
    assert "at most" not in job_text(asdict(alone.only()))


@pytest.mark.parametrize(("again", "shown"), [(0.0, ""), (1030.0, ", plus 1,030 repeated on another node")])
def test_the_joined_card_has_the_steps_of_another_node_where_there_are_any(again: float, shown: str) -> None:
    counted = {"wall_s": 5.0, "steps": 2334.0, "redone_elsewhere_steps": again, "nodes": 1.0, "attempts": 1.0}
    text = job_text({"job": "a", "states": {"compute": 5.0}, "causes": [], "runs": ["a"], **counted})
    assert f"  steps   2,334{shown}" in text.splitlines()


def test_steps_that_no_later_attempt_has_come_to_again_are_lost() -> None:
    """It dies at step 60 and resumes at 40: step by step, lost becomes redone, and the waste is always 20 steps."""
    node = Node()
    attempt(node, 100, 60, first_step=0)
    hook = FakeHook(114 * S, sender="again").spend("startup", S)
    node.take(hook, first_step=40)
    for done in range(31):
        job = node.only()
        assert (job.redone_steps, job.lost_steps) == (min(20, done), max(0, 20 - done))
        wasted_s = job.states.get("redone", 0.0) + job.states.get("lost", 0.0)
        assert wasted_s == pytest.approx(2.0)
        assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s)
        assert job.states["compute"] == pytest.approx(0.04 * (40 + done))
        node.take(hook.step(), first_step=40)


def test_what_is_lost_for_good_and_what_an_older_checkpoint_did_not_lose() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)  # 0 … 59
    attempt(node, 114, 5, first_step=40, bye=True)  # 40 … 44, and that is the end
    assert (node.only().redone_steps, node.only().lost_steps) == (5, 15)
    assert node.only().states["lost"] == pytest.approx(1.5)
    assert node.only().lost == pytest.approx({"input_wait": 0.9, "compute": 0.6})
    attempt(node, 130, 10, first_step=60)  # from a checkpoint that the first attempt had written after all
    assert (node.only().redone_steps, node.only().lost_steps) == (5, 0)
    attempt(node, 140, 10, first_step=200)  # steps that another node did
    assert (node.only().redone_steps, node.only().lost_steps) == (5, 0)


def test_an_attempt_that_made_no_step_changes_no_count_and_one_of_unknown_steps_makes_them_unknown() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)
    attempt(node, 114, 0)  # died in its imports
    attempt(node, 120, 30, first_step=40)
    job = node.only()
    assert (job.redone_steps, job.lost_steps, job.interruptions) == (20, 0, 2)
    assert job.states["restart"] == pytest.approx(4) and job.states["down"] == pytest.approx(6 + 4)
    attempt(node, 130, 1)
    assert (node.only().redone_steps, node.only().lost_steps) == (None, None)
    assert "lost" not in node.only().states


def test_what_a_process_does_again_after_it_went_back_to_a_checkpoint_is_redone() -> None:
    """At step 60 it loads the checkpoint of step 40, then at 50 that of step 20, and is killed.

    The next attempt resumes at 40.
    """
    node, rewinds = Node(), ((60, 40), (70, 20))
    hook = FakeHook(100 * S).spend("startup", 2 * S)

    def take() -> api.Job:
        for message in (
            hook.hello(first_step=0, rewinds=rewinds[: (hook.steps >= 60) + (hook.steps >= 70)]),
            hook.message(),
        ):
            node.runs.setdefault(("run-a", 0), Run("run-a", 0, BOOT)).apply(message, hook.at_ns, wall_s(hook.at_ns))
        node.jobs.update(node.runs.values())
        job = node.only()
        assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s)
        return job

    for done in range(1, 101):  # … 59, 40 … 49, 20 … 49
        hook.step()
        if done % 3 == 0 or done in (60, 70, 100):
            job = take()
            redone = max(0, done - 60) if done > 60 else 0
            reached = done if done < 60 else done - 20 if done < 70 else done - 50
            lost = 0 if done < 60 else 60 - max(reached, 20)
            assert (job.redone_steps, job.lost_steps, job.numbers) == (redone, lost, (0, min(done, 60)))
            assert job.states.get("redone", 0.0) + job.states.get("lost", 0.0) == pytest.approx((redone + lost) * 0.1)
    attempt(node, 120, 30, first_step=40)
    job = node.only()
    assert (job.attempts, job.interruptions, job.redone_steps, job.lost_steps) == (2, 1, 40 + 20, 0)
    assert job.numbers == (0, 70) and job.steps == 130


@pytest.mark.parametrize("number", [1_000_000, 2**53, 7, -(2**53)])
def test_a_process_that_goes_on_at_any_number_loses_and_redoes_no_more_than_it_did(number: int) -> None:
    node, hook = Node(), FakeHook(100 * S).spend("startup", 2 * S)
    for _ in range(35):
        hook.step()
    run = node.runs["run-a", 0] = Run("run-a", 0, BOOT)
    for message in (hook.hello(first_step=0, rewinds=((30, number),)), hook.message()):
        run.apply(message, hook.at_ns, wall_s(hook.at_ns))
    attempt(node, 120, 10, first_step=30)
    job = node.only()
    assert (job.steps, job.lost_steps) == (45, 5 if number > 40 else 0) and job.redone_steps is not None
    assert job.redone_steps <= 15 and min(job.states.values()) >= 0
    assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s) == pytest.approx(23)


def test_a_restart_s_parts() -> None:
    node = Node()
    attempt(node, 100, 10, first_step=0)  # to 103.0
    hook = FakeHook(112 * S, sender="again").spend("startup", S).spend("other", 7 * S)
    hook.declared_ns = {"checkpoint_load": 2 * S, "rendezvous": 4 * S, "warm up": S}
    run = node.runs["run-a", 0]

    def take() -> None:
        hello = hook.hello(start_ticks=10_600, first_step=10)
        for message in (hello, hook.message()):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns))
        node.jobs.update([run])

    take()
    hook.spend("compile", 5 * S).step()
    take()
    hook.spend("compile", 7 * S).spend("other", S).step()  # later: no part of the restart
    hook.declared_ns["checkpoint_load"] += S
    take()
    job = node.only()
    assert job.restart == pytest.approx(
        {"imports": 6, "rendezvous": 4, "startup": 1, "checkpoint_load": 2, "compile": 5}
    )
    assert job.states["restart"] == pytest.approx(18)
    assert job.states["compile"] == pytest.approx(7) and job.states["other"] == pytest.approx(2)
    assert job.states["down"] == pytest.approx(3)
    assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s)


def test_a_compilation_before_the_first_step_is_not_redone() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)
    hook = FakeHook(114 * S, sender="again").spend("startup", S)
    node.take(hook, first_step=40)
    node.take(hook.spend("compile", 9 * S).step(), first_step=40)
    assert node.only().states["redone"] == pytest.approx(0.1)
    assert node.only().restart == pytest.approx({"startup": 1, "compile": 9})


def test_another_training_of_the_job_after_one_that_ended_well_redoes_nothing() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0, run="slurm-7.0", bye=True)
    attempt(node, 114, 30, first_step=0, run="slurm-7.1", bye=True)
    job = node.only()
    assert (job.attempts, job.redone_steps, job.interruptions, job.lost_steps) == (2, 0, 0, 0)


@pytest.mark.parametrize(("bye", "served"), [(True, 1), (False, 4)], ids=["a sweep", "a restart loop"])
def test_the_trials_of_a_sweep_are_no_restarts_to_an_alert(bye: bool, served: int) -> None:
    node = Node()
    for number in range(4):
        attempt(node, 100 + 20 * number, 30, run=f"slurm-7.{number}", bye=bye)
    for run in node.runs.values():
        run.status = ENDED if bye else LOST
    node.jobs.update(node.runs.values())
    found = {
        each.metric: each.value for each in job_samples(node.jobs.views(True), node.jobs.runs_of(node.only().runs))
    }
    assert node.only().attempts == 4 and found["gpuwatch_job_attempts_total"] == served


def test_a_job_id_that_is_used_again_is_another_job() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0, bye=True)
    attempt(node, 90_000, 30, first_step=0)
    assert (node.only().attempts, node.only().steps) == (1, 30)


def test_a_pod_s_job_that_ended_well_is_another_one_when_its_name_comes_again() -> None:
    """Kubernetes does not restart what succeeded, and names are used again: every night, say."""
    node = Node()
    attempt(node, 100, 60, job="vision/train", run="pod-a", bye=True)
    attempt(node, 90_000, 30, job="vision/train", run="pod-b")  # killed
    attempt(node, 90_100, 20, job="vision/train", run="pod-c", bye=True)
    assert (node.only().attempts, node.only().steps) == (2, 50)


def test_an_attempt_that_ends_by_an_exception_was_interrupted() -> None:
    node = Node()
    hook = attempt(node, 100, 60, first_step=0)
    error = msgspec.structs.replace(hook.bye(), failed=True)
    node.runs["run-a", 0].apply(error, hook.at_ns, wall_s(hook.at_ns))
    attempt(node, 114, 30, first_step=60, bye=True)
    assert node.only().interruptions == 1


def test_a_clock_that_is_set_back_loses_no_attempt() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)
    hook = FakeHook(114 * S, sender="again", wall_offset_ns=0).spend("startup", S)
    run = node.runs["run-a", 0]
    for number in range(31):
        for message in (hook.hello(first_step=40, start_ticks=0), hook.message()):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns) - 3600)
        if number < 30:
            hook.step()
    node.jobs.update([run])
    job = node.only()
    assert (job.attempts, job.redone_steps, job.steps) == (2, 20, 90)
    assert sum(job.states.values()) == pytest.approx(8 + 6 + 4)


def test_ranks_that_start_a_moment_apart_redo_what_the_last_attempt_did_and_no_more() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)
    late = FakeHook(114 * S, sender="rank-1", rank=1).spend("startup", S)
    for _ in range(3):
        node.take(late.step(), first_step=60)
    attempt(node, 114, 30, first_step=60)
    assert node.only().redone_steps == 0


def test_a_hundred_restarts_close() -> None:
    node = Node()
    for number in range(100):
        attempt(node, 100 + 20 * number, 10, first_step=5 * number, run=f"run-{number % 9}")
    job = node.only()
    assert (job.attempts, job.interruptions, job.steps, job.redone_steps) == (100, 99, 1000, 99 * 5)
    assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s)
    begin = time.thread_time()  # of its own: others may have the core
    node.jobs.update(node.runs.values())
    assert time.thread_time() - begin < 0.5


def crashing(
    node: Node, crashes: int = 3, saves: int = 1, save_s: float = 1.0, trained_s: int = 300, steps_known: bool = True
) -> api.Job:
    """Have a job crash again and again, each attempt after `trained_s` in steps with `saves` checkpoints."""
    for number in range(crashes + 1):
        hook = FakeHook((100 + 1000 * number) * S, sender=f"at-{number}").spend("startup", 20 * S)
        hook.saves = saves
        if saves:
            hook.spend("checkpoint", int(saves * save_s * S))
        for _ in range(trained_s):
            hook.step(compute_ns=940 * MS)
        node.take(hook, first_step=0 if steps_known else None)
    return node.only()


def test_the_interval_between_checkpoints_that_would_lose_least() -> None:
    (found,) = crashing(Node()).findings
    # 1 s a save, an interruption every 1284 / 3 s: Young's interval is sqrt(2 × 1 × 428), Daly's 28.6 s
    assert found.cause == "checkpoint_interval" and found.severity == "warning"
    assert found.advice == "save every 28.6 s instead of every 3m 38s"
    assert found.evidence[0].value == pytest.approx(1200 / 5.5) and found.evidence[1].value == 3
    assert found.predicted_range is not None and found.predicted_speedup is not None
    low, high = found.predicted_range
    assert 1.0 < low < found.predicted_speedup < high < 3
    assert found.ratio == pytest.approx(1 - 1 / found.predicted_speedup, abs=0.01)


@pytest.mark.parametrize(
    "job",
    [
        {"crashes": 1},
        {"saves": 0},
        {"save_s": 0.0},
        {"saves": 10, "save_s": 1.0},  # every 28 s: what Daly says
    ],
    ids=str,
)
def test_no_interval_is_advised_where_it_is_not_known_or_right(job: dict[str, Any]) -> None:
    assert crashing(Node(), **job).findings == ()


def test_where_the_global_step_is_unknown_no_steps_are_said_to_be_done_again() -> None:
    (found,) = crashing(Node(), steps_known=False).findings
    assert [each.what for each in found.evidence] == ["interval", "interruptions", "restart"]
    assert "again" not in job_text(asdict(crashing(Node(), steps_known=False)))


def test_what_an_attempt_after_a_good_end_took_is_no_part_of_coming_back() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)  # killed at 108.0
    attempt(node, 114, 20, first_step=40, bye=True)  # ends at 118.0, as it was asked to
    attempt(node, 1000, 20, first_step=60)
    job = node.runs["run-a", 0].job
    assert job is not None and (job.interruptions, job.restart_s) == (1, pytest.approx(6 + 2))


def test_saves_that_are_too_frequent() -> None:
    (found,) = crashing(Node(), saves=100, save_s=2.0).findings
    assert "too frequent" in found.title and found.advice.startswith("save every 51.3 s")


def test_a_run_of_the_job_has_the_finding_too() -> None:
    node = Node()
    crashing(node)
    run = node.runs["run-a", 0]
    window = Window(duration_s=60, job=run.job)
    assert [found.cause for found in diagnose(window)] == ["checkpoint_interval"]
    text = job_text(asdict(node.only()))
    assert "× the throughput)" in text and max(map(len, text.splitlines())) <= 100
    assert "  do      save every 28.6 s instead of every 3m 38s (" in text


def test_the_text_of_a_single_attempt_has_no_state_that_rounds_to_nothing() -> None:
    node = Node()
    node.take(attempt(node, 100, 30, first_step=0).spend("other", MS), first_step=0)
    text = job_text(asdict(node.only()))
    assert "5.0 s, 1 attempt, 0 interrupted" in text and "  where   startup 40%  input_wait 36%  compute 24%\n" in text


def lives(node: Node, alive_s: float, begin_s: float, until_s: float, *, first_step: int = 0, **names: Any) -> FakeHook:
    """Have a process import, open its Watch, and make steps of 100 ms until it is killed."""
    hook = FakeHook(int(begin_s * S), sender=f"{begin_s}-{names.get('rank', 0)}", **names)
    run = node.runs.setdefault((hook.run, hook.rank), Run(hook.run, hook.rank, BOOT))
    while hook.at_ns < until_s * S:
        hook.step()
        for message in (hook.hello(start_ticks=int(alive_s * 100), first_step=first_step), hook.message()):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns), peer_pid=hook.pid)
    node.jobs.update([run])
    return hook


def test_ranks_of_attempts_that_crash_within_a_second_are_one_attempt_each() -> None:
    node = Node()
    for again in range(3):
        for rank in range(4):
            begin_s = 100 + 10 * again + 0.3 * rank
            lives(node, 95 + 10 * again, begin_s, begin_s + 0.4, rank=rank, pid=again * 4 + rank + 1)
    assert (node.only().attempts, node.only().steps, node.only().redone_steps) == (3, 12, 8)


def test_fifty_restarts_of_eight_ranks_are_fifty_one_attempts() -> None:
    node = Node()
    for again in range(51):
        for rank in range(8):
            lives(
                node,
                100 + 9 * again,
                102 + 9 * again,
                103 + 9 * again,
                first_step=5 * again,
                rank=rank,
                pid=8 * again + rank + 1,
            )
    for _ in range(3):
        node.jobs.update(node.runs.values())
    job = node.only()
    assert (job.attempts, job.steps, job.redone_steps) == (51, 510, 250)
    assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s)


def test_the_first_of_more_attempts_than_are_kept_are_counted_once() -> None:
    node = Node()
    for again in range(MAX_ATTEMPTS + 5):
        lives(node, 100 + 9 * again, 102 + 9 * again, 103 + 9 * again, first_step=5 * again, pid=again + 1)
    for _ in range(3):
        node.jobs.update(node.runs.values())
    assert (node.only().attempts, node.only().interruptions) == (MAX_ATTEMPTS + 5, MAX_ATTEMPTS + 4)
    served = {each.metric: each.value for each in job_samples(node.jobs.views(True), {node.only().job: []})}
    assert served["gpuwatch_job_attempts_total"] == MAX_ATTEMPTS + 5  # JobRestartLoop counts on it to grow
    (run,) = node.runs.values()
    assert run.job is not None and run.job.interruptions == MAX_ATTEMPTS - 1  # of those whose time is known


@pytest.mark.parametrize("restarts", [40, MAX_ATTEMPTS + 70])
def test_every_restart_of_one_run_counts_though_few_processes_are_kept(restarts: int) -> None:
    """A record has a run's last 16 processes, and an agent 256 attempts of a job; it is restarted after every 33."""
    node, served = Node(), dict[tuple[str, ...], float]()
    for again in range(restarts):
        lives(node, 100 + 9 * again, 102 + 9 * again, 103 + 9 * again, first_step=5 * again, pid=again + 1)
        (part,) = node.jobs.views(served=True)
        samples = [each for each in job_samples([part], {part.job: []}) if each.metric.endswith("_total")]
        now = {(each.metric, *each.labels): each.value for each in samples}
        assert not {key: value for key, value in served.items() if now[key] < value}
        served = now
        if again % 33 == 32:
            run = read_record(node.runs["run-a", 0].record() or b"")
            node = Node()
            node.jobs.update([run])
            node.runs["run-a", 0] = run
    job = node.only()
    assert (job.attempts, job.steps, job.redone_steps) == (restarts, 10 * restarts, 5 * (restarts - 1))
    assert job.numbers == (0, 5 * restarts + 5)
    assert sum(job.states.values()) == pytest.approx(9 * restarts - 8) == job.last_message_s - job.started_s
    assert sum(part.states.values()) == pytest.approx(9 * restarts - 8)


def test_a_name_that_is_used_every_night_counts_the_attempts_of_its_last_job_alone() -> None:
    node = Node()
    for night in range(MAX_ATTEMPTS + 5):
        attempt(node, 100 + 20 * night, 1, first_step=0, bye=True)
    assert (node.only().attempts, node.only().interruptions) == (1, 0)


def test_an_attempt_that_hangs_while_the_next_one_has_begun_is_in_the_ledger() -> None:
    node = Node()
    lives(node, 98, 100, 110, run="slurm-7.0", pid=1)
    lives(node, 107, 109, 119, run="slurm-7.0-attempt-2", first_step=90, pid=2)
    job = node.only()
    assert (job.attempts, job.steps, job.redone_steps) == (2, 200, 10)
    assert sum(job.states.values()) == pytest.approx(19)
    assert job.last_message_s - job.started_s == pytest.approx(19)
    node.take(FakeHook(119 * S, run="slurm-7.0-attempt-3", sender="third", pid=3), first_step=190)  # nothing yet
    assert sum(node.only().states.values()) == pytest.approx(19)


@pytest.mark.parametrize("back_s", [5, 3600])
def test_a_clock_that_is_set_back_before_a_requeue_loses_no_attempt(back_s: int) -> None:
    node = Node()
    lives(node, 98, 100, 110, run="slurm-7.0", pid=1)
    ended = node.runs["slurm-7.0", 0]
    ended.pass_time(int(113 * S), wall_s(113 * S), alive=False)
    node.jobs.update([ended])
    run = node.runs["slurm-7.0-attempt-2", 0] = Run("slurm-7.0-attempt-2", 0, BOOT)
    hook = FakeHook(114 * S, run=run.run, sender="again")
    for _ in range(20):
        hook.step()
        for message in (hook.hello(start_ticks=11_300, first_step=90), hook.message()):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns) - back_s, peer_pid=2)
        node.jobs.update([run])
    job = node.only()
    assert (job.attempts, job.steps, job.redone_steps, job.runs[-1]) == (2, 120, 10, run.run)
    assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s)


def test_a_smaller_first_step_than_any_checkpoint_redoes_all() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=40)
    attempt(node, 114, 30, first_step=3)
    assert (node.only().redone_steps, node.only().lost_steps) == (30, 60)


def test_a_job_whose_first_attempts_are_no_longer_known_has_their_sums() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0, run="run-a")
    attempt(node, 114, 50, first_step=40, run="run-b")
    record = node.runs["run-b", 0].record()
    assert record is not None
    later = Node()
    later.jobs.update([read_record(record)])
    job, known = later.only(), node.only()
    assert (job.attempts, job.steps, job.redone_steps, job.numbers) == (2, 110, 20, (0, 90))
    assert job.states == pytest.approx(known.states | {"startup": 2.0}) and job.states["redone"] == pytest.approx(2.0)
    assert (job.started_s, job.goodput_ratio) == pytest.approx((known.started_s, known.goodput_ratio))


def requeued(
    node: Node, *, set_s: float = 0.0, boot: str = BOOT, begin_s: int = 114, number: int = 2, rank: int = 0
) -> None:
    """Have another attempt import for 1 s, make 20 steps, and be killed, by a wall clock that was set by `set_s`."""
    run = node.runs[f"slurm-7.{number}", rank] = Run(f"slurm-7.{number}", rank, boot)
    hook = FakeHook(begin_s * S, run=run.run, rank=rank, sender=f"{number}-{rank}", boot_id=boot)
    for _ in range(20):
        hook.step()
        for message in (hook.hello(start_ticks=begin_s * 100 - 100, first_step=90), hook.message()):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns) + set_s, peer_pid=number)
        node.jobs.update([run])
    run.pass_time(hook.at_ns + 3 * S, wall_s(hook.at_ns + 3 * S) + set_s, alive=False)
    node.jobs.update([run])


@pytest.mark.parametrize("agent", ["the same agent", "another agent", "an agent of another boot"])
@pytest.mark.parametrize("set_s", [-3600.0, -2.0, 5.0, 3600.0])
def test_a_clock_that_is_set_between_two_attempts_changes_no_time_of_the_job(set_s: float, agent: str) -> None:
    node = Node()
    lives(node, 98, 100, 110, run="slurm-7.0", pid=1)
    requeued(node, set_s=set_s)  # 4 s after, of which it imports for 1 s; to 116
    if agent != "the same agent":
        records = [read_record(run.record() or b"") for run in node.runs.values()]
        node = Node()
        for record in records if agent == "an agent of another boot" else ():
            record.restore("boot-b", 10 * S, wall_s(122 * S) + set_s)
        node.jobs.update(sorted(records, key=lambda run: run.started_s))
    if agent == "an agent of another boot":  # 10 s up at 122
        run = node.runs["slurm-7.3", 0] = Run("slurm-7.3", 0, "boot-b")
        hook = FakeHook(20 * S, run=run.run, sender="third", boot_id="boot-b").spend("startup", S)
        for message in (hook.hello(start_ticks=1900, first_step=90), hook.message()):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns + 112 * S) + set_s)
        node.jobs.update([run])  # 16 s after
    else:
        requeued(node, set_s=2 * set_s, begin_s=132, number=3)
    job = node.only()
    assert (job.attempts, job.runs) == (3, ("slurm-7.0", "slurm-7.2", "slurm-7.3"))
    assert job.states["down"] == pytest.approx(3 + 15) and job.restart["imports"] == pytest.approx(1 + 1)
    assert sum(job.states.values()) == pytest.approx(job.last_message_s - job.started_s)
    assert job.started_s == pytest.approx(wall_s(100 * S) + set_s * (1 if agent == "an agent of another boot" else 2))


def test_a_clock_that_was_set_back_before_a_reboot_keeps_a_run_s_later_time() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)
    record = read_record(node.runs["run-a", 0].record() or b"").restore("boot-b", 10 * S, wall_s(108 * S) - 3600)
    assert record.ledger is not None and record.ledger.watermark_ns <= 10 * S
    node = Node()
    node.runs["run-a", 0] = record
    hook = FakeHook(20 * S, boot_id="boot-b", sender="again").spend("startup", S)
    record.apply(hook.hello(first_step=40, start_ticks=1900), hook.at_ns, wall_s(108 * S) - 3590)
    record.apply(hook.message(), hook.at_ns, wall_s(108 * S) - 3590)
    node.jobs.update([record])
    job = node.only()
    assert (job.attempts, job.states.get("down", 0.0)) == (2, 0.0)  # it is not known
    assert sum(job.states.values()) == pytest.approx(9) == job.last_message_s - job.started_s
    assert record.ledger.totals_ns["startup"] == 3 * S


def test_a_process_that_claims_to_begin_later_than_it_sends_does_no_harm() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)
    run = node.runs["run-a", 0]
    hook = FakeHook(114 * S, sender="again").spend("startup", S)
    run.apply(hook.hello(start_ticks=2**61), hook.at_ns, wall_s(hook.at_ns))
    run.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
    node.jobs.update([read_record(run.record() or b"")])
    assert node.only().states["down"] == pytest.approx(6) and node.only().restart == pytest.approx({"startup": 1})


def test_a_process_whose_hello_has_not_come_yet_counts_when_it_comes() -> None:
    """An agent that has just started may hear of steps before the hello.

    Then it knows neither the job, nor the number of the first step, nor the imports.
    """
    node = Node()
    attempt(node, 100, 60, first_step=0)
    hook = FakeHook(114 * S, sender="again").spend("startup", S)
    run = node.runs["run-a", 0]
    for _ in range(10):
        run.apply(hook.step().message(), hook.at_ns, wall_s(hook.at_ns))
        node.jobs.update([run])
        assert (node.only().attempts, node.only().states.get("down", 0.0)) == (1, 0.0)
    record = read_record(run.record() or b"")
    record.pass_time(hook.at_ns + 60 * S, wall_s(hook.at_ns + 60 * S), alive=False)  # it ends before
    later = Node()
    later.jobs.update([record])
    assert (later.only().attempts, later.only().states["down"], later.only().redone_steps) == (2, 6.0, None)
    other = Run("run-b", 0, BOOT)
    other.apply(FakeHook(114 * S, run="run-b").step().message(), hook.at_ns, wall_s(hook.at_ns))
    run.apply(hook.hello(first_step=40, start_ticks=11_300), hook.at_ns, wall_s(hook.at_ns))
    node.jobs.update([run, other])
    job = node.only()
    assert (job.attempts, job.redone_steps, job.states["down"], job.restart["imports"]) == (2, 10, 5.0, 1.0)
    assert set(node.jobs.runs_of({"run-a", "run-b"})) == {"job-7"}


def test_a_rank_that_is_first_heard_after_a_reboot_does_not_begin_before_other_ranks_ended() -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0)  # rank 0's, to 108
    for rank in (1, 0):
        requeued(node, set_s=-3600.0, boot="boot-b", begin_s=120, rank=rank)
    job = node.only()
    assert (job.attempts, job.redone_steps, job.states.get("down", 0.0)) == (2, 0, 0.0)
    assert sum(job.states.values()) == pytest.approx(8 + 2)


@pytest.mark.parametrize("job", ["", "job-7"])
def test_what_is_kept_of_a_run_before_its_hello_has_its_earlier_attempts(job: str) -> None:
    node = Node()
    attempt(node, 100, 60, first_step=0, job=job)
    del node.runs["run-a", 0]  # it was dropped, long after its end
    hook = FakeHook(2000 * S, sender="again", job=job)
    run = node.runs["run-a", 0] = Run("run-a", 0, BOOT)
    run.apply(hook.step().message(), hook.at_ns, wall_s(hook.at_ns))
    node.jobs.update([run])
    node = Node()  # a further agent, which has this record alone
    run = node.runs["run-a", 0] = read_record(run.record() or b"")
    run.apply(hook.hello(first_step=60, start_ticks=0), hook.at_ns, wall_s(hook.at_ns))
    node.jobs.update([run])
    assert (node.only().attempts, node.only().steps) == (2, 61)


def test_what_is_left_of_a_job_without_its_known_attempts_is_never_negative() -> None:
    """Attempts that overlap can have more once all of them are known."""
    counted = api.Job(
        job="j", status="lost", started_s=0.0, last_message_s=100.0, attempts=3, interruptions=1, goodput_ratio=0.5,
        states={"compute": 50.0, "redone": 2.0}, steps=100, redone_steps=5, lost_steps=7, numbers=None,
        restart={"imports": 1.0}, lost={}, findings=(), runs=(),
    )  # fmt: skip
    known = replace(
        counted, attempts=2, interruptions=2, states={"compute": 20.0, "redone": 3.0}, steps=40, redone_steps=9
    )
    left = _added(counted, replace(known, restart={"imports": 2.0}, lost={"compute": 1.0}), -1)
    assert (left.states, left.restart, left.lost) == (
        {"compute": 30.0, "redone": 0.0},
        {"imports": 0.0},
        {"compute": 0.0},
    )
    assert (left.attempts, left.interruptions, left.steps, left.redone_steps, left.lost_steps) == (1, 0, 60, 0, 0)
    assert left.started_s == 70.0
