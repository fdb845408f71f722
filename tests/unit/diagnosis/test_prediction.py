"""Workers needed, what caps them, the step after: the arithmetic of docs/evidence/prediction.md."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.prediction import fetch_seconds, free_cores, plan, workers_needed
from gpuwatch.diagnosis.window import HostFacts
from gpuwatch.wire import Loader
from tests.unit.rules.windows import STARVED

MIB = 1 << 20
ALONE = replace(STARVED, loader=Loader(num_workers=0, batch_bytes=6 * MIB), worker_cpu_ratios=None)
FOUR = replace(
    STARVED, loader=Loader(num_workers=4, prefetch_factor=2, batch_bytes=6 * MIB), worker_cpu_ratios=(1.0,) * 4
)


def test_a_fetch_costs_the_wait_alone_and_w_steps_with_w_workers() -> None:
    assert fetch_seconds(0, 0.060, 0.040) == 0.060
    assert fetch_seconds(0, 0.010, 0.040, hidden_s=0.050) == pytest.approx(0.060)
    assert fetch_seconds(4, 0.060, 0.040) == pytest.approx(0.400)


@pytest.mark.parametrize(
    ("fetch_s", "rest_s", "workers"), [(0.4, 0.04, 10), (0.41, 0.04, 11), (0.01, 0.04, 1), (1.0, 0.0, 1)]
)
def test_workers_that_feed_a_step(fetch_s: float, rest_s: float, workers: int) -> None:
    assert workers_needed(fetch_s, rest_s) == workers


def test_without_limits_the_step_is_what_it_takes_itself() -> None:
    found = plan(FOUR, 0.060, 0.040, on_cpu=False)
    assert (found.workers, found.needed, found.limit) == (10, 10, None)
    # and what it costs to take a ready batch out of a worker's queue: 0.3 to 3 ms
    assert found.step_s == pytest.approx((0.0403, 0.043))
    assert found.speedup == pytest.approx((100 / 43, 100 / 40.3))
    assert found.queue_bytes == 10 * 2 * 6 * MIB


def test_cores_cap_what_computes_and_not_what_sleeps() -> None:
    eight = replace(FOUR, host=HostFacts(cpu_cores=8))
    found = plan(eight, 0.060, 0.040, on_cpu=True)
    assert (found.workers, found.needed, found.limit) == (7, 10, "cores")
    assert found.step_s[0] == pytest.approx(0.4 / 7)
    assert plan(eight, 0.060, 0.040, on_cpu=False).workers == 10


def test_a_core_that_is_seen_to_be_idle_is_not_set_aside_for_the_rank() -> None:
    # 4 of 8 cores make batches and 4 are idle: the training thread waits for its device.
    found = plan(replace(FOUR, host=HostFacts(cpu_cores=8, cpu_busy_ratio=0.5)), 0.060, 0.040, on_cpu=True)
    assert (found.workers, found.limit) == (8, "cores")
    one = Loader(num_workers=1, batch_bytes=6 * MIB)
    quiet = replace(FOUR, loader=one, worker_cpu_ratios=(0.97,), host=HostFacts(cpu_cores=2, cpu_busy_ratio=0.52))
    assert free_cores(quiet) == 2
    assert free_cores(replace(quiet, host=HostFacts(cpu_cores=2, cpu_busy_ratio=0.75))) == 1


def test_cores_that_others_use_make_a_range() -> None:
    busy = replace(FOUR, host=HostFacts(cpu_cores=16, cpu_busy_ratio=0.75))
    found = plan(busy, 0.060, 0.040, on_cpu=True)
    # 4 cores are idle and 4 make batches: at worst 8 workers' worth of CPU for ten workers
    assert found.workers == 10
    assert found.step_s == pytest.approx((0.0403, 0.050))
    assert found.speedup == pytest.approx((2.0, 100 / 40.3))


def test_a_worker_gets_no_more_of_a_full_node_than_the_training_thread_had() -> None:
    """Found by the prediction benchmark: 60% of a core make the batches now, and no core is idle."""
    full = replace(ALONE, fetch_cpu_ratio=1.0, host=HostFacts(cpu_cores=2, cpu_busy_ratio=1.0))
    assert plan(full, 0.060, 0.040, on_cpu=True).step_s == pytest.approx((0.060, 0.100))


def test_more_workers_are_never_said_to_be_slower_than_now() -> None:
    full = replace(FOUR, host=HostFacts(cpu_cores=16, cpu_busy_ratio=1.0), worker_cpu_ratios=(0.1,) * 4)
    found = plan(full, 0.060, 0.040, on_cpu=True)
    assert found.step_s[1] == pytest.approx(0.100) and found.speedup[0] == pytest.approx(1.0)


def test_shm_caps_queues_beside_what_others_keep_there() -> None:
    # 4 workers' queues hold 48 MiB of the 60 used, others 12: 80% of the other 88 are 70, or five workers of 12 MiB
    small = replace(FOUR, host=HostFacts(cpu_cores=64, shm_size_bytes=100 * MIB, shm_used_bytes=60 * MIB))
    found = plan(small, 0.060, 0.040, on_cpu=False)
    assert (found.workers, found.limit) == (5, "/dev/shm")
    assert found.queue_bytes == 60 * MIB
    assert found.step_s[0] == pytest.approx(0.08)


def test_memory_caps_queues() -> None:
    poor = replace(FOUR, host=HostFacts(cpu_cores=64, memory_available_bytes=30 * MIB))
    found = plan(poor, 0.060, 0.040, on_cpu=False)
    assert (found.workers, found.limit) == (6, "memory")


def test_what_a_worker_has_of_its_own_counts_as_memory() -> None:
    heavy = replace(FOUR, worker_private_bytes=88 * MIB, host=HostFacts(cpu_cores=64, memory_available_bytes=300 * MIB))
    found = plan(heavy, 0.060, 0.040, on_cpu=False)
    assert (found.workers, found.limit) == (7, "memory")  # three more, of 100 MiB each
    assert found.memory_bytes == 700 * MIB and found.queue_bytes == 84 * MIB
    assert plan(FOUR, 0.060, 0.040, on_cpu=False).memory_bytes is None


def test_ranks_share_cores_and_queues() -> None:
    two = replace(ALONE, local_world_size=2, host=HostFacts(cpu_cores=8))
    assert free_cores(two) == 3
    assert plan(two, 0.060, 0.040, on_cpu=True).queue_bytes == 2 * 2 * 6 * MIB * 2  # workers, prefetched, ranks


def test_what_is_not_known_caps_nothing() -> None:
    found = plan(replace(FOUR, host=HostFacts(), loader=Loader(num_workers=4)), 0.060, 0.040, on_cpu=True)
    assert (found.workers, found.limit, found.queue_bytes) == (10, None, None)
    assert found.step_s == pytest.approx((0.0403, 0.043))
