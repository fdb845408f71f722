"""The ledger of a job over its attempts: it closes, and what was done twice is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch import api
from gpuwatch.commands.report import job_text
from gpuwatch_agent.runs import Run, read_record
from gpuwatch_agent.runs.jobs import MAX_ATTEMPTS, MAX_JOBS, Jobs
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
    assert node.only().attempts == MAX_ATTEMPTS


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
    page = (Path(__file__).parents[3] / "docs/concepts/jobs.md").read_text()
    assert f"```\n{job_text(node.only())}\n```" in page


def test_where_the_global_step_is_unknown_the_text_asks_for_it() -> None:
    node = Node()
    attempt(node, 100, 60)
    attempt(node, 114, 50)
    assert "of which an unknown number redone" in job_text(node.only())
    assert "Watch(step=…)" in job_text(node.only())
