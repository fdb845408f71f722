"""Two runs side by side: the change, how sure it is, and what had been promised."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest

from gpuwatch.diagnosis.rates import Cost
from gpuwatch.tools.reports.comparison import compare
from gpuwatch.tools.reports.gather import gather
from gpuwatch.tools.reports.model import RunReport
from gpuwatch.tools.reports.page import as_html, as_markdown
from tests.unit.reports.fake_source import FINDING, START_S, FakeSource, run, steps


def report(
    wait_s: float, findings: list[dict[str, Any]] | None = None, spread: float = 0.0, seed: int = 1, **changes: Any
) -> RunReport:
    """Return a run whose steps wait so long and compute for 40 ms."""
    chance = random.Random(seed)
    waits_s = [wait_s * (1 + spread * (chance.random() - 0.5)) for _ in range(400)]
    taken = steps(400, wait_s, 0.040, data_wait_s=waits_s)
    states = {"input_wait": 400 * wait_s, "compute": 16.0}
    source = FakeSource([run(states=states, steps=400, **changes)], taken, findings)
    return gather(source, "last", START_S + 100)


def test_what_was_predicted_is_shown_with_what_was_achieved() -> None:
    found = compare(report(0.060, [FINDING]), report(0.004, run="b", name="b"))
    assert found.speedup == pytest.approx(100 / 44)
    assert found.prediction is not None
    assert (found.prediction.cause, found.prediction.predicted) == ("input_cpu", 2.5)
    assert found.prediction.achieved == pytest.approx(100 / 44)
    assert found.prediction.fulfilled == pytest.approx(100 / 44 / 2.5)
    assert found.prediction.gone
    assert "predicted for input_cpu: up to 2.50×" in found.outcome[1]
    assert found.share_change["input_wait"] == pytest.approx(4 / 44 - 0.6)


def test_a_cause_that_is_still_there_is_named() -> None:
    found = compare(report(0.060, [FINDING]), report(0.050, [FINDING]))
    assert found.prediction is not None and not found.prediction.gone


def test_no_difference_is_claimed_within_the_noise() -> None:
    found = compare(report(0.060, spread=0.5), report(0.060, spread=0.5, seed=2))
    assert found.speedup_interval is not None
    assert found.speedup_interval[0] < 1 < found.speedup_interval[1]
    assert found.outcome[0].startswith("no significant difference in speed")
    assert found.prediction is None


def test_slower_is_called_slower() -> None:
    found = compare(report(0.004), report(0.060, name="worse"))
    assert found.outcome[0].startswith("worse is slower: a step is 0.44× as fast")


def test_other_batch_sizes_are_compared_by_the_sample() -> None:
    found = compare(report(0.060, samples=400 * 32), report(0.060, samples=400 * 64))
    assert found.per_sample
    assert found.speedup == pytest.approx(2.0)


def test_few_steps_are_compared_without_an_interval() -> None:
    few = gather(FakeSource([run(steps=4, samples=4 * 32)], steps(4, 0.010, 0.040)), "last", START_S)
    found = compare(report(0.060, samples=400 * 32), few)
    assert found.speedup == pytest.approx(2.0, rel=0.01) and found.speedup_interval is None
    assert found.outcome[0].endswith("; too few steps for a confidence interval")


def test_a_run_without_steps_cannot_be_compared_in_speed() -> None:
    none = gather(FakeSource([run(steps=0)], steps(0, 0.0, 0.0)), "last", START_S)
    found = compare(report(0.060, [FINDING]), none)
    assert found.speedup is None
    assert found.outcome == ["one of the runs has no steps to compare"]


def test_rows_show_the_change_and_settings_only_where_they_differ() -> None:
    other = {"num_workers": 10, "prefetch_factor": 2, "batch_bytes": None}
    found = compare(report(0.060), report(0.004, loader=other, tags={}))
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["step, mean"] == ("100 ms", "44 ms", "-56%")
    assert rows["waiting for data"] == ("60%", "9.1%", "-50.9 points")
    assert "transfer, a step" not in rows  # nothing to say of it on either side
    assert found.setting_rows == [("loader: num_workers", "4", "10"), ("tag team", "vision", "-")]


@pytest.mark.parametrize(
    ("before", "currency", "row"),
    [
        (2.0, "EUR", ("{} EUR", "{} EUR", "+100%")),
        (2.0, "USD", ("{} USD", "{} EUR", "")),
        (0.0, "EUR", ("0.00 EUR", "{} EUR", "")),  # its GPUs' time was all that of others
    ],
)
def test_costs_are_compared_in_one_currency_and_with_a_cost(before: float, currency: str, row: tuple[str, ...]) -> None:
    a, b = (
        msgspec.structs.replace(report(0.060), steps=1000, cost=Cost(of, 1, total, total, {"compute": total}))
        for of, total in ((currency, before), ("EUR", 4.0))
    )
    (found,) = (each[1:] for each in compare(a, b).rows if each[0] == "cost of 1,000 steps")
    assert found == (row[0].format("2.00"), row[1].format("4.00"), row[2])


def test_a_change_too_small_to_show_has_no_sign_of_its_own() -> None:
    rows = {row[0]: row[3] for row in compare(report(0.060), report(0.0599, run="b", name="b")).rows}
    assert rows["step, mean"] == "+0%" and "-0" not in "".join(rows.values()), rows


def test_two_runs_of_one_name_are_told_apart_by_their_start() -> None:
    found = compare(report(0.004), report(0.060, run="b", started_s=START_S + 100))
    one, two = "resnet (2026-09-21 14:13:20 UTC)", "resnet (2026-09-21 14:15:00 UTC)"
    assert found.outcome[0].startswith(f"{two} is slower: a step is 0.44× as fast as one of {one}")
    for page in (as_html(found), as_markdown(found)):
        assert one in page and two in page and not re.search(r"resnet(?! \()", page)
    assert [run.name for run in (found.a, found.b)] == ["resnet", "resnet"], "the JSON has the names that they have"
    assert [run.name for run in compare(report(0.004), report(0.060, name="b")).runs] == ["resnet", "b"]


def test_of_a_gain_that_was_not_made_no_part_of_the_prediction_is_claimed() -> None:
    """1× of a predicted 2.5× is no gain, and 2.27× are 85% of the gain."""
    gained = compare(report(0.060, [FINDING]), report(0.004, name="b"))
    assert "achieved 2.27×, 85% of that gain, and the cause is gone" in gained.outcome[1]
    for wait_s, spread in ((0.060, 0.5), (0.070, 0.0)):  # as before, slower
        found = compare(report(0.060, [FINDING], spread=0.5), report(wait_s, [FINDING], spread, seed=2, name="b"))
        assert re.search(r"achieved [01]\.\d\d×, and the cause is still there$", found.outcome[1]), found.outcome


def lasting(seconds: float, active_s: float, name: str) -> RunReport:
    """Return a run of so many seconds, its cause active for so many of them."""
    states = {"input_wait": 0.6 * seconds, "compute": 0.4 * seconds}
    finding = {**FINDING, "since_s": START_S, "seen_s": START_S + active_s}
    own = run(run=name, name=name, states=states, watermark_s=START_S + seconds)
    return gather(FakeSource([own], findings=[finding]), name, START_S + 2 * seconds)


def test_a_cause_is_still_there_in_a_second_run_that_is_shorter() -> None:
    """An hour before, ten minutes of it after: "the cause is gone", though both waited all the time."""
    found = compare(lasting(3600, 3590, "a"), lasting(600, 590, "b"))
    assert found.prediction is not None and not found.prediction.gone
    assert found.outcome[1].endswith("and the cause is still there")


def test_a_cause_is_gone_from_a_longer_run_that_had_it_at_its_begin_alone() -> None:
    found = compare(lasting(60, 58, "a"), lasting(3600, 40, "b"))
    assert found.prediction is not None and found.prediction.gone
