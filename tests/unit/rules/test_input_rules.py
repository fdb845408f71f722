"""The input rules: each fires on its cause, stays quiet without it, abstains when its signal was not measured."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.finding import Finding
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
    assert finding.predicted_speedup == pytest.approx(100 / 40.93, abs=0.01)
    assert finding.evidence[2].text == "98% of a fetch is CPU work (decoding, augmentation)"


def test_workers_are_not_advised_for_what_is_done_around_the_loader() -> None:
    """A subclass of DataLoader augments in `__iter__`: two workers were predicted 1.31 to 2.19, and achieved 1.00."""
    around = replace(STARVED, loader=NO_WORKERS, fetch_cpu_ratio=0.98, around_place=Place("jitter", "data.py", 5, 0.9))
    finding = input_single_process(around)
    assert finding is not None and finding.title == "the training thread itself works in a fetch, in jitter"
    assert "collate_fn" in finding.advice and "num_workers" not in finding.advice
    assert finding.predicted_range is None and finding.predicted_speedup == pytest.approx(2.5)  # without any wait
    waits = input_single_process(replace(around, fetch_cpu_ratio=0.1))
    assert waits is not None and "num_workers=" in waits.advice, (
        "for a thread that takes the loader's batches, it may be"
    )
    # of a fetch of 60 ms a third stays where it is: 60 ms of rest, and one worker is enough
    some = input_single_process(replace(around, around_place=Place("sample", "data.py", 5, 1 / 3)))
    assert some is not None and "num_workers=1," in some.advice
    assert some.predicted_speedup is not None and some.predicted_speedup < 100 / 60


def test_single_process_is_capped_by_the_cores_that_are_free() -> None:
    two_cores = HostFacts(cpu_cores=2, cpu_busy_ratio=0.5)
    finding = input_single_process(replace(STARVED, loader=NO_WORKERS, fetch_cpu_ratio=0.98, host=two_cores))
    assert finding is not None
    assert "num_workers=1," in finding.advice and "(the step needs 2; limited by cores)" in finding.advice
    assert finding.predicted_speedup == pytest.approx(
        100 / 66.3 / 0.9, abs=0.01
    )  # then the worker's 60 ms, and its copy, are the limit


@pytest.mark.parametrize(("wait_s", "rest_s", "advice"), [(0.640, 0.130, "6,.*=575m,"), (0.100, 0.130, "2,.*=195m,")])
def test_where_dev_shm_has_no_room_for_workers_the_advice_says_how_large_it_must_be(
    wait_s: float, rest_s: float, advice: str
) -> None:
    """64 ImageNet samples a batch, and Docker's 64 MiB of /dev/shm.

    The first was "the benefit of workers on these cores is uncertain", the second "num_workers=1" with "takes up to
    76 MiB of /dev/shm": a bus error.
    """
    host = HostFacts(cpu_cores=16, cpu_busy_ratio=0.2, shm_size_bytes=64 << 20, shm_used_bytes=4 << 20)
    loader = Loader(num_workers=0, batch_bytes=38 << 20)
    alone = window(steps(100, wait_s, rest_s), loader=loader, worker_cpu_ratios=None, fetch_cpu_ratio=0.98, host=host)
    finding = input_single_process(alone)
    assert finding is not None
    assert re.search(f"num_workers={advice}", finding.advice), finding.advice
    roomy = input_single_process(replace(alone, host=replace(host, shm_size_bytes=1 << 30)))
    assert roomy is not None and "too small" not in roomy.advice


def test_single_process_is_capped_by_four_workers_a_core_where_the_fetch_sleeps() -> None:
    """16 workers were advised on 2 cores, and 795 after a pass that computed nothing."""
    columns = steps(100, 0.36, 0.04)
    two_cores = HostFacts(cpu_cores=2, cpu_busy_ratio=0.1)
    finding = input_single_process(window(columns, loader=NO_WORKERS, fetch_cpu_ratio=0.03, host=two_cores))
    assert finding is not None
    assert "num_workers=8, persistent_workers=True) (the step needs 10; limited by cores)" in finding.advice
    assert finding.evidence[2].text.startswith("only 3.0% of a fetch is CPU work: the rest is waiting")


def test_no_workers_deliver_faster_than_batches_are_handed_over() -> None:
    """A mean over the data set: nothing but waits. 795 workers and a gain of 800× were predicted."""
    columns = steps(100, 0.030, 0.00004)
    many_cores = HostFacts(cpu_cores=256, cpu_busy_ratio=0.1)
    finding = input_single_process(window(columns, loader=NO_WORKERS, fetch_cpu_ratio=0.03, host=many_cores))
    assert finding is not None and "num_workers=4," in finding.advice


def test_where_a_worker_may_make_it_slower_neither_a_number_nor_a_gain_is_given() -> None:
    """A step that keeps both cores busy itself: a worker takes one of them."""
    two_cores = HostFacts(cpu_cores=2, cpu_busy_ratio=0.95)
    tight = replace(STARVED, loader=Loader(num_workers=0), fetch_cpu_ratio=0.98, host=two_cores, process_cores=3.4)
    finding = input_single_process(tight)
    assert finding is not None and finding.gain == "" and finding.predicted_range is None
    assert "num_workers=" not in finding.advice
    assert "the benefit of workers on these cores is uncertain: measure it (gpuwatch tune)" in finding.advice
    sure = input_single_process(replace(tight, host=HostFacts(cpu_cores=16, cpu_busy_ratio=0.2)))
    assert sure is not None and "num_workers=2," in sure.advice and sure.predicted_range == (2.27, 2.48)


def test_a_share_of_other_steps_than_the_mean_s_is_explained() -> None:
    """ "89% of the time (4.34 ms of 34.2 ms)": most of it was first batches'."""
    columns = steps(100, 0.020, 0.040, firsts=(0, 50))
    waits = tuple(3.0 if first else 0.020 for first in columns.epoch_start)
    finding = input_single_process(window(replace(columns, data_wait_s=waits), loader=NO_WORKERS))
    assert finding is not None
    assert finding.evidence[0].text == (
        "training waited for data 16% of the time (on average 20 ms of a 60 ms step, without start-up and first batches)"
    )
    # spawned workers, 16 steps a pass: the pauses are the cause, and nearly no wait is left for another one
    columns = steps(48, 0.0013, 0.0007, firsts=(0, 16, 32))
    spawned = window(replace(columns, data_wait_s=tuple(2.0 if f else 0.0013 for f in columns.epoch_start)))
    assert [finding.cause for finding in diagnose(spawned)] == ["epoch_start_pause"]
    usual = input_single_process(replace(STARVED, loader=NO_WORKERS))
    assert usual is not None and usual.evidence[0].text.endswith("(on average 60 ms of a 100 ms step)")


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


