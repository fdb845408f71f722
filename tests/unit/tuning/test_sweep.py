"""What is tried, in which order, where it ends and what is taken, on machines whose truth is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwatch.errors import ConfigError
from gpuwatch.tools.tuning import tune
from gpuwatch.tools.tuning.choose import doubt, faster, fetch_cpu_ratio, most_workers
from gpuwatch.tools.tuning.result import Failed, FailureKind, LeftOut, Measured, Room, Setting, TuneResult
from gpuwatch.tools.tuning.sweep import Interrupted
from gpuwatch.tools.tuning.trial import Plan
from tests.unit.tuning.machines import GIB, MIB, Machine

WORKERS_ALONE = frozenset({"num_workers", "prefetch_factor"})


def goal(step_s: float | None, **others: Any) -> dict[str, Any]:
    return {"step_s": step_s, "budget_s": 1000.0, "takes": frozenset({"num_workers"}), **others}


@pytest.mark.parametrize("fetch_s", [0.05, 0.1, 0.17, 0.3, 0.42, 0.5, 0.9])
def test_the_smallest_number_of_workers_that_feeds_the_step_is_found(fetch_s: float) -> None:
    machine = Machine(fetch_s)
    result = machine.sweep(**goal(0.04))
    truth = ceil(fetch_s / (0.9 * 0.04) - 1e-9)
    assert result.chosen is not None and result.chosen.num_workers == truth
    assert result.feeds is True
    assert len(machine.tried) <= 11  # the ladder up to 32, and at most four between


def test_the_ladder_ends_at_the_first_setting_that_feeds_the_step() -> None:
    machine = Machine(0.1)
    machine.sweep(**goal(0.03))
    assert machine.workers_tried() == [0, 1, 2, 4, 3]  # 3 is between the last that does not and the first that does


def test_no_workers_feed_only_a_step_to_which_the_fetch_adds_nothing() -> None:
    assert Machine(0.001).sweep(**goal(0.04)).chosen == Setting(0)
    chosen = Machine(0.03).sweep(**goal(0.04)).chosen  # within the step, but it would come on top of it
    assert chosen is not None and chosen.num_workers == 1


@pytest.mark.parametrize(
    ("bound_to", "ranks", "cores"), [(12, 1, 12), (12, 8, 12), (96, 8, 12), (48, 4, 24), (96, 1, 96)]
)
def test_a_trial_has_the_cores_of_its_own_process(
    monkeypatch: pytest.MonkeyPatch, bound_to: int, ranks: int, cores: int
) -> None:
    """Of eight tasks of Slurm's on 96 cores. With `ranks=1`, 12 cores were taken for 96."""
    given: list[int] = []

    def sweep(measured: object, room: object, progress: object, cores: int, *_: object) -> SimpleNamespace:
        given.append(cores)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound_to)))
    monkeypatch.setattr("gpuwatch.tools.tuning.usable_cores", lambda: 96)
    monkeypatch.setattr("gpuwatch.tools.tuning.Sweep", sweep)
    tune(lambda num_workers: [1.0], 0.04, ranks=ranks)
    assert given == [cores]


def test_a_fetch_that_computes_gets_no_more_workers_than_cores() -> None:
    machine = Machine(0.4, cpu=1.0, cores=6)
    result = machine.sweep(**goal(0.04))
    assert machine.workers_tried() == [0, 1, 2, 4, 6, 5]
    assert result.chosen is not None and result.chosen.num_workers == 6
    assert result.feeds is False
    assert "nothing feeds a 40 ms step; num_workers=6 comes closest (a batch every 66.7 ms" in result.why
    assert "all 6 cores are busy" in result.why
    left = [row for row in result.rows if isinstance(row, LeftOut)]
    assert [(row.setting.num_workers, row.limit) for row in left] == [(12, "cpu")]


def test_a_fetch_that_half_sleeps_gets_as_many_as_keep_the_cores_busy() -> None:
    machine = Machine(0.4, cpu=0.4, cores=4)
    machine.sweep(**goal(0.01))
    assert max(machine.workers_tried()) == 10


