"""A run's last minute of steps, as columns."""

from __future__ import annotations

import pytest

from gpuwatch import wire
from gpuwatch_agent.runs import Run
from gpuwatch_agent.runs.timeline import KEPT, KEPT_OF_ALL, RecentColumns, read_columns
from tests.unit.agent.hooks import BOOT, FakeHook, S, wall_s

MS = 1_000_000


def packed(first: int, count: int, **more: list[int]) -> dict[str, bytes]:
    """Steps of 10 ms: 3 wait, 1 copy, 6 compute."""
    columns = {
        "start_ns": [10 * MS * (first + n) for n in range(count)],
        "data_wait_ns": [3 * MS] * count,
        "transfer_ns": [MS] * count,
        "compute_ns": [6 * MS] * count,
        **more,
    }
    return {name: wire.pack(values) for name, values in columns.items()}


def test_messages_are_joined_in_their_order_on_the_agents_clock() -> None:
    assert RecentColumns().last_end_ns is None
    first, later = (
        read_columns(packed(0, 2, samples=[8, -1], epoch_start=[1, 0]), 1000 * MS),
        read_columns(packed(2, 1), 1000 * MS),
    )
    assert (first.last_end_ns, later.last_end_ns) == (1020 * MS, 1030 * MS)
    found = RecentColumns().followed_by(first).followed_by(later)
    assert found.end_ns == [1010 * MS, 1020 * MS, 1030 * MS]
    assert (found.data_wait_s[0], found.transfer_s[1], found.compute_s[2]) == (0.003, 0.001, 0.006)
    assert found.epoch_start == [True, False, False] and found.samples == [8, -1, -1]
    assert found.comm_wait_ns == [-1, -1, -1] and found.hidden_wait_s == [0.0, 0.0, 0.0]
    assert first.end_ns == (1010 * MS, 1020 * MS)  # a message's own are not changed


@pytest.mark.parametrize("left_out", ["device_transfer_ns", "device_compute_ns"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_step_without_a_value_of_the_device_s_is_the_host_s(left_out: str, whole: bool) -> None:
    """What was not measured is not 0: a damaged message, or one of another hook, may lack a column or a row of it."""
    device = {"input_wait_ns": [2 * MS], "host_wait_ns": [-1], "device_transfer_ns": [0], "device_compute_ns": [5 * MS]}
    complete = read_columns(packed(0, 1, **device), 0)
    assert (complete.data_wait_s, complete.transfer_s, complete.compute_s) == ((0.002,), (0.0,), (0.005,))
    assert complete.hidden_wait_s == (0.001,)
    device[left_out] = [-1]
    lacking = read_columns(
        packed(0, 1, **{name: of for name, of in device.items() if not (whole and name == left_out)}), 0
    )
    assert lacking == read_columns(packed(0, 1), 0)
    assert (lacking.data_wait_s, lacking.transfer_s, lacking.compute_s) == ((0.003,), (0.001,), (0.006,))


def test_a_minute_and_no_more_than_so_many_are_kept() -> None:
    messages = [read_columns(packed(10 * message, 10), 0) for message in range(200)]
    steps, none = RecentColumns(), RecentColumns()
    for message in messages:
        steps = steps.followed_by(message, most=3000)
    assert len(steps) == 2000 and steps.end_ns[0] == 10 * MS
    assert len(steps.followed_by(none)) == KEPT
    assert steps.end_ns[0] == 10 * MS * (2000 - KEPT + 1)
    assert steps.followed_by(none, 10 * MS * 1995).end_ns == [10 * MS * n for n in range(1995, 2001)]
    assert len(steps.followed_by(none, 10 * MS * 2001)) == 0
    assert steps.followed_by(messages[0]).end_ns == [10 * MS * n for n in range(1, 11)]


@pytest.mark.parametrize("runs", [1, 800])
def test_steps_are_bounded(runs: int) -> None:
    hook, run, most = FakeHook(1000 * S), Run("run-a", 0, BOOT), min(KEPT, KEPT_OF_ALL // runs)
    for _ in range(300):
        for _ in range(10):
            hook.step(MS, MS)
        run.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
        run.remember(hook.at_ns, runs)
        assert len(run.steps) <= most
    assert (len(run.steps), run.steps.last_end_ns) == (most, hook.at_ns)


def test_one_message_of_more_steps_than_are_kept() -> None:
    steps = read_columns(packed(0, KEPT + 50), 0).followed_by(RecentColumns())
    assert len(steps) == KEPT and steps.last_end_ns == 10 * MS * (KEPT + 50)


def test_columns_that_are_no_steps_are_not_taken() -> None:
    assert read_columns({"start_ns": wire.pack([1])}, 0) == RecentColumns() == read_columns({}, 0)


def test_the_devices_timeline_counts_where_it_measured_the_step() -> None:
    device = {
        "input_wait_ns": [1 * MS, -1],
        "host_wait_ns": [2 * MS, -1],
        "device_transfer_ns": [4 * MS, -1],
        "device_compute_ns": [5 * MS, -1],
    }
    found = read_columns(packed(0, 2, **device), 0)
    assert found.data_wait_s == (0.001, 0.003) and found.hidden_wait_s == (0.002, 0.0)
    assert found.transfer_s == (0.004, 0.001) and found.compute_s == (0.007, 0.006)
    assert found.end_ns == (10 * MS, 20 * MS)  # the step ends when the host says so
