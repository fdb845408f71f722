"""The late rank is named: by its wait for data, or by its own time where the wait for others was measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.rates import Done
from gpuwatch.diagnosis.report import give_verdict, make_report
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.rules.progress import straggler, summary_of
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import MeanStep, RankFacts, Window
from gpuwatch.host.frames import Place
from gpuwatch.wire import Loader
from tests.unit.rules.windows import HEALTHY, STARVED


def rank(number: int, data_s: float, compute_s: float, comm_s: float | None = None, steps: int = 100) -> RankFacts:
    return RankFacts(number, MeanStep(steps, data_s, 0.0, compute_s), comm_s)


def of(number: int, *ranks: RankFacts, world_size: int | None = None) -> Window:
    """Return the window of one of the ranks."""
    return replace(HEALTHY, rank=number, ranks=ranks, world_size=world_size or len(ranks))


SLOW_INPUT = (rank(0, 0.010, 0.090), rank(1, 0.070, 0.030), rank(2, 0.010, 0.090), rank(3, 0.012, 0.088))
SLOW_CODE = (rank(0, 0.010, 0.090, 0.050), rank(1, 0.010, 0.090, 0.001))


def test_the_rank_with_the_slow_input_is_named_with_what_it_costs() -> None:
    finding = straggler(of(1, *SLOW_INPUT))
    assert finding is not None
    assert (finding.cause, finding.rank, finding.severity) == ("straggler", 1, "critical")
    assert finding.ratio == pytest.approx(0.6)
    values = {each.what: each.value for each in finding.evidence}
    assert values["excess"] == pytest.approx(0.060) and values["cost"] == pytest.approx(0.180)
    assert [each.what for each in finding.evidence[2:]] == ["rank 1", "rank 3", "rank 0", "rank 2"]
    assert finding.predicted_speedup == pytest.approx(0.100 / 0.042, abs=0.01), "the next slowest is what stays"
    assert finding.advice.startswith("fix the input of rank 1")


def test_the_others_are_not_named() -> None:
    assert [straggler(of(number, *SLOW_INPUT)) for number in (0, 2, 3)] == [None] * 3


def test_slow_code_is_seen_where_the_wait_for_others_was_measured_only() -> None:
    finding = straggler(of(1, *SLOW_CODE))
    assert finding is not None and finding.rank == 1
    assert finding.evidence[0].value == pytest.approx(0.049)
    assert finding.advice.startswith("check the host of rank 1")
    unmeasured = tuple(replace(each, comm_wait_s=None) for each in SLOW_CODE)
    assert straggler(of(1, *unmeasured)) is None
    assert straggler(of(1, SLOW_CODE[0], unmeasured[1])) is None, "all ranks must have measured it"


def test_what_a_late_rank_does_or_waits_for_outside_of_torch_is_named() -> None:
    """It was: check the host of rank 1, code that only this rank runs; though rank 1 knew the function."""
    place = Place("debug_check", "/me/train.py", 8, 0.6)
    finding = straggler(replace(of(1, *SLOW_CODE), python_place=place))
    assert finding is not None and finding.advice.startswith("on rank 1: make it cheaper")
    assert "most of it in debug_check (train.py:8)" in str(finding.evidence)
    finding = straggler(replace(of(1, *SLOW_CODE), step_idle_ratio=0.8, step_place=place))
    assert finding is not None and finding.advice.startswith("on rank 1: move blocking calls out of the step")
    assert finding.because == ("step_waits",)
    assert finding.predicted_speedup == 1.96, (
        "by the ranks' steps: the reason's own share is that of a run with its start-up"
    )
    assert "step_waits" not in [each.cause for each in diagnose(replace(of(0, *SLOW_CODE), step_idle_ratio=0.8))]


def test_ranks_of_other_nodes_wait_too_but_were_not_compared() -> None:
    finding = straggler(of(1, *SLOW_INPUT, world_size=16))
    assert finding is not None and "on this node" in finding.title
    assert finding.evidence[1].value == pytest.approx(15 * 0.060)


def test_two_slow_ranks_of_four_are_both_named_and_mending_one_gains_nothing() -> None:
    ranks = (rank(0, 0.01, 0.09), rank(1, 0.05, 0.05), rank(2, 0.05, 0.05), rank(3, 0.01, 0.09))
    found = [straggler(of(number, *ranks)) for number in range(4)]
    assert [each is not None for each in found] == [False, True, True, False]
    assert [each.predicted_speedup for each in found if each is not None] == [None, None]


@pytest.mark.parametrize(
    "ranks",
    [
        (rank(0, 0.050, 0.050), rank(1, 0.051, 0.049)),  # equal
        (rank(0, 0.010, 0.030), rank(1, 0.070, 0.030)),  # not in step: no rank waits
        (rank(0, 0.010, 0.092), rank(1, 0.020, 0.090)),  # later, but the others do not wait for it
    ],
)
def test_quiet_where_no_rank_delays_another(ranks: tuple[RankFacts, ...]) -> None:
    assert [straggler(of(number, *ranks)) for number in range(len(ranks))] == [None] * len(ranks)


def test_abstains_without_ranks_to_compare_with_or_with_too_few_steps() -> None:
    assert straggler(HEALTHY) is None
    assert straggler(of(1, SLOW_INPUT[1])) is None
    few = replace(SLOW_INPUT[1], step=SLOW_INPUT[1].step._replace(steps=4))
    assert straggler(of(1, SLOW_INPUT[0], few)) is None
    assert straggler(of(7, *SLOW_INPUT)) is None


def test_what_makes_the_rank_late_is_reported_and_hangs_under_it() -> None:
    starved = replace(
        STARVED, loader=Loader(num_workers=0), fetch_cpu_ratio=0.9, rank=1, ranks=SLOW_INPUT, world_size=4
    )
    found = diagnose(starved)
    assert [(finding.cause, finding.root) for finding in found] == [
        ("straggler", None),
        ("input_single_process", "straggler"),
    ]
    assert found[0].advice.startswith("on rank 1: DataLoader(num_workers=")
    texts = [each.text for each in found[0].evidence]
    assert "the reason: batches are prepared in the training process" in texts
    assert "3 ranks wait, 180 ms a step in total: 45% of the time of all ranks" in texts


def test_a_wait_that_does_not_make_the_rank_late_stands_for_itself() -> None:
    starved = replace(STARVED, loader=Loader(num_workers=0), rank=1, ranks=SLOW_CODE, world_size=2)
    assert {finding.cause: finding.root for finding in diagnose(starved)} == {
        "straggler": None,
        "input_single_process": None,
    }


def by_rank_0(own: Window, *ranks: RankFacts, world_size: int | None = None) -> Window:
    """Return rank 0's window with the summaries of the others, each of whose windows is `own`."""
    summaries = {
        each.rank: summary_of(replace(own, ranks=(each,)), THRESHOLDS, give_verdict(own)) for each in ranks[1:]
    }
    return replace(of(0, *ranks, world_size=world_size), summaries=summaries)