def test_a_fetch_that_sleeps_may_have_more_workers_than_cores() -> None:
    result = Machine(0.6, cpu=0.01, cores=2).sweep(**goal(0.04))
    assert result.chosen is not None and result.chosen.num_workers == 17


def test_a_machine_that_others_keep_busy_ends_no_ladder_before_its_time() -> None:
    """As measured on two busy cores: a fetch of 64 ms of sleep and 32 of work, which others stretch and spread."""
    times = {0: 0.124, 1: 0.158, 2: 0.132, 3: 0.06, 4: 0.038}
    machine = Machine(0.1, cores=2, others_cores=1.8)

    def measure(setting: Setting, plan: Plan) -> Measured | Failed:
        row = machine.measure(setting, plan)
        assert isinstance(row, Measured)
        shown = replace(
            row, batch_s=times[setting.num_workers], spread_ratio=0.2, batches=15 * max(1, setting.num_workers)
        )
        return replace(shown, worker_cpu_ratio=0.25, main_cpu_ratio=0.25, cpu_demand_ratio=0.5)

    result = machine.sweeping(**goal(0.05), measure=measure, clock=lambda: 0.0).run()
    assert machine.workers_tried()[:4] == [0, 1, 2, 4]
    assert result.chosen is not None and result.chosen.num_workers == 4 and result.feeds is True


def test_a_queue_for_a_core_is_no_part_of_what_a_fetch_needs_of_it() -> None:
    quarter = Machine(0.4).measure(Setting(1, 2), Plan(1.0, 1.0))
    assert isinstance(quarter, Measured)
    shared = replace(quarter, worker_cpu_ratio=0.2, cpu_demand_ratio=0.4)  # 0.2 at work, 0.2 in the queue, 0.6 asleep
    assert fetch_cpu_ratio([shared]) == pytest.approx(0.25)
    assert most_workers([shared], 4, None)[0] == 16
    computes = replace(quarter, worker_cpu_ratio=0.3, cpu_demand_ratio=1.0)
    assert fetch_cpu_ratio([computes]) == 1.0
    assert fetch_cpu_ratio([replace(quarter, cpu_demand_ratio=None)]) is None


def test_two_settings_that_bring_nothing_end_it() -> None:
    machine = Machine(0.4, cpu=0.05, cores=8, ceiling_s=0.1)  # a lock: never more than ten batches a second
    result = machine.sweep(**goal(0.04))
    assert machine.workers_tried()[:6] == [0, 1, 2, 4, 8, 16]
    assert result.chosen is not None and result.chosen.num_workers == 4
    assert "workers wait, on the CPU" in result.why
    assert "two more settings" in result.stopped


def test_without_a_step_the_smallest_within_five_percent_of_the_best_is_taken() -> None:
    machine = Machine(0.4, cpu=0.05, cores=8, ceiling_s=0.4 / 6)
    result = machine.sweep(**goal(None))
    assert result.chosen is not None and result.chosen.num_workers == 6
    assert result.feeds is None
    assert "8 gains nothing more" in result.why


def test_without_a_step_a_worker_that_makes_batches_a_little_slower_is_taken() -> None:
    """It was neither that one, as 0 is faster, nor 0, as that is not much faster: "fails with every setting tried"."""
    machine = Machine(0.1)

    def measure(setting: Setting, plan: Plan) -> Measured | Failed:
        row = machine.measure(setting, plan)
        assert isinstance(row, Measured)
        return replace(row, batch_s=0.1 if setting.num_workers else 0.09)

    result = machine.sweeping(**goal(None), measure=measure, clock=lambda: 0.0).run()
    assert result.chosen == Setting(1, 2)
    assert result.why.startswith("num_workers=1 is the smallest within 5% of the best with workers")


