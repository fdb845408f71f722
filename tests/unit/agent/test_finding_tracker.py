"""A finding begins after three seconds, ends after ten without a sign, and leaves a 0 behind."""

from __future__ import annotations

from msgspec.structs import replace

from gpuwatch.diagnosis.finding import Finding
from gpuwatch_agent.evaluator import FindingTracker
from gpuwatch_agent.exporter import finding_samples
from gpuwatch_agent.runs import Run
from tests.unit.agent.hooks import BOOT, S

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


def test_not_proven_does_not_linger_beside_what_is_proven_by_now() -> None:
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