def test_rank_0_names_the_late_one_with_its_own_reason_where_no_agent_compares() -> None:
    finding = straggler(by_rank_0(replace(STARVED, loader=Loader(num_workers=0)), *SLOW_INPUT))
    assert finding is not None and finding.rank == 1 and finding.because
    assert finding.advice.startswith("on rank 1: ")
    assert finding.ratio == pytest.approx(0.6)


def test_no_more_is_promised_than_the_late_ranks_own_advice_gains() -> None:
    """ "expect a step of 7.6 ms to 11.8 ms" of 35 ms stood before "up to 19.24× the throughput"."""
    window = by_rank_0(replace(STARVED, loader=Loader(num_workers=0)), *SLOW_INPUT)
    summary = window.summaries[1]
    less = replace(summary.reasons["input"], predicted_speedup=1.8)
    finding = straggler(replace(window, summaries=window.summaries | {1: replace(summary, reasons={"input": less})}))
    assert finding is not None and finding.predicted_speedup == 1.8


def test_rank_0_says_how_many_ranks_it_has_heard_of() -> None:
    finding = straggler(by_rank_0(HEALTHY, *SLOW_INPUT, world_size=16))
    assert finding is not None and "(4 of 16 compared)" in finding.title


def test_the_verdict_of_all_ranks_is_not_that_of_rank_0_alone() -> None:
    report = make_report(by_rank_0(STARVED, *SLOW_INPUT), Done(180.0, 1800, None), run="id", name="train.py")
    text = str(report)
    assert "rank 0 of 4, all compared" in text
    assert "straggler: the other ranks wait for rank 1 for 60% of every step" in text and "healthy" not in text
    alone = str(make_report(replace(HEALTHY, world_size=4), Done(180.0, 1800, None), run="id", name="train.py"))
    assert "rank 0 of 4, this rank only" in alone


def test_ranks_that_do_not_run_in_step_have_their_own_lines() -> None:
    uneven = (rank(0, 0.001, 0.05), rank(1, 0.1, 0.05), rank(2, 0.2, 0.05), rank(3, 0.001, 0.05), rank(4, 0.3, 0.05))
    window = by_rank_0(STARVED, *uneven)
    text = str(make_report(window, Done(180.0, 1800, None), run="id", name="train.py"))
    assert "rank 1: input-bound" in text and text.count("input-bound") == 3
    assert "1 more rank with a different verdict" in text
