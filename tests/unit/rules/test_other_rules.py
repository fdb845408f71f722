"""The other rules: each fires on its cause, stays quiet without it, abstains when its signal was not measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.finding import Finding
from gpuwatch.diagnosis.rates import Done
from gpuwatch.diagnosis.report import give_verdict, make_report
from gpuwatch.diagnosis.rules import CAUSES, RULES, diagnose, in_order
from gpuwatch.diagnosis.rules.device import (
    checkpoint_stall,
    compute_bound,
    eval_share,
    gpu_saturated,
    held_idle,
    step_waits,
    transfer_pageable,
    transfer_pcie,
)
from gpuwatch.diagnosis.rules.input import outside_torch
from gpuwatch.diagnosis.rules.input_rhythm import epoch_start_pause
from gpuwatch.diagnosis.rules.killed import shm_exhaustion
from gpuwatch.diagnosis.rules.progress import stalled
from gpuwatch.diagnosis.window import GpuFacts, HostFacts, Window
from gpuwatch.host.frames import SPAWNED, Place
from gpuwatch.wire import Loader
from tests.unit.rules.windows import HEALTHY, STARVED, states, steps, window


def paused(first_wait_s: float) -> Window:
    """Three passes of 20 steps whose first batches take so long."""
    columns = steps(60, 0.001, 0.040, firsts=(0, 20, 40))
    waits = tuple(first_wait_s if first else 0.001 for first in columns.epoch_start)
    return window(replace(columns, data_wait_s=waits), loader=Loader(num_workers=2, persistent_workers=False))


def test_epoch_start_pause_names_persistent_workers() -> None:
    finding = epoch_start_pause(paused(1.6))
    assert finding is not None
    lost, whole = 3 * 1.599, 3 * 1.6 + 57 * 0.001 + 60 * 0.040
    assert finding.ratio == pytest.approx(lost / whole)
    assert finding.predicted_speedup == pytest.approx(1 / (1 - lost / whole), abs=0.01)
    assert finding.advice.startswith("persistent_workers=True")


def test_epoch_start_pause_does_not_advise_what_is_set_already() -> None:
    finding = epoch_start_pause(replace(paused(1.6), loader=Loader(num_workers=2, persistent_workers=True)))
    assert finding is not None and "persistent_workers=True" not in finding.advice


def test_pauses_are_a_share_of_all_time_not_only_of_the_steps() -> None:
    """Half of the run evaluates: 60% of the step time became "the pauses take 60% of the time"."""
    run = paused(1.2)
    whole = sum(run.steps.step_s)
    finding = epoch_start_pause(replace(run, states_s=states(run.steps, eval=whole), duration_s=2 * whole))
    assert finding is not None
    assert finding.ratio == pytest.approx(3 * 1.199 / (2 * whole))
    assert finding.predicted_speedup == pytest.approx(1 / (1 - finding.ratio), abs=0.01)
    assert "take 30% of the time" in finding.evidence[-1].text


def test_epoch_start_pause_is_quiet_for_short_first_batches() -> None:
    assert epoch_start_pause(paused(0.005)) is None
    one = steps(20, 0.001, 0.040, firsts=(0,))
    assert epoch_start_pause(window(replace(one, data_wait_s=(0.08, *one.data_wait_s[1:])))) is None


@pytest.mark.parametrize(
    ("first_s", "later_s", "work_s", "length"),
    [(0.04, 0.0, 0.008, 5), (0.01, 0.0012, 0.005, 3), (0.002, 4e-5, 4e-4, 3)],
)
def test_pauses_that_are_short_each_but_much_of_the_time_together_are_found(
    first_s: float, later_s: float, work_s: float, length: int
) -> None:
    """Passes of five steps, each 40 ms late, were "input-bound: 48%" with neither a reason nor advice."""
    columns = steps(150 * length, later_s, work_s, firsts=tuple(range(0, 150 * length, length)))
    waits = tuple(first_s if first else later_s for first in columns.epoch_start)
    found = diagnose(window(replace(columns, data_wait_s=waits), loader=Loader(num_workers=0)))
    assert [finding.cause for finding in found] == ["epoch_start_pause"]
    even = tuple((0.0, first_s)[number % 2] for number in range(150 * length))  # the first ones are like the others
    assert epoch_start_pause(window(replace(columns, data_wait_s=even))) is None


def test_the_first_batch_of_a_single_pass_is_information_while_it_matters() -> None:
    one = steps(100, 0.001, 0.040, firsts=(0,))
    slow = window(replace(one, data_wait_s=(3.0, *one.data_wait_s[1:])))
    finding = epoch_start_pause(slow)
    assert finding is not None and finding.severity == "info" and finding.gain == ""
    assert finding.title == "the first batch takes a long time"
    assert "takes 3.0 s, later ones 1 ms" in finding.evidence[0].text
    assert finding.ratio == pytest.approx(2.999 / (3.0 + 99 * 0.001 + 100 * 0.040))
    assert epoch_start_pause(replace(slow, duration_s=600.0)) is None  # of whose steps only the last ones are kept
    long = steps(1000, 0.001, 0.040, firsts=(0,))
    assert epoch_start_pause(window(replace(long, data_wait_s=(3.0, *long.data_wait_s[1:])))) is None


def test_an_iterator_for_each_batch_is_a_pause_at_each_step() -> None:
    """`next(iter(loader))` in the loop: each batch is a first one, and no cause was named."""
    finding = epoch_start_pause(window(steps(50, 0.060, 0.040, firsts=tuple(range(50)))))
    assert finding is not None and finding.title == "each batch is the first one of a new iterator"
    assert "next(batches)" in finding.advice and finding.ratio == pytest.approx(0.6)
    assert epoch_start_pause(window(steps(50, 0.005, 0.095, firsts=tuple(range(50))))) is None


def test_epoch_start_pause_abstains_without_steps() -> None:
    assert epoch_start_pause(window(steps(0, 0, 0), states_s={"eval": 10.0})) is None


def test_transfer_from_pageable_memory() -> None:
    copying = window(steps(50, 0.001, 0.060, transfer_s=0.039), device="cuda")
    finding = transfer_pageable(copying)
    assert finding is not None
    assert finding.ratio == pytest.approx(0.39)
    assert "pin_memory=True" in finding.advice
    assert finding.evidence[2].value == pytest.approx((6 << 20) / 0.039)


def test_transfer_is_quiet_when_pinned_or_short_and_abstains_when_not_known() -> None:
    copying = window(steps(50, 0.001, 0.060, transfer_s=0.039), device="cuda")
    assert transfer_pageable(replace(copying, loader=Loader(pin_memory=True))) is None
    assert transfer_pageable(replace(HEALTHY, device="cuda")) is None
    assert transfer_pageable(replace(copying, loader=Loader())) is None


def test_copies_from_memory_to_memory_have_no_bus_and_need_no_pinning() -> None:
    """`steps(loader, to="cpu")`, and Accelerate on a CPU, got the advice `pin_memory=True`."""
    pageable = window(steps(50, 0.001, 0.060, transfer_s=0.039))
    pinned = replace(pageable, loader=Loader(pin_memory=True, batch_bytes=600_000_000))
    for copying, rule in ((pageable, transfer_pageable), (pinned, transfer_pcie)):
        assert rule(copying) is None
        assert rule(replace(copying, device="cuda")) is not None
        assert rule(replace(copying, gpus=(GpuFacts("0", "GPU-0"),))) is not None, "it is not known yet what it is for"


def test_phases_that_are_small_each_are_added_up() -> None:
    """Checkpoints 8% and their load 11%: "healthy: 81% of the time is compute, the input keeps up"."""
    columns = steps(100, 0.0001, 0.0809)
    spent = {"checkpoint": 0.8, "other": 1.1}
    saving = window(columns, states_s=states(columns, **spent), declared_s={"checkpoint_load": 1.0})
    assert give_verdict(saving).sentence == (
        "mostly compute, 81% of the time; 19% is outside of training steps "
        "(checkpoint 8.0%, checkpoint_load 10%, undeclared 1.0%)"
    )
    few = window(columns, states_s=states(columns, checkpoint=0.5, other=0.5), declared_s={"checkpoint_load": 0.5})
    assert give_verdict(few).sentence == "healthy: 89% of the time is compute, the input keeps up"


BUILD = Place("D.build_index", "/home/me/data.py", 41, 0.98)
SPAWN = Place(SPAWNED, "", 0, 0.9)


@pytest.mark.parametrize(
    ("place", "title", "advice"),
    [
        (
            BUILD,
            "the first batch takes a long time: most of that is in D.build_index (data.py:41)",
            "shorten it: cache",
        ),
        (SPAWN, f"the first batch takes a long time: most of that is {SPAWNED}", "keep what each worker imports"),
        (
            Place("imports", "", 0, 0.9),
            "the first batch takes a long time: most of that is imports",
            "shorten what a worker does",
        ),
        (BUILD._replace(ratio=0.3), "the first batch takes a long time", "shorten what a worker does"),
        (None, "the first batch takes a long time", "shorten what a worker does"),
    ],
)
def test_a_run_that_mostly_starts_says_so_first(place: Place | None, title: str, advice: str) -> None:
    """A first batch of 22.8 s in a run of 33 s was a note in brackets, and a last finding "for information"."""
    columns = steps(500, 0.001, 0.009, firsts=(0,))
    columns = replace(columns, data_wait_s=(7.001, *columns.data_wait_s[1:]))
    first = {"input_wait": 7.001, "compute": 0.009}
    booked = states(columns) | {"input_wait": sum(columns.data_wait_s) + 4.0}
    slow = window(columns, states_s=booked, first_step_s=first, end_s=4.0, first_place=place)
    slow = replace(slow, step_idle_ratio=0.8)  # the step sleeps: another finding, with a larger share
    report = make_report(slow, Done(seconds=12.0, steps=500), run="r", name="r")
    assert report.findings[0].cause == "epoch_start_pause" and report.findings[1].ratio > 0.7
    assert (report.findings[0].title, report.findings[0].severity) == (title, "critical")
    assert report.findings[0].advice.startswith(advice)
    assert ("98% of the first wait is in D.build_index (data.py:41)" in str(report.findings[0])) == (place == BUILD)
    assert report.verdict.sentence.startswith(
        "start: the first batch took 7.0 s, and the end of the pass (its workers shut down) took 4.0 s of 16.0 s; apart from that host-bound"
    )
    assert slow.share("input_wait") == pytest.approx(0.1)
    usual = replace(slow, first_step_s={"input_wait": 0.3, "compute": 0.009}, end_s=0.2)
    assert "(excluding the first batch, which took 309 ms, and the end" in give_verdict(usual).sentence


@pytest.mark.parametrize(("waits", "says"), [(0.84, True), (0.2, False), (None, False)])
def test_an_evaluation_that_waits_for_data_itself_is_not_asked_to_be_rarer(waits: float | None, says: bool) -> None:
    """ "Evaluate half as often" where 84% of the evaluation was the wait of a loader without workers."""
    columns = steps(100, 0.001, 0.099)
    evaluated = window(columns, states_s=states(columns, eval=15.0), eval_wait_ratio=waits)
    finding = eval_share(evaluated)
    assert finding is not None
    assert ("give the validation set's loader workers" in finding.advice) == says
    assert [each.value for each in finding.evidence] == pytest.approx([0.6] + [waits] * (waits is not None))
    assert finding.predicted_speedup == pytest.approx(1 / (1 - 0.6 * (0.84 if says else 0.5)), abs=0.01)
    sentence = give_verdict(evaluated, [finding]).sentence
    assert sentence == "evaluation takes 60% of the time" + ", 84% of which is data wait" * says


@pytest.mark.parametrize(("rule", "state"), [(eval_share, "eval"), (checkpoint_stall, "checkpoint")])
def test_a_phase_that_takes_a_large_part(rule, state) -> None:  # type: ignore[no-untyped-def]
    columns = steps(100, 0.001, 0.099)
    finding = rule(window(columns, states_s=states(columns, **{state: 10.0})))
    assert finding is not None and finding.ratio == pytest.approx(0.5)
    assert rule(window(columns, states_s=states(columns, **{state: 1.0}))) is None
    assert rule(Window(duration_s=0.0)) is None


def test_stalled_says_for_how_long_and_where() -> None:
    finding = stalled(replace(HEALTHY, stalled_s=95.0, activity="data_wait"))
    assert finding is not None and finding.severity == "critical"
    assert finding.evidence[0].text == "no step for 1m 35s"
    assert "waits for the loader" in finding.evidence[1].text
    assert stalled(HEALTHY) is None


def test_shm_that_will_be_full_is_said_before_it_is_with_the_size_to_give() -> None:
    small = HostFacts(shm_size_bytes=64 << 20, shm_used_bytes=8 << 20)
    # 4 workers × 2 prefetched × 6 MiB = 48 MiB of 64: 75%, fine; 7 MiB a batch: 56 MiB, 87.5%
    assert shm_exhaustion(replace(HEALTHY, host=small)) is None
    loader = Loader(num_workers=4, prefetch_factor=2, batch_bytes=7 << 20)
    finding = shm_exhaustion(replace(HEALTHY, host=small, loader=loader))
    assert finding is not None and finding.severity == "warning"
    assert finding.ratio == pytest.approx(0.875)
    assert "--shm-size=70m" in finding.advice  # a quarter more than the 56 MiB


def test_shm_that_is_full_is_critical_even_when_the_loader_is_not_known() -> None:
    full = HostFacts(shm_size_bytes=64 << 20, shm_used_bytes=62 << 20)
    finding = shm_exhaustion(replace(HEALTHY, host=full, loader=Loader()))
    assert finding is not None and finding.severity == "critical"
    assert finding.ratio == pytest.approx(62 / 64)


def test_shm_abstains_where_it_was_not_measured() -> None:
    assert shm_exhaustion(replace(HEALTHY, host=HostFacts())) is None
    assert shm_exhaustion(replace(HEALTHY, host=HostFacts())) is None


def test_held_idle_names_the_gpu_idle_for_longest_and_its_owner() -> None:
    gpus = (
        GpuFacts("0", "GPU-a", 0.0, idle_s=400.0, owner="alice, pid 7 (python)"),
        GpuFacts("1", "GPU-b", 0.0, idle_s=900.0, owner="bob, pid 8 (python)"),
        GpuFacts("2", "GPU-c", 0.0, idle_s=10.0),
    )
    finding = held_idle(Window(duration_s=16.0, gpus=gpus))
    assert finding is not None
    assert finding.gpu == "GPU-b" and "bob" in finding.evidence[1].text
    assert held_idle(Window(duration_s=16.0, gpus=gpus[2:])) is None
    assert held_idle(Window(duration_s=16.0, gpus=(GpuFacts("3", "GPU-d"),))) is None


def test_gpu_saturated_needs_both_clocks_and_the_driver() -> None:
    busy = (GpuFacts("0", "GPU-a", 0.98),)
    assert gpu_saturated(replace(HEALTHY, gpus=busy)) is not None
    assert gpu_saturated(replace(HEALTHY, gpus=(GpuFacts("0", "GPU-a", 0.5),))) is None
    assert gpu_saturated(replace(STARVED, gpus=busy)) is None
    assert gpu_saturated(replace(HEALTHY, gpus=(GpuFacts("0", "GPU-a", None),))) is None


def test_compute_bound_speaks_of_cpus_only() -> None:
    assert compute_bound(HEALTHY) is not None
    assert compute_bound(replace(HEALTHY, device="cuda")) is None
    assert compute_bound(STARVED) is None


def test_a_cause_is_called_what_its_rule_is_called() -> None:
    assert len(set(CAUSES)) == len(RULES)
    found = diagnose(replace(STARVED, stalled_s=60.0, worker_cpu_ratios=(0.99,) * 4))
    assert [finding.cause for finding in found] == ["stalled", "input_cpu"]
    assert {finding.cause for finding in found} <= set(CAUSES)


def test_findings_come_most_severe_first_then_by_what_is_at_stake() -> None:
    columns = steps(100, 0.030, 0.070)
    mixed = window(columns, states_s=states(columns, eval=6.0), worker_cpu_ratios=(0.99,) * 4, stalled_s=60.0)
    found = diagnose(replace(mixed, stalled_s=None))
    assert [finding.cause for finding in found] == ["eval_share", "input_cpu"]
    assert {finding.root for finding in found} == {None}


def test_a_consequence_follows_its_root_and_names_it() -> None:
    columns = steps(100, 0.030, 0.070)
    mixed = window(columns, states_s=states(columns, eval=6.0), worker_cpu_ratios=(0.99,) * 4, stalled_s=60.0)
    found = [(finding.cause, finding.root) for finding in diagnose(mixed)]
    assert found == [("stalled", None), ("input_cpu", "stalled"), ("eval_share", None)]


PLACE = Place("get_batch", "/home/me/train.py", 12, 0.71)


def test_time_outside_of_torch_is_named_where_no_loader_is_watched() -> None:
    bounded = replace(STARVED, bounded_by_optimizer=True, loader=Loader(), fetch_place=PLACE)
    (finding,) = diagnose(bounded)
    assert (finding.cause, finding.ratio) == ("outside_torch", pytest.approx(0.6))
    assert "(on average 60 ms of a 100 ms step)" in finding.evidence[0].text
    assert finding.evidence[1].text == "71% of it is in get_batch (train.py:12)"
    assert "get_batch (train.py:12)) in `with w.data():`" in finding.advice and "(a DataLoader" in finding.advice
    fed = outside_torch(replace(bounded, loader=Loader(num_workers=0, dataset="Images")))
    assert fed is not None and "from a DataLoader over Images with num_workers=0: use more workers" in fed.advice
    verdict = give_verdict(bounded)
    assert verdict.state == "host"
    text = "60% of the time was spent between an optimizer step and the next forward pass"
    assert verdict.sentence == text
    assert outside_torch(replace(HEALTHY, bounded_by_optimizer=True)) is None
    assert outside_torch(STARVED) is None, "a watched loader has causes of its own"


def test_a_function_of_the_training_thread_before_its_forward_pass_is_not_fed_by_more_workers() -> None:
    """`post_metrics` had 99% of the time, while a thread's queue was full.

    It was called "the code that gets the batch", with the advice "use more workers".
    """
    logs = Place("post_metrics", "/home/me/train.py", 10, 0.99)
    bounded = replace(STARVED, bounded_by_optimizer=True, fetch_place=logs, around_place=logs)
    fed = outside_torch(replace(bounded, loader=Loader(num_workers=0, dataset="list")))
    cheaper = "make the code in post_metrics (train.py:10) cheaper, run it every N steps, or in another thread"
    assert fed is not None and fed.advice == cheaper
    alone = outside_torch(replace(bounded, loader=Loader()))
    assert alone is not None and alone.advice.startswith(f"{cheaper}; if it gets the batch, prefetch")
    in_a_queue = outside_torch(replace(bounded, around_place=logs._replace(ratio=0.4)))
    assert in_a_queue is not None and "more workers" in in_a_queue.advice


ENV = Place("CartPole.step", "/home/me/env.py", 41, 0.9)


def test_an_environment_between_forward_passes_is_no_evaluation() -> None:
    columns = steps(100, 0.001, 0.029)
    booked = states(columns) | {"eval": 7.0, "other": 0.0}
    rollout = window(columns, states_s=booked, bounded_by_optimizer=True, gaps_s=6.2, gap_place=ENV)
    (finding,) = [each for each in diagnose(rollout) if each.root is None]
    assert (finding.cause, finding.ratio, finding.severity) == ("outside_torch", pytest.approx(0.62), "critical")
    assert [each.text for each in finding.evidence] == [
        "62% of the time was spent between forward passes without gradients",
        "90% of it is in CartPole.step (env.py:41)",
    ]
    verdict = give_verdict(rollout, [finding])
    assert verdict.state == "host"
    assert (
        verdict.sentence == "62% of the time is spent between forward passes, most of it in CartPole.step (env.py:41)"
    )
    on_device = replace(rollout, device="cuda:0")
    assert outside_torch(on_device) == finding, "its gaps begin when a result has been read back"


def test_a_function_outside_of_steps_that_takes_long_is_named() -> None:
    columns = steps(100, 0.001, 0.029)
    rollout = window(columns, states_s=states(columns, other=6.0), between_place=ENV)
    (finding,) = [each for each in diagnose(rollout) if each.cause == "outside_torch"]
    assert (finding.ratio, finding.severity) == (pytest.approx(6 / 9, abs=0.01), "warning")
    assert (
        finding.title == "much of the time is spent outside of training steps, most of it in CartPole.step (env.py:41)"
    )
    named = replace(rollout, declared_s={"rollout": 6.0})
    one = replace(window(steps(1, 0.001, 0.029), states_s=states(columns, other=6.0)), between_place=ENV)
    for other in (
        named,
        one,
        replace(rollout, between_place=None),
        replace(rollout, between_place=ENV._replace(ratio=0.4)),
    ):
        assert "outside_torch" not in [each.cause for each in diagnose(other)]


def test_python_code_that_takes_much_of_a_step_on_a_cpu_is_named() -> None:
    """The verdict was "healthy: stop tuning the loader".

    An environment was stepped between forward passes with gradients, or batches were augmented after the loader.
    """
    slow = replace(HEALTHY, python_place=ENV._replace(ratio=0.5))
    (finding,) = [each for each in diagnose(slow) if each.root is None]
    assert (finding.cause, finding.ratio, finding.severity) == ("outside_torch", pytest.approx(0.5 * 0.99), "critical")
    assert (
        finding.title
        == "much of a training step is Python code outside of torch, most of it in CartPole.step (env.py:41)"
    )
    verdict = give_verdict(slow, [finding])
    assert (verdict.state, verdict.sentence) == (
        "host",
        "host-bound: for 50% of the time the step runs Python code outside of torch",
    )
    assert outside_torch(replace(STARVED, python_place=ENV)) is None, "the loader comes first"
    few, tiny = (replace(window(steps(*each)), python_place=ENV) for each in ((1, 0.001, 0.029), (100, 0.0, 0.0009)))
    for quiet in (replace(slow, python_place=ENV._replace(ratio=0.29)), replace(slow, device="cuda"), few, tiny):
        assert outside_torch(quiet) is None


def test_python_code_before_a_steps_first_pass_and_between_its_others_is_one_loss() -> None:
    """MAML: four tasks a step, each made in Python before its passes, were "34% of the time" for a true 55%."""
    columns = steps(100, 0.02, 0.08)
    bounded = window(columns, states_s=states(columns), bounded_by_optimizer=True)
    task = ENV._replace(ratio=0.5)
    both = replace(bounded, python_place=task, fetch_place=ENV._replace(line=7))
    finding = outside_torch(both)
    assert finding is not None and finding.ratio == pytest.approx(0.5 * 0.8 + 0.9 * 0.2)
    elsewhere = outside_torch(replace(both, fetch_place=PLACE))
    assert elsewhere is not None and elsewhere.ratio == pytest.approx(0.5 * 0.8)


def test_what_torch_compiles_at_first_hides_no_python_code() -> None:
    """In 9 s, half of which compiled, 35% of each step in a tokenizer was 17% of the time: nothing was named."""
    columns = steps(100, 0.001, 0.044)
    compiled = window(columns, states_s=states(columns, compile=4.5), python_place=ENV._replace(ratio=0.35))
    finding = outside_torch(compiled)
    assert finding is not None and finding.ratio == pytest.approx(0.35 * 4.4 / 9)
    assert outside_torch(replace(compiled, states_s=states(columns, other=4.5))) is None


def test_passes_without_gradients_that_compute_are_an_evaluation_or_a_rollout() -> None:
    columns = steps(100, 0.001, 0.059)
    evaluated = window(columns, states_s=states(columns, eval=4.0), bounded_by_optimizer=True, gaps_s=1.4)
    assert [each.cause for each in diagnose(evaluated)] == ["eval_share"]
    sentence = "evaluation, or a rollout, takes 40% of the time"
    assert give_verdict(evaluated, diagnose(evaluated)).sentence == sentence
    alone = replace(evaluated, gaps_s=0.0)
    assert give_verdict(alone, diagnose(alone)).sentence == "evaluation takes 40% of the time"


def test_a_step_that_sleeps_is_not_healthy() -> None:
    """A step that logs for 60 ms read "healthy: stop tuning the loader, a faster device shortens the step"."""
    asleep = replace(HEALTHY, step_idle_ratio=0.9, step_place=PLACE)
    (finding,) = diagnose(asleep)
    assert (finding.cause, finding.ratio) == ("step_waits", pytest.approx(0.9 * 0.99))
    assert [each.text for each in finding.evidence] == [
        "no thread of the process is runnable for 90% of the step",
        "71% of the step is in get_batch (train.py:12)",
    ]
    verdict = give_verdict(asleep, [finding])
    assert (verdict.state, verdict.ratio) == ("host", pytest.approx(0.891))
    assert verdict.sentence == "host-bound: the step is blocked for 89% of the time (no thread is runnable)"
    for quiet in (
        replace(asleep, step_idle_ratio=0.29),
        replace(asleep, step_idle_ratio=None),
        replace(asleep, world_size=2),
        replace(asleep, device="cuda"),
    ):
        assert step_waits(quiet) is None


def test_passes_that_train_nothing_count_in_no_share() -> None:
    columns = steps(100, 0.005, 0.095)
    mixed = window(columns, states_s=states(columns) | {"input_wait": 40.5}, untrained_s={"input_wait": 40.0})
    assert mixed.share("input_wait") == pytest.approx(0.05)
    assert give_verdict(mixed).sentence.endswith(
        "(excluding 40.0 s from the first pass without an optimizer step until training began)"
    )


def test_a_first_step_out_of_proportion_is_one_of_the_passes_that_train_nothing() -> None:
    columns = steps(100, 0.005, 0.095)
    mixed = window(
        columns,
        states_s=states(columns) | {"input_wait": 40.5},
        untrained_s={"input_wait": 40.0},
        first_step_s={"input_wait": 0.3},
    )
    assert mixed.share("input_wait") == pytest.approx(0.05)
    assert give_verdict(mixed).sentence.count("excluding") == 1


def test_a_root_that_is_not_there_roots_nothing() -> None:
    (finding,) = diagnose(replace(STARVED, worker_cpu_ratios=(0.99,) * 4))
    assert in_order([replace(finding, root="stalled")]) == [finding]


def test_findings_that_are_each_others_reason_are_all_listed() -> None:
    first = Finding("a", "warning", "t", 0.5, (), "", because=("b",))
    second = replace(first, cause="b", ratio=0.3, because=("a",))
    assert [(each.cause, each.root) for each in in_order([second, first])] == [("a", "b"), ("b", "a")]
