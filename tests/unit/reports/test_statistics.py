"""Batch means, their interval, and the interval of a speed-up."""

from __future__ import annotations

import random

import pytest

from gpuwatch.ledger.states import percentile
from gpuwatch.tools.reports.statistics import block_means, mean_interval, speedup


def test_blocks_are_of_equal_size_and_the_oldest_values_are_left_out() -> None:
    assert block_means([9.0] + [1.0] * 20 + [3.0] * 20) == (1.0,) * 10 + (3.0,) * 10
    assert block_means([1.0, 2.0, 3.0, 4.0]) == ()
    assert block_means([1.0, 2.0, 3.0, 4.0, 5.0]) == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_the_interval_is_students() -> None:
    # mean 3, standard deviation sqrt(2.5), 5 values: 3 ± 2.776 × sqrt(2.5/5)
    assert mean_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (
        pytest.approx(1.0371, abs=1e-3),
        pytest.approx(4.9629, abs=1e-3),
    )
    assert mean_interval(block_means([1.0, 2.0])) is None


def test_the_interval_of_a_speedup_holds_the_truth_about_19_times_in_20() -> None:
    held, tries = 0, 400
    for seed in range(tries):
        chance = random.Random(seed)
        before = [chance.gauss(0.100, 0.010) for _ in range(400)]
        after = [chance.gauss(0.050, 0.010) for _ in range(400)]
        found = speedup(block_means(before), block_means(after))
        assert found is not None and found[1] is not None
        held += found[1][0] <= 2.0 <= found[1][1]
    assert 0.91 < held / tries < 0.99


def test_a_speedup_without_spread_is_sure_and_one_of_few_steps_is_not() -> None:
    assert speedup([0.1] * 20, [0.05] * 20) == (pytest.approx(2.0), (pytest.approx(2.0), pytest.approx(2.0)))
    assert speedup(block_means([0.1] * 4), block_means([0.05] * 20)) is None


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(100)]
    assert (percentile(values, 5), percentile(values, 95), percentile([7.0], 95)) == (5.0, 95.0, 7.0)
