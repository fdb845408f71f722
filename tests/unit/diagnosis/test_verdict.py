"""The verdict: which state decides, and its sentence."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.finding import Finding, Verdict
from gpuwatch.diagnosis.report import give_verdict, is_short
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.window import Window
from gpuwatch.wire import Loader
from tests.unit.rules.windows import HEALTHY, STARVED, states, steps, window


def test_the_largest_loss_decides() -> None:
    verdict = give_verdict(STARVED)
    assert (verdict.state, verdict.ratio) == ("input", pytest.approx(0.60))
    assert verdict.sentence == "input-bound: 60% of the time training waited for data"


def test_a_loop_that_waits_a_few_per_cent_is_healthy() -> None:
    verdict = give_verdict(window(steps(100, 0.004, 0.096)))
    assert (verdict.state, verdict.ratio) == ("compute", pytest.approx(0.96))
    assert verdict.sentence == "healthy: 96% of the time is compute, the input keeps up"


def test_between_healthy_and_input_bound_there_is_no_cliff() -> None:
    """9.6% waited was healthy, 10.0% input-bound, with advice for a gain of 1.1×."""
    for wait_ms, sentence in (
        (5.2, "mostly compute; 5.2% of the time is data wait: at most 1.1× the throughput without it"),
        (10.0, "mostly compute; 10% of the time is data wait: at most 1.1× the throughput without it"),
        (14.4, "mostly compute; 14% of the time is data wait: at most 1.2× the throughput without it"),
    ):
        mild = window(steps(100, wait_ms / 1e3, 0.1 - wait_ms / 1e3))
        assert give_verdict(mild) == Verdict("compute", pytest.approx(1 - wait_ms / 100), sentence)
        assert {found.severity for found in diagnose(mild)} <= {"info"}, "nothing to do for so little"
    assert give_verdict(window(steps(100, 0.016, 0.084))).state == "input"
    on_a_gpu = give_verdict(window(steps(100, 0.01, 0.09), device="cuda"))
    assert on_a_gpu.sentence.endswith("without it (by the host clock: work queued on the device may hide part of it)")
    hidden = give_verdict(window(steps(100, 0.01, 0.09), device="jax:cuda"))
    assert hidden.sentence.startswith("healthy: 90%"), "JAX runs asynchronously: what a wait costs is not known"


def test_many_steps_that_took_little_time_are_not_called_few() -> None:
    """A run of seconds in an environment, with 579 steps between, was "short: 579 steps, too few for a prediction"."""
    quick = steps(400, 0.001, 0.003)
    rollout = window(quick, states_s=states(quick, eval=8.0), is_short=True)
    assert give_verdict(rollout).sentence.startswith(
        "short: 1.6 s in training steps, too little for a prediction; so far "
    )
    all_quick = window(steps(1499, 0.001, 0.0014), is_short=True)  # 3.6 s in all
    assert give_verdict(all_quick).sentence.startswith("short: 3.6 s in training steps, too little")


@pytest.mark.parametrize(("steps_done", "seconds", "short"), [(29, 60.0, True), (30, 4.9, True), (30, 5.0, False)])
def test_a_short_run_is_called_so(steps_done: int, seconds: float, short: bool) -> None:
    assert is_short(steps_done, seconds) is short
    verdict = give_verdict(replace(STARVED, is_short=short))
    sentence = "input-bound: 60% of the time training waited for data"
    assert verdict.sentence == (f"short: 100 steps, too few for a prediction; so far {sentence}" if short else sentence)
    assert (verdict.state, verdict.ratio) == ("input", pytest.approx(0.60))


def test_of_one_step_there_is_no_verdict() -> None:
    """`next(iter(watch(loader)))` printed "input-bound 70%"."""
    verdict = give_verdict(window(steps(1, 0.7, 0.3), is_short=True))
    assert (verdict.state, verdict.sentence) == ("unknown", "short: 1 step, too few for a verdict")
    stalled = give_verdict(window(steps(1, 0.7, 0.3), is_short=True, stalled_s=60.0))
    assert stalled.state == "stalled", "that holds however few steps there were"


def test_on_a_gpu_the_host_s_clock_is_not_taken_for_the_device_s() -> None:
    assert "may hide part of it" in give_verdict(replace(STARVED, device="cuda")).sentence
    assert "may hide" not in give_verdict(replace(STARVED, device="cuda", timeline="device")).sentence


def test_an_evaluation_is_not_starvation() -> None:
    columns = steps(100, 0.005, 0.045)
    verdict = give_verdict(window(columns, states_s=states(columns, eval=5.0)))
    assert (verdict.state, verdict.sentence) == ("eval", "evaluation takes 50% of the time")


def test_a_run_that_mostly_compiles_is_not_healthy() -> None:
    """It was "healthy: 2.3% of the time is compute, the input keeps up"."""
    often = steps(100, 0.001, 0.03)
    verdict = give_verdict(window(often, states_s=states(often, compile=96.9)))
    assert (verdict.state, verdict.ratio) == ("other", pytest.approx(0.969))
    assert verdict.sentence.startswith("torch.compile takes 97% of the time (TORCH_LOGS")
    once = steps(100, 0.001, 0.999)
    assert give_verdict(window(once, states_s=states(once, compile=10.0))).state == "compute"


def test_a_run_that_is_stalled_now_is_stalled_whatever_it_did_before() -> None:
    verdict = give_verdict(replace(HEALTHY, stalled_s=200.0))
    assert (verdict.state, verdict.sentence) == ("stalled", "stalled: no training step for 3m 20s")


def test_before_the_first_step_it_is_starting_up() -> None:
    assert give_verdict(Window(duration_s=9.0, states_s={"startup": 9.0})).state == "startup"


def test_start_up_is_no_part_of_the_time_once_there_are_steps() -> None:
    """With 38 s of start-up and 500 steps of 16 ms, half of each a wait, the verdict was wrong.

    It read "healthy: 7.9% of the time is compute, the input keeps up".
    """
    columns = steps(500, 0.009, 0.007)
    long = window(columns, states_s=states(columns, startup=40.0), loader=Loader(num_workers=0))
    verdict = give_verdict(long, diagnose(long))
    assert (verdict.state, verdict.ratio) == ("input", pytest.approx(9 / 16))
    assert verdict.sentence == (
        "input-bound: 56% of the time training waited for data (excluding start-up, which took 40.0 s of 48.0 s)"
    )
    assert diagnose(long)[0].cause == "input_single_process"
    quick = replace(long, states_s=states(columns, startup=0.1), duration_s=8.1)
    assert "start-up" not in give_verdict(quick).sentence, "too little to matter"
    rollout = window(columns, states_s=states(columns, startup=40.0, other=4.0), declared_s={"rollout": 4.0})
    assert rollout.declared == {"rollout": pytest.approx(1 / 3)}
    slow = replace(long, first_step_s={"input_wait": 20.0}, duration_s=68.0)
    slow = replace(slow, states_s=states(columns, startup=40.0) | {"input_wait": 24.5})
    assert give_verdict(slow).sentence == (
        "start: the first batch took 20.0 s of 1m 08s; apart from that input-bound: 56% of the time training waited for data "
        "(excluding start-up, which took 40.0 s of 1m 08s)"
    )


def test_a_loop_whose_steps_wait_is_not_healthy_however_small_a_part_of_the_time_they_are() -> None:
    columns = steps(100, 0.003, 0.007)
    much = window(columns, states_s=states(columns, eval=0.45, checkpoint=0.45, other=0.45, compile=0.4))
    verdict = give_verdict(much)
    assert verdict.state == "compute"
    assert verdict.sentence == "25% of the time is compute; 3 ms of a 10 ms step is data wait"
    assert give_verdict(replace(much, device="cuda")).sentence.endswith("may hide part of it)")


def test_time_that_no_message_explains_is_reported_as_unknown() -> None:
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
    verdict = give_verdict(replace(HEALTHY, rank=3), [late])
    assert (verdict.state, verdict.ratio) == ("straggler", 0.3)
    by_rank_0 = give_verdict(HEALTHY, [late])
    assert by_rank_0.sentence == "straggler: the other ranks wait for rank 3 for 30% of every step"
    assert verdict.sentence == "straggler: the other ranks wait for this one for 30% of every step"
    assert give_verdict(STARVED, [late]).state == "input"  # what it loses itself is more


@pytest.mark.parametrize(("ratio", "state"), [(0.23, "straggler"), (0.05, "comm")])
def test_what_the_ranks_wait_for_is_said_rather_than_that_they_wait(ratio: float, state: str) -> None:
    """Unless it explains less than half of it."""
    columns = steps(100, 0.001, 0.075)
    late = Finding("straggler", "warning", "rank 3 is late", ratio, (), "look at it", rank=3)
    assert give_verdict(window(columns, states_s=states(columns, comm_wait=2.4)), [late]).state == state