def test_nothing_is_tried_that_could_fill_dev_shm() -> None:
    machine = Machine(0.5, shm_bytes=64 * MIB, batch_bytes=4 * MIB)
    result = machine.sweep(**goal(0.04, takes=WORKERS_ALONE))
    assert machine.tried
    for setting in machine.tried:
        assert (setting.batches_ahead + 1) * 4 * MIB <= 0.6 * 64 * MIB or not setting.num_workers
    left = next(row for row in result.rows if isinstance(row, LeftOut))
    assert left.limit == "shm" and "of /dev/shm" in left.text and "60% of the 64 MiB free" in left.text
    assert any(setting.prefetch_factor == 1 for setting in machine.tried)  # less made ahead lets more workers in
    assert result.feeds is False and "/dev/shm" in result.why


def test_nothing_is_tried_that_could_fill_the_memory() -> None:
    machine = Machine(0.5, memory_bytes=4 * GIB, worker_bytes=500 * MIB)
    result = machine.sweep(**goal(0.04))
    assert max(machine.workers_tried()) * 500 * MIB <= 0.6 * 4 * GIB
    left = next(row for row in result.rows if isinstance(row, LeftOut))
    assert left.limit == "memory" and left.setting.num_workers == 8
    assert "of memory" in result.why


def test_what_other_processes_take_is_named_as_the_limit() -> None:
    machine = Machine(0.4, cpu=1.0, cores=2, others_cores=1.0, ceiling_s=0.4)
    assert "all 2 cores are busy, 1.0 of them with other processes" in machine.sweep(**goal(0.04)).why


def test_nothing_is_tried_twice_or_left_out_twice() -> None:
    result = Machine(0.5, shm_bytes=64 * MIB, batch_bytes=4 * MIB).sweep(**goal(0.02, takes=WORKERS_ALONE))
    assert len({row.setting for row in result.rows}) == len(result.rows)


def test_ranks_share_the_machine() -> None:
    machine = Machine(0.5, shm_bytes=64 * MIB, batch_bytes=2 * MIB)
    machine.sweep(**goal(0.04, ranks=4))
    assert all(4 * (setting.batches_ahead + 1) * 2 * MIB <= 0.6 * 64 * MIB for setting in machine.tried[1:])


def test_max_workers_is_heeded() -> None:
    machine = Machine(0.5)
    result = machine.sweep(**goal(0.04, max_workers=3))
    assert machine.workers_tried() == [0, 1, 2, 3]
    assert "--max-workers 3" in result.why
    assert Machine(0.5).sweep(**goal(0.04, max_workers=0)).chosen == Setting(0)


def test_the_budget_ends_it() -> None:
    machine = Machine(0.5, trial_s=5.0)
    result = machine.sweep(**goal(0.01, budget_s=12.0))
    assert machine.now_s <= 12.0
    assert "budget of 12.0 s" in result.stopped
    assert result.chosen is not None


def failing(kind: FailureKind, *workers: int) -> Callable[[Setting], Failed | None]:
    return lambda setting: Failed(setting, kind, "it broke") if setting.num_workers in workers else None


def test_a_worker_that_is_killed_ends_the_ladder_and_the_best_before_is_taken() -> None:
    machine = Machine(0.5, fails=failing("out_of_memory", 4, 8, 16))
    result = machine.sweep(**goal(0.04))
    assert max(machine.workers_tried()) == 4
    assert result.chosen is not None and result.chosen.num_workers == 2
    assert "it broke" in result.why


def test_a_loader_that_runs_with_workers_only_is_tuned() -> None:
    result = Machine(0.1, fails=failing("error", 0)).sweep(**goal(0.04))
    assert result.chosen is not None and result.chosen.num_workers == 3


def test_a_loader_that_always_fails_is_an_error_that_says_how() -> None:
    with pytest.raises(ConfigError, match=r"fails with every setting tried: it broke; take one batch"):
        Machine(0.1, fails=failing("error", 0, 1, 2, 4)).sweep(**goal(0.04))


def test_no_loader_at_all_is_reported_at_once() -> None:
    machine = Machine(0.1, fails=failing("no_loader", 0, 1))
    with pytest.raises(ConfigError, match=r"^it broke$"):
        machine.sweep(**goal(0.04))
    assert machine.workers_tried() == [0]


