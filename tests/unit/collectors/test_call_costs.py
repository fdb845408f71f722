"""Calls into the driver: cheap ones as planned, expensive ones as rarely as their budget demands."""

from __future__ import annotations

import pytest

from gpuwatch_agent.collectors.drivers import Reading


def reading(planned_s: float = 1.0) -> Reading:
    return Reading(lambda gpu: [], planned_s, planned_s)


@pytest.mark.parametrize(
    ("round_s", "interval_s"),
    [(0.0001, 1), (0.01, 1), (0.036, 3.6), (0.32, 32), (9.0, 300)],
    ids=["cheap", "at its budget", "process lists of 8 GPUs", "PCIe throughput of 8 GPUs", "a driver under load"],
)
def test_interval_follows_the_cost(round_s: float, interval_s: float) -> None:
    call = reading()
    assert call.is_due(0)
    for _ in range(2):
        call.done(0, round_s)
        assert call.interval_s == 1  # too early to know
    call.done(0, round_s)
    assert call.interval_s == pytest.approx(interval_s)
    assert call.spent_s == pytest.approx(3 * round_s)


def test_call_is_due_when_its_interval_is_over() -> None:
    call, made = reading(10.0), []
    for tick in range(25):
        if call.is_due(tick):
            call.done(tick, 0.001)
            made.append(tick)
    assert made == [0, 10, 20]


def test_one_call_that_hung_does_not_predict_the_next_one() -> None:
    call = reading()
    for seconds in (0.001, 0.001, 2.0, 0.001, 2.0):
        call.done(0, seconds)
        assert call.interval_s == 1
    call.done(0, 2.0)
    assert call.interval_s == 200
    for _ in range(3):
        call.done(0, 0.001)
    assert call.interval_s == 1
