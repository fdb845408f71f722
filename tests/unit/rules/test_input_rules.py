"""The input rules: each fires on its cause, stays quiet without it, abstains when its signal was not measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.rules.input import input_cpu, input_cpu_saturated, input_single_process, input_unexplained
from gpuwatch.diagnosis.window import HostFacts
from gpuwatch.host.frames import Place
from gpuwatch.wire import Loader
from tests.unit.rules.windows import HEALTHY, STARVED, steps, window

NO_WORKERS = Loader(num_workers=0, batch_size=32, batch_bytes=6 << 20)
BUSY = (0.97, 0.98, 0.95, 0.96)
FULL_NODE = HostFacts(cpu_cores=4, cpu_busy_ratio=0.97, cpu_pressure_ratio=0.6)


def test_single_process_names_the_workers_that_feed_the_step_and_what_they_take() -> None:
    finding = input_single_process(replace(STARVED, loader=NO_WORKERS, fetch_cpu_ratio=0.98))
    assert finding is not None
    assert finding.severity == "critical"
    assert finding.ratio == pytest.approx(0.60)
    # a fetch of 60 ms against 40 ms of the rest: two workers deliver every 30 ms, and the step takes 40
    assert "num_workers=2," in finding.advice
    assert "24 MiB of /dev/shm" in finding.advice  # 2 workers × 2 prefetched × 6 MiB
    assert finding.predicted_speedup == pytest.approx(100 / 40.3, abs=0.01)
    assert finding.evidence[2].text == "98% of a fetch is CPU work (decoding, augmentation)"


def test_single_process_is_capped_by_the_cores_that_are_free() -> None:
    two_cores = HostFacts(cpu_cores=2, cpu_busy_ratio=0.5)
    finding = input_single_process(replace(STARVED, loader=NO_WORKERS, fetch_cpu_ratio=0.98, host=two_cores))
    assert finding is not None
    assert "num_workers=1," in finding.advice and "(2 would feed the step, limited by cores)" in finding.advice
    assert finding.predicted_speedup == pytest.approx(100 / 60, abs=0.01)  # then the worker's 60 ms are the limit


def test_single_process_is_capped_by_four_workers_a_core_where_the_fetch_sleeps() -> None:
    """16 workers were advised on 2 cores, and 795 after a pass that computed nothing."""
    columns = steps(100, 0.36, 0.04)
    two_cores = HostFacts(cpu_cores=2, cpu_busy_ratio=0.1)
    finding = input_single_process(window(columns, loader=NO_WORKERS, fetch_cpu_ratio=0.03, host=two_cores))
    assert finding is not None
    assert "num_workers=8, persistent_workers=True) (9 would feed the step, limited by cores)" in finding.advice
    assert finding.evidence[2].text.startswith("only 3.0% of a fetch is CPU work: it waits")


def test_no_workers_deliver_faster_than_batches_are_handed_over() -> None:
    """A mean over the data set: nothing but waits. 795 workers and a gain of 800× were predicted."""
    columns = steps(100, 0.030, 0.00004)
    many_cores = HostFacts(cpu_cores=256, cpu_busy_ratio=0.1)
    finding = input_single_process(window(columns, loader=NO_WORKERS, fetch_cpu_ratio=0.03, host=many_cores))
    assert finding is not None and "num_workers=10," in finding.advice


def test_the_user_s_own_function_that_a_fetch_is_in_is_evidence() -> None:
    place = Place("Tokenizer.encode", "/home/me/data.py", 41, 0.64)
    finding = input_single_process(replace(STARVED, loader=NO_WORKERS, fetch_place=place))
    assert finding is not None
    assert finding.evidence[-1].text == "64% of a fetch is in Tokenizer.encode (data.py:41)"


def test_single_process_is_quiet_with_workers_and_on_a_healthy_loop() -> None:
    assert input_single_process(STARVED) is None
    assert input_single_process(replace(HEALTHY, loader=NO_WORKERS)) is None


def test_single_process_abstains_without_the_loader_s_settings() -> None:
    assert input_single_process(replace(STARVED, loader=Loader())) is None
    assert input_single_process(replace(STARVED, loader=Loader())) is None


def test_busy_workers_beside_idle_cores_want_more_workers() -> None:
    finding = input_cpu(replace(STARVED, worker_cpu_ratios=BUSY))
    assert finding is not None
    # 4 workers make a batch every 100 ms: one costs 400 ms, the step takes 40: ten of them, and 15 cores are free
    assert "num_workers 4 → 10" in finding.advice
    assert finding.predicted_speedup == pytest.approx(100 / 40.3, abs=0.01)
    assert [evidence.what for evidence in finding.evidence] == ["input wait", "worker CPU", "idle cores"]
    assert finding.evidence[2].value == 8


def test_busy_workers_are_quiet_on_a_healthy_loop_and_when_they_sleep() -> None:
    assert input_cpu(replace(HEALTHY, worker_cpu_ratios=BUSY)) is None
    assert input_cpu(STARVED) is None


def test_busy_workers_abstain_without_their_figures_or_the_node_s() -> None:
    assert input_cpu(replace(STARVED, worker_cpu_ratios=None)) is None
    assert input_cpu(replace(STARVED, worker_cpu_ratios=BUSY, host=HostFacts())) is None
    assert input_cpu(replace(STARVED, worker_cpu_ratios=BUSY, host=HostFacts(cpu_cores=16))) is None


def test_exhausted_cores_say_that_more_workers_will_not_help() -> None:
    finding = input_cpu_saturated(replace(STARVED, worker_cpu_ratios=BUSY, host=FULL_NODE))
    assert finding is not None
    assert "more workers will not help" in finding.advice
    assert finding.predicted_speedup == pytest.approx(2.5)
    assert "60%" in finding.evidence[2].text  # CPU pressure
    assert input_cpu(replace(STARVED, worker_cpu_ratios=BUSY, host=FULL_NODE)) is None


def test_a_quota_that_is_used_up_is_named_on_a_node_with_cores_to_spare() -> None:
    held = HostFacts(cpu_cores=4, cpu_busy_ratio=0.1, cpu_quota_cores=3.5, cpu_throttled_ratio=0.97)
    finding = input_cpu_saturated(replace(STARVED, worker_cpu_ratios=BUSY, host=held))
    assert finding is not None and finding.title == "the job's CPU quota limits the loader workers"
    assert finding.evidence[1].text == "the CPU quota of 3.5 cores was used up in 97% of its periods of 100 ms"
    assert "resources.limits.cpu" in finding.advice and "more workers will not help" in finding.advice
    roomy = replace(held, cpu_cores=16, cpu_throttled_ratio=0.1)
    assert input_cpu_saturated(replace(STARVED, worker_cpu_ratios=BUSY, host=roomy)) is None
    both = input_cpu_saturated(replace(STARVED, worker_cpu_ratios=BUSY, host=replace(held, cpu_busy_ratio=0.95)))
    assert both is not None and both.title == finding.title  # more of the node's cores would be of no use to it
    assert "the node's cores are 95% busy" in both.evidence[2].text
    wide = replace(held, cpu_cores=16)
    assert input_cpu(replace(STARVED, worker_cpu_ratios=BUSY, host=wide)) is None
    assert input_cpu(replace(STARVED, worker_cpu_ratios=BUSY, host=replace(wide, cpu_throttled_ratio=0.1))) is not None
    asleep = replace(STARVED, worker_cpu_ratios=(0.02,) * 4, host=held)
    assert input_cpu_saturated(asleep) is None


def test_exhausted_cores_are_quiet_with_cores_to_spare() -> None:
    assert input_cpu_saturated(replace(STARVED, worker_cpu_ratios=BUSY)) is None
    assert input_cpu_saturated(replace(HEALTHY, worker_cpu_ratios=BUSY, host=FULL_NODE)) is None


def test_exhausted_cores_abstain_without_figures() -> None:
    assert input_cpu_saturated(replace(STARVED, worker_cpu_ratios=BUSY, host=HostFacts())) is None
    assert input_cpu_saturated(replace(STARVED, worker_cpu_ratios=None, host=FULL_NODE)) is None


def test_sleeping_workers_are_said_to_wait_for_something_that_cores_do_not_limit() -> None:
    finding = input_unexplained(replace(STARVED, worker_cpu_ratios=(0.02, 0.03, 0.02, 0.01)))
    assert finding is not None
    # if each waits for itself: a batch costs a worker 4 × 100 ms, and the step takes 40
    assert "num_workers 4 → 10" in finding.advice and "sleep" in finding.advice
    assert finding.predicted_range == (1.0, 2.48)  # or nothing, if they wait for one thing


def test_unexplained_is_quiet_on_a_healthy_loop_and_beside_a_proven_cause() -> None:
    assert input_unexplained(HEALTHY) is None
    causes = [finding.cause for finding in diagnose(replace(STARVED, worker_cpu_ratios=BUSY))]
    assert causes == ["input_cpu"]


def test_too_few_steps_prove_nothing() -> None:
    few = window(steps(3, 0.060, 0.040), loader=NO_WORKERS)
    assert input_single_process(few) is None
    assert input_unexplained(few) is None


def test_a_slow_first_batch_alone_is_no_steady_wait() -> None:
    columns = steps(50, 0.001, 0.040, firsts=(0,))
    columns = replace(columns, data_wait_s=(2.0, *columns.data_wait_s[1:]))
    assert window(columns).share("input_wait") > 0.4
    assert diagnose(window(columns, loader=NO_WORKERS)) == []