def test_busy_workers_and_idle_cores_want_more_workers() -> None:
    finding = input_cpu(replace(STARVED, worker_cpu_ratios=BUSY))
    assert finding is not None
    # 4 workers make a batch every 100 ms: one costs 400 ms, the step takes 40: ten of them, and 15 cores are free
    assert "num_workers 4 → 10" in finding.advice
    assert finding.predicted_speedup == pytest.approx(100 / 40.93, abs=0.01)
    assert [evidence.what for evidence in finding.evidence] == ["input wait", "worker CPU", "idle cores"]
    assert finding.evidence[2].value == 8


def test_cores_that_the_workers_keep_busy_are_not_idle() -> None:
    """A container with `cpu: 4` on a node that is 6% busy: "about 4 of 4 cores are idle", with 3 workers at 100%."""
    quota = HostFacts(cpu_cores=4, cpu_busy_ratio=0.06)
    loader = Loader(num_workers=3, prefetch_factor=2, batch_bytes=6 << 20)
    finding = input_cpu(replace(STARVED, loader=loader, worker_cpu_ratios=(1.0,) * 3, host=quota))
    assert finding is not None and finding.evidence[2].text == "about 1 of 4 cores are idle"


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
    assert finding.evidence[1].text == "the CPU quota of 3.5 cores was used up in 97% of the 100 ms periods"
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
    assert finding.predicted_range == (1.0, 2.44)  # or nothing, if they wait for one thing


def test_a_declared_wait_is_named_by_its_function() -> None:
    """`with w.data():` around what tokenizes: its CPU time is not sampled, and the reason was "not proven"."""
    place = Place("get_batch", "/home/me/train.py", 12, 0.9)
    finding = input_unexplained(replace(STARVED, loader=Loader(), worker_cpu_ratios=None, fetch_place=place))
    assert finding is not None and "most of a fetch is in get_batch" in finding.title
    assert [each.what for each in finding.evidence] == ["input wait", "hottest function"]
    assert "found inside" not in finding.advice
    assert finding.title.endswith("get_batch, in the training thread")
    wrapped = Loader(dataset="Prefetcher")
    finding = input_unexplained(replace(STARVED, loader=wrapped, worker_cpu_ratios=None, fetch_place=place))
    assert finding is not None and "num_workers (no DataLoader was found inside Prefetcher)" in finding.advice


def test_workers_on_a_timer_are_named() -> None:
    finding = input_unexplained(
        replace(STARVED, worker_cpu_ratios=(0.02,) * 4, worker_waits={"sleep": 0.8, "cpu": 0.2})
    )
    assert finding is not None and finding.title.startswith("loader workers sleep: they wait on a timer")
    finding = input_unexplained(
        replace(STARVED, worker_cpu_ratios=(0.02,) * 4, worker_waits={"other": 0.8, "cpu": 0.2})
    )
    assert finding is not None and "no cause is proven" in finding.title


def test_unexplained_is_quiet_on_a_healthy_loop_and_next_to_a_proven_cause() -> None:
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
    found = [(finding.cause, finding.severity) for finding in diagnose(window(columns, loader=NO_WORKERS))]
    assert found == [("epoch_start_pause", "info")]


def test_workers_for_short_passes_are_of_one_loader() -> None:
    """MAML makes a new loader of 4 batches for each task.

    The advice was "DataLoader(num_workers=2, persistent_workers=True)", as for any loader.
    """

    def advised(length: int) -> Finding:
        columns = steps(200, 0.025, 0.010, firsts=tuple(range(0, 200, length)))
        loader = Loader(num_workers=0, dataset="Items", batch_bytes=512)
        found = input_single_process(window(columns, loader=loader, fetch_cpu_ratio=0.04))
        assert found is not None
        return found

    workers = "DataLoader(num_workers=3, persistent_workers=True) over Items"
    assert advised(100).advice.startswith(f"{workers}; expect a step of ")
    short = advised(4)
    assert short.advice == f"one {workers} for all passes: a new one starts its workers at each, which takes 140 ms"
    assert short.gain == "1.00× to 3.40×"
    shorter = advised(2)
    assert "passes longer: a start of workers takes longer than one, which takes 70 ms" in shorter.advice
    assert "num_workers" not in shorter.advice and shorter.predicted_range is None
