"""The verdict: which state decides, and what is said of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.finding import Finding
from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.window import Window
from tests.unit.rules.windows import HEALTHY, STARVED, states, steps, window


def test_the_largest_loss_decides() -> None:
    verdict = give_verdict(STARVED)
    assert (verdict.state, verdict.ratio) == ("input", pytest.approx(0.60))
    assert verdict.sentence == "input-bound: 60% of the time training waited for data"


def test_a_loop_that_waits_a_few_per_cent_is_healthy() -> None:
    verdict = give_verdict(window(steps(100, 0.009, 0.091)))
    assert (verdict.state, verdict.ratio) == ("compute", pytest.approx(0.91))
    assert verdict.sentence == "healthy: 91% of the time is compute, the input keeps up"


def test_on_a_gpu_the_host_s_clock_is_not_taken_for_the_device_s() -> None:
    assert "may hide part of it" in give_verdict(replace(STARVED, device="cuda")).sentence
    assert "may hide" not in give_verdict(replace(STARVED, device="cuda", timeline="device")).sentence


def test_an_evaluation_is_not_starvation() -> None:
    columns = steps(100, 0.005, 0.045)
    verdict = give_verdict(window(columns, states_s=states(columns, eval=5.0)))
    assert (verdict.state, verdict.sentence) == ("eval", "evaluation takes 50% of the time")


def test_a_run_that_is_stalled_now_is_stalled_whatever_it_did_before() -> None:
    verdict = give_verdict(replace(HEALTHY, stalled_s=200.0))
    assert (verdict.state, verdict.sentence) == ("stalled", "stalled: no training step for 3m 20s")


def test_before_the_first_step_it_is_starting_up() -> None:
    assert give_verdict(Window(duration_s=9.0, states_s={"startup": 9.0})).state == "startup"


def test_time_that_nobody_explains_is_said_to_be_unknown() -> None:
    columns = steps(100, 0.001, 0.049)
    verdict = give_verdict(window(columns, states_s=states(columns, unknown=20.0)))
    assert (verdict.state, verdict.ratio) == ("unknown", pytest.approx(0.8))


def test_a_wait_for_other_ranks_is_not_healthy() -> None:
    columns = steps(100, 0.001, 0.075)
    verdict = give_verdict(window(columns, states_s=states(columns, comm_wait=2.4)))
    assert (verdict.state, verdict.ratio) == ("comm", pytest.approx(0.24))
    assert verdict.sentence.startswith("waiting for other ranks: 24% of the time")


def test_the_rank_that_the_others_wait_for_is_not_healthy() -> None:
    late = Finding("straggler", "warning", "rank 3 is late", 0.3, (), "look at it", rank=3)
    verdict = give_verdict(HEALTHY, [late])
    assert (verdict.state, verdict.ratio) == ("straggler", 0.3)
    assert verdict.sentence == "straggler: the other ranks wait for this one for 30% of every step"
    assert give_verdict(STARVED, [late]).state == "input"  # what it loses itself is more
