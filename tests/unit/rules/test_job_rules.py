"""How often a job should save, by what its attempts have shown."""

from __future__ import annotations

import random
from statistics import median

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.rules.progress import _daly_s, checkpoint_interval
from gpuwatch.diagnosis.window import JobFacts, Window

JOB = JobFacts(
    interruptions=4, alive_s=4 * 3600, trained_s=3.8 * 3600, saves=6, save_s=60, restart_s=400, repeated_s=3000
)


def test_it_fires_with_the_interval_and_a_range_that_holds_the_gain() -> None:
    found = checkpoint_interval(Window(duration_s=60, job=JOB))
    assert found is not None
    assert found.advice == "save every 4m 21s instead of every 28m 30s"
    low, high = found.predicted_range or (0, 0)
    assert (low, found.predicted_speedup, high) == (1.06, 1.2, 1.5)
    assert [each.value for each in found.evidence] == [pytest.approx(1710), 4, 100, 750]


def test_a_run_whose_job_crashes_is_not_called_healthy() -> None:
    states = {"compute": 97.0, "input_wait": 3.0}

    def sentence(job: JobFacts) -> str:
        window = Window(100.0, states, job=replace(job, goodput_ratio=0.56))
        return give_verdict(window, diagnose(window)).sentence

    assert (
        sentence(JOB)
        == "97% of this run is compute, but after 4 interruptions 56% of the job's time went into new steps"
    )
    assert sentence(replace(JOB, repeated_s=None)).endswith("at most 56% of the job's time went into new steps")
    assert sentence(replace(JOB, interruptions=1)) == "healthy: 97% of the time is compute, the input keeps up"


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, interruptions=1),
        replace(JOB, interruptions=2, alive_s=10 * 86400, trained_s=10 * 86400, saves=480),  # every half hour is right
        replace(JOB, saves=50),
        replace(JOB, repeated_s=60),
    ],
    ids=["one interruption", "rare interruptions", "saved as it should be", "it saved when it was asked to end"],
)
def test_it_is_quiet(job: JobFacts) -> None:
    assert checkpoint_interval(Window(duration_s=60, job=job)) is None


def test_no_more_is_gained_than_was_done_again() -> None:
    found = checkpoint_interval(Window(duration_s=60, job=replace(JOB, repeated_s=0.1 * JOB.trained_s)))
    assert found is not None and found.predicted_speedup == 1.11
    unknown = checkpoint_interval(Window(duration_s=60, job=replace(JOB, repeated_s=None)))
    assert unknown is not None and unknown.predicted_speedup == 1.2


def test_a_save_that_costs_nearly_nothing_is_advised_at_most_once_a_step() -> None:
    """Saves in the background: Young's interval of 2.7 ms is less than a step of 1.9 s."""
    job = replace(JOB, save_s=6e-9, steps=7200)
    found = checkpoint_interval(Window(duration_s=60, job=job))
    assert found is not None and found.advice == "save every 1.9 s instead of every 28m 30s"
    assert found.predicted_speedup == 1.28 and found.predicted_range is not None


@pytest.mark.parametrize("job", [None, replace(JOB, saves=0), replace(JOB, save_s=0.0), replace(JOB, trained_s=0.0)])
def test_it_abstains_where_it_is_not_measured(job: JobFacts | None) -> None:
    assert checkpoint_interval(Window(duration_s=60, job=job)) is None


@pytest.mark.parametrize("factor", [1e-9, 1e-3, 1e3, 1e9])
@pytest.mark.parametrize("field", ["alive_s", "trained_s", "save_s"])
def test_times_that_cannot_be_raise_nothing(field: str, factor: float) -> None:
    found = checkpoint_interval(Window(duration_s=60, job=replace(JOB, **{field: getattr(JOB, field) * factor})))
    if found is not None and found.predicted_range is not None:
        assert 1 <= found.predicted_range[0] <= found.predicted_range[1]


def simulated(interval_s: float, save_s: float, mean_s: float, alive_s: float, seed: int) -> tuple[JobFacts, float]:
    """Run a job that starts in 100 s, saves, and is killed at random.

    Return what it shows, and its share of time in new steps.
    """
    chance, kept_s, reached_s = random.Random(seed), 0.0, 0.0
    trained_s = spent_s = again_s = spent_alive_s = 0.0
    saves = interruptions = 0
    while spent_alive_s < alive_s:
        left_s = min(chance.expovariate(1 / mean_s), alive_s - spent_alive_s)
        spent_alive_s, left_s, at_s = spent_alive_s + left_s, left_s - 100, kept_s
        while left_s > 0:
            step_s = min(interval_s, left_s)
            again_s += min(max(0.0, reached_s - at_s), step_s)
            trained_s, at_s, left_s = trained_s + step_s, at_s + step_s, left_s - step_s
            reached_s = max(reached_s, at_s)
            if left_s > 0:
                saves, spent_s, kept_s = saves + 1, spent_s + min(save_s, left_s), at_s if left_s >= save_s else kept_s
                left_s -= save_s
        interruptions += spent_alive_s < alive_s
    facts = JobFacts(interruptions, spent_alive_s, trained_s, saves, spent_s, 100.0 * interruptions, again_s)
    return facts, reached_s / spent_alive_s


@pytest.mark.parametrize(("interval_s", "save_s", "mean_s"), [(1800, 10, 3600), (1800, 30, 3600), (60, 20, 3600)])
def test_the_gain_is_that_of_a_simulated_job(interval_s: float, save_s: float, mean_s: float) -> None:
    """About eight interruptions are seen; the gain is that of a job a thousand times as long.

    The range holds for 80% of the cases.
    """
    _, before = simulated(interval_s, save_s, mean_s, 1e4 * mean_s, 1)
    within, gains, expected = 0, [], []
    for seed in range(40):
        facts, _ = simulated(interval_s, save_s, mean_s, 8 * mean_s, seed)
        found = checkpoint_interval(Window(duration_s=60, job=facts))
        if found is None or found.predicted_range is None or found.predicted_speedup is None:
            continue
        best_s = _daly_s(facts.save_s / facts.saves, facts.alive_s / facts.interruptions)
        _, after = simulated(best_s, save_s, mean_s, 1e3 * mean_s, 2)
        low, high = found.predicted_range
        within += low - 0.02 <= after / before <= high + 0.02
        gains, expected = [*gains, found.predicted_speedup], [*expected, after / before]
    assert len(gains) > 30 and within >= 0.7 * len(gains)
    assert median(gains) == pytest.approx(median(expected), rel=0.05)