def test_more_prefetch_is_taken_only_where_it_brings_something() -> None:
    takes = WORKERS_ALONE
    gains = Machine(0.4, cores=2, cpu=0.05, prefetch_gain=0.8).sweep(**goal(0.001, takes=takes, max_workers=4))
    assert gains.chosen == Setting(4, 8)
    same = Machine(0.4, cores=2, cpu=0.05).sweep(**goal(0.001, takes=takes, max_workers=4))
    assert same.chosen == Setting(4, 2)


def test_a_gain_within_the_spread_is_none() -> None:
    row = Machine(0.4).measure(Setting(2, 2), Plan(1.0, 1.0))
    assert isinstance(row, Measured)
    sure, less = replace(row, spread_ratio=0.01, batch_s=0.1), replace(row, spread_ratio=0.01, batch_s=0.09)
    assert faster(less, sure) and not faster(replace(less, batch_s=0.096), sure)
    unsure = replace(less, spread_ratio=0.3)  # 25 cycles: 11% of doubt
    assert doubt(unsure) == pytest.approx(1.25 * 0.6 / 1.35 / 5) and not faster(unsure, sure)
    assert doubt(replace(less, spread_ratio=None)) == 0.0


def test_pinned_memory_is_tried_with_cuda_alone_and_taken_if_copies_are_faster() -> None:
    takes = frozenset({"num_workers", "pin_memory"})
    without = Machine(0.1)
    assert without.sweep(**goal(0.04, takes=takes)).chosen == Setting(3, 2)
    assert not any(setting.pin_memory for setting in without.tried)
    faster = Machine(0.1, copy_s=lambda setting: 0.003 if setting.pin_memory else 0.012)
    result = faster.sweep(**goal(0.04, takes=takes))
    assert result.chosen == Setting(3, 2, pin_memory=True)
    assert "pin_memory: a copy to the GPU 12 ms → 3 ms" in result.notes
    same = Machine(0.1, copy_s=lambda setting: 0.003).sweep(**goal(0.04, takes=takes))
    assert same.chosen == Setting(3, 2)


def test_workers_are_kept_where_a_later_pass_then_starts_sooner() -> None:
    takes = frozenset({"num_workers", "persistent_workers"})
    sooner = Machine(0.1, second_first_batch_s=0.1).sweep(**goal(0.04, takes=takes))
    assert sooner.chosen == Setting(3, 2, persistent_workers=True)
    assert Machine(0.1, second_first_batch_s=0.6).sweep(**goal(0.04, takes=takes)).chosen == Setting(3, 2)


def test_ctrl_c_keeps_what_was_measured() -> None:
    machine = Machine(0.1)

    def interrupted(setting: Setting, plan: Plan) -> Measured | Failed:
        if setting.num_workers == 2:
            raise KeyboardInterrupt
        return machine.measure(setting, plan)

    with pytest.raises(Interrupted) as caught:
        machine.sweeping(**goal(0.04), measure=interrupted, clock=lambda: 0.0).run()
    result = caught.value.result
    assert isinstance(result, TuneResult)
    assert [row.setting.num_workers for row in result.rows] == [0, 1]
    assert result.stopped == "interrupted"
    assert result.why == (
        "nothing that was tried feeds a 40 ms step; num_workers=1 comes closest (a batch every 100 ms, "
        "steps 150% longer); interrupted before more was tried"
    )


def test_what_is_free_is_looked_at_before_each_trial() -> None:
    machine = Machine(0.5, batch_bytes=4 * MIB)
    rooms = iter([16 * GIB] * 3 + [20 * MIB] * 100)

    def room() -> Room:
        return {"memory": (32 * GIB, 32 * GIB), "/dev/shm": (next(rooms), 16 * GIB)}

    machine.sweeping(**goal(0.04), room=room, clock=lambda: 0.0).run()
    assert machine.workers_tried() == [0, 1]
