"""A finding begins after three seconds, ends after ten without a sign, and leaves a 0 behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwatch import wire
from gpuwatch.config import Config
from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch_agent.evaluator import Evaluator, FindingTracker
from gpuwatch_agent.exporter import finding_samples
from gpuwatch_agent.gpus import GpuAccount
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import Run, RunRegistry
from gpuwatch_agent.runs.window import RecentSamples
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S, wall_s
from tests.unit.agent.whole_agent import WholeAgent

FINDING = Finding(
    cause="input_unexplained",
    severity="warning",
    title="the input is slow",
    ratio=0.62,
    evidence=(),
    advice="",
    predicted_speedup=None,
)


def values(book: FindingTracker, *runs: Run) -> dict[tuple[str, ...], float]:
    return {
        (sample.metric.removeprefix("gpuwatch_finding_"), *sample.labels): sample.value
        for sample in finding_samples(book, list(runs))
    }


def test_finding_begins_after_three_seconds_and_ends_after_ten() -> None:
    book, run = FindingTracker(), Run("run-a", 0, BOOT)
    for second in range(3):
        book.update("run-a", 0, [FINDING], second * S, 1000.0 + second)
    assert values(book, run) == {}
    book.update("run-a", 0, [FINDING], 3 * S, 1003.0)
    assert values(book, run) == {
        ("active", "run-a", FINDING.cause): 1.0,
        ("evidence_ratio", "run-a", FINDING.cause): 0.62,
    }
    assert book.active("run-a", 0)[0].since_s == 1000.0
    book.update("run-a", 0, [], 13 * S, 1013.0)
    assert len(book.active("run-a", 0)) == 1
    book.update("run-a", 0, [], 14 * S, 1014.0)
    assert values(book, run) == {("active", "run-a", FINDING.cause): 0.0}


def test_what_a_finding_advises_is_one_series_from_15_s_to_its_end() -> None:
    """Its text stays as it was then: each other one would be a new series."""
    book, run = FindingTracker(), Run("run-a", 0, BOOT)
    one = replace(FINDING, advice="num_workers 4 → 9", predicted_speedup=2.0, predicted_range=(1.2, 2.0))
    for second in range(15):
        book.update("run-a", 0, [one], second * S, 1000.0 + second)
    assert not [key for key in values(book, run) if key[0] == "info"]
    for second in range(15, 20):
        book.update("run-a", 0, [replace(one, advice=f"num_workers 4 → {second}")], second * S, 1000.0 + second)
    info = [key for key in values(book, run) if key[0] == "info"]
    assert info == [("info", "run-a", FINDING.cause, "num_workers 4 → 15 (1.20× to 2.00× the throughput)")]
    book.update("run-a", 0, [], 30 * S, 1030.0)
    assert values(book, run) == {("active", "run-a", FINDING.cause): 0.0}
    killed = replace(FINDING, cause="training_killed", advice="fewer workers")
    book.end_run("run-a", 0, killed, 31 * S, 1031.0)
    assert values(book, run)["info", "run-a", "training_killed", "fewer workers"] == 1.0


def test_a_hang_s_brief_is_its_place_and_no_sender_makes_it_long_or_dangerous() -> None:
    place = Evidence("activity", 1, "", "the training thread is inside a step, in save\x1b[2J\n (save.py:41)")
    late = Evidence("late", 3, "", "rank 3 has not issued all_reduce 6 of group " + 300 * "g")
    hang = replace(FINDING, cause="stalled", evidence=(place,))
    assert hang.brief(2) == "rank 2: the training thread is inside a step, in save·[2J· (save.py:41)"
    brief = replace(hang, evidence=(late, place)).brief(2)
    assert (
        len(brief) == 160
        and brief.startswith("rank 3 has not issued all_reduce 6 of group ggg")
        and brief.endswith("g…")
    )
    long = replace(FINDING, advice=300 * "a", predicted_speedup=2.6)
    assert len(long.brief(0)) == 160 and long.brief(0).endswith("a… (up to 2.60× the throughput)")


def test_the_ranks_of_a_node_have_one_brief_for_a_cause() -> None:
    book, runs = FindingTracker(), [Run("run-a", rank, BOOT) for rank in range(8)]
    for second in (0, 16):
        for run in runs:
            book.update("run-a", run.rank, [replace(FINDING, advice=f"of rank {run.rank}")], second * S, 1000.0)
    assert [key[-1] for key in values(book, *runs) if key[0] == "info"] == ["of rank 0"]


def test_not_proven_does_not_linger_next_to_what_is_proven_by_now() -> None:
    book = FindingTracker()
    proven = replace(FINDING, cause="artificial_limit")
    for second in range(5):
        book.update("run-a", 0, [FINDING], second * S, 1000.0 + second)
    for second in range(5, 8):
        book.update("run-a", 0, [proven], second * S, 1000.0 + second)
    assert [entry.finding.cause for entry in book.active("run-a", 0)] == ["input_unexplained"], "not active yet"
    book.update("run-a", 0, [proven], 8 * S, 1008.0)
    assert [entry.finding.cause for entry in book.active("run-a", 0)] == ["artificial_limit"]


def test_wall_clock_that_is_set_back_neither_holds_nor_delays_a_finding() -> None:
    book = FindingTracker()
    book.update("run-a", 0, [FINDING], 0, 10_000.0)
    book.update("run-a", 0, [FINDING], 4 * S, 6_404.0)
    assert len(book.active("run-a", 0)) == 1
    book.update("run-a", 0, [], 15 * S, 2_000.0)
    assert book.active("run-a", 0) == []


def test_ranks_of_a_run_share_one_series() -> None:
    book, runs = FindingTracker(), [Run("run-a", rank, BOOT) for rank in (0, 1)]
    for second in (0, 4):
        book.update("run-a", 1, [FINDING], second * S, 0.0)
    assert values(book, *runs)["active", "run-a", FINDING.cause] == 1.0
    for second in (0, 4):
        book.update("run-a", 0, [replace(FINDING, ratio=0.4)], second * S, 0.0)
    for of_run in (runs, runs[::-1]):
        assert values(book, *of_run)["evidence_ratio", "run-a", FINDING.cause] == 0.62, "that of the worst one"


def test_nothing_is_kept_of_runs_that_are_gone() -> None:
    book = FindingTracker()
    for run in ("", "run-a", "run-b"):
        for second in (0, 4):
            book.update(run, 0, [FINDING], second * S, 0.0)
    book.keep_only({("run-a", 0)})
    assert {key[0] for key in book.entries} == {"", "run-a"}
    assert set(book.causes_seen) == {("", 0), ("run-a", 0)}


def test_a_root_that_is_active_is_named_by_its_consequence_and_comes_first() -> None:
    book = FindingTracker()
    starved = replace(FINDING, cause="input_cpu", ratio=0.9)
    for second in range(5):
        found = [starved, replace(FINDING, cause="stalled", ratio=0.1)] if second > 2 else [starved]
        book.update("run-a", 0, found, second * S, float(second))
    assert [(e.finding.cause, e.finding.root) for e in book.active("run-a", 0)] == [("input_cpu", None)]
    for second in range(5, 8):
        book.update("run-a", 0, [starved, replace(FINDING, cause="stalled", ratio=0.1)], second * S, float(second))
    assert [(e.finding.cause, e.finding.root) for e in book.active("run-a", 0)] == [
        ("stalled", None),
        ("input_cpu", "stalled"),
    ]


def test_why_a_run_ended_is_one_finding_over_a_restart_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = FakeHook().step()
    agent = WholeAgent(tmp_path, monkeypatch, hook.at_ns)
    death = wire.WorkerDeath(pid=99, signal=9, out_of_memory=True)
    agent.hear(replace(hook.hello(), worker_deaths=(death,)), hook.message(), hook.bye())
    for second in range(3):
        agent.tick(hook.at_ns + second * S)
    assert [each.cause for each in agent.history.reader.findings("run-a")] == ["worker_killed"]
    agent.close()
    now_ns = hook.at_ns + 60 * S
    again = WholeAgent(tmp_path, monkeypatch, now_ns)
    for second in range(3):
        again.tick(now_ns + second * S)
    (found,) = again.history.reader.findings("run-a")
    again.close()
    assert (found.cause, found.since_s) == ("worker_killed", pytest.approx(wall_s(hook.at_ns), abs=0.01))


def test_each_gpu_that_is_held_idle_is_found(tmp_path: Path) -> None:
    """A notebook with four GPUs: one finding, one notification, and the cost of one."""
    evaluator = Evaluator(RecentSamples(), WorkerWatch(ProcessTable(tmp_path)), Config())
    accounts = [GpuAccount(str(number), f"GPU-{number}", 0) for number in range(4)]
    for account in accounts:
        account.idle_since_ns = S
    for second in range(1000, 1012):
        evaluator.evaluate(RunRegistry(BOOT), accounts, second * S, wall_s(second * S))
    found = {(each.finding.cause, each.finding.gpu) for each in evaluator.findings.active("", 0)}
    assert found == {("held_idle", account.uuid) for account in accounts}


def test_nothing_is_predicted_of_a_short_run(tmp_path: Path) -> None:
    """By the terminal nothing is predicted below 30 steps or 5 s of them, on Live a gain was after 6 steps."""
    evaluator = Evaluator(RecentSamples(), WorkerWatch(ProcessTable(tmp_path)), Config())
    runs, hook = RunRegistry(BOOT), FakeHook(1000 * S)
    gains: dict[int, tuple[str, bool]] = {}
    runs.apply(hook.hello(), hook.at_ns, wall_s(hook.at_ns))
    for made in range(1, 41):
        run = runs.apply(hook.step(600 * MS, 400 * MS).message(), hook.at_ns, wall_s(hook.at_ns))
        assert run is not None
        run.remember(hook.at_ns)
        evaluator.evaluate(runs, [], hook.at_ns, wall_s(hook.at_ns))
        found = {each.finding.cause: each.finding for each in evaluator.findings.active("run-a", 0)}
        if (finding := found.get("input_single_process")) is not None:
            gains[made] = (finding.gain, "expect a step of" in finding.advice)
    assert gains[29] == ("", False)
    assert gains[40][0].endswith("×") and gains[40][1]
    (entry,) = (each for each in evaluator.findings.active("run-a", 0) if each.finding.cause == "input_single_process")
    assert entry.brief.endswith("the throughput)"), "what metrics have names it too, once it is known"
