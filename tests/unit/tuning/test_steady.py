"""The pace of batches, from arrival times whose truth is known."""

from __future__ import annotations

import pytest

from gpuwatch.tools.tuning.trial import pace, warm_up


def arrivals(workers: int, ahead: int, fetch_s: float, count: int, start_s: float = 0.5) -> list[float]:
    """Return when a consumer faster than the workers gets its batches: bursts of `workers`, ready-made ones at once."""
    return [start_s + fetch_s * (1 + index // workers) + index * 1e-5 for index in range(count)]


def test_a_burst_of_all_workers_counts_as_one_cycle() -> None:
    found = pace([arrivals(workers=4, ahead=8, fetch_s=0.1, count=80)], [2.5], 4, 8)
    assert found.batch_s == pytest.approx(0.025, rel=0.01)  # the median of single gaps is 10 µs
    assert found.spread_ratio == pytest.approx(0.0, abs=0.01)


def test_batches_that_were_ready_made_do_not_count() -> None:
    ready = [1.0 + index * 1e-4 for index in range(16)]  # made while the consumer was away
    rest = [ready[-1] + 0.2 * (1 + index // 2) for index in range(12)]
    found = pace([ready + rest], [3.0], 2, 16)
    assert found.batch_s == pytest.approx(0.1, rel=0.01)
    assert found.batches == 12


def test_without_workers_the_first_batch_alone_does_not_count() -> None:
    found = pace([[3.0, 3.1, 3.2, 3.3]], [0.4], 0, 0)
    assert (found.batch_s, found.batches) == (pytest.approx(0.1), 3)
    assert found.spread_ratio is None  # three are too few


def test_a_pass_that_is_all_ready_made_has_no_pace_but_a_mean() -> None:
    passes = [arrivals(4, 8, 0.1, 8), arrivals(4, 8, 0.1, 8)]
    found = pace(passes, [0.8, 1.6], 4, 8)
    assert (found.batch_s, found.batches, found.steady) == (pytest.approx(0.15), 16, False)


def test_cycles_of_several_passes_are_put_together_and_none_spans_two() -> None:
    found = pace([[0.0, 0.1, 0.2], [100.0, 100.1, 100.2]], [0.3, 0.3], 0, 0)
    assert (found.batch_s, found.batches) == (pytest.approx(0.1), 4)


def test_fewer_made_ahead_than_workers_still_waits_for_all_workers() -> None:
    assert warm_up(8, 0) == 8
    assert warm_up(0, 0) == 1


def test_the_spread_is_half_the_interquartile_range() -> None:
    gaps = [0.08, 0.09, 0.10, 0.11, 0.12]
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    found = pace([times], [0.5], 0, 0)
    assert found.steady and found.spread_ratio == pytest.approx(0.1)
