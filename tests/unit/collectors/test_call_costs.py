"""Calls into the driver: cheap ones as planned, dear ones as seldom as their budget wants."""

from __future__ import annotations

import pytest

from gpuwatch_agent.collectors.drivers import CallCosts


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("round_s", "interval_s"),
    [(0.0001, 1), (0.01, 1), (0.036, 3.6), (0.32, 32), (9.0, 300)],
    ids=["cheap", "at its budget", "process lists of 8 GPUs", "PCIe throughput of 8 GPUs", "a driver under load"],
)
def test_interval_follows_the_cost(round_s: float, interval_s: float) -> None:
    costs = CallCosts(Clock())
    assert costs.due("call", 1.0)
    for _ in range(2):
        costs.done("call", round_s)
        assert costs.calls["call"].interval_s == 1  # too early to judge
    costs.done("call", round_s)
    assert costs.calls["call"].interval_s == pytest.approx(interval_s)
    assert costs.calls["call"].seconds == pytest.approx(3 * round_s)


def test_call_is_due_when_its_interval_is_over() -> None:
    clock = Clock()
    costs = CallCosts(clock)
    asked = []
    for turn in range(25):
        clock.now_s = turn
        if costs.due("processes", 10.0):
            costs.done("processes", 0.001)
            asked.append(turn)
    assert asked == [0, 10, 20]


def test_one_call_that_hung_says_nothing_of_the_next_one() -> None:
    costs = CallCosts(Clock())
    costs.due("call", 1.0)
    for seconds in (0.001, 0.001, 2.0, 0.001, 2.0):
        costs.done("call", seconds)
        assert costs.calls["call"].interval_s == 1
    costs.done("call", 2.0)
    assert costs.calls["call"].interval_s == 200
    for _ in range(3):
        costs.done("call", 0.001)
    assert costs.calls["call"].interval_s == 1


def test_call_under_way_is_named_and_timed() -> None:
    times = iter([5.0, 5.5])
    costs = CallCosts(Clock(), lambda: next(times))
    with costs.calling("energy of GPU 3") as took:
        assert costs.current == "energy of GPU 3"
    assert (costs.current, took) == ("", [0.5])
