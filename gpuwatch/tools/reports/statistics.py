"""How long a step takes, and how sure that is. Pure arithmetic; times in seconds.

Consecutive steps are correlated, so that a standard error over single steps would be too small. Intervals are therefore
Student's t over the means of 20 blocks of consecutive steps (the method of batch means).
"""

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean, median, variance

import msgspec

from gpuwatch.diagnosis.window import StepColumns
from gpuwatch.ledger.states import percentile

_BLOCKS, _LEAST_BLOCKS = 20, 5
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101,
    2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042, 2.040, 2.037, 2.035, 2.032, 2.030, 2.028,
    2.026, 2.024,
)  # fmt: skip
"""Student's t for 95% in the middle, 1 to 38 degrees of freedom."""


class StepStatistics(msgspec.Struct, frozen=True):
    """Training steps, first batches of passes left out; by the device's timeline where it measured them."""

    measured: int  # steps that these figures are of: the last ones, 20,000 at most
    mean_s: float
    mean_interval_s: tuple[float, float] | None
    """95% confidence interval of the mean: t over means of blocks of consecutive steps; None with too few steps."""
    median_s: float
    p05_s: float
    p95_s: float
    data_wait_s: float
    transfer_s: float
    compute_s: float
    """Means of the three parts."""
    block_means_s: tuple[float, ...]  # of consecutive blocks of equal size, oldest first: the interval is made of them
    of_last: int | None = None  # how many of the run's last steps were taken; None: all whose records came


def step_statistics(columns: StepColumns, of_last: int | None) -> StepStatistics | None:
    """Return the statistics of these steps; None where all of them are first batches."""
    mean, totals = columns.mean(), columns.later(columns.step_s)
    if not totals:
        return None
    ordered, blocks = sorted(totals), block_means(totals)
    return StepStatistics(
        measured=mean.steps,
        mean_s=fmean(totals),
        mean_interval_s=mean_interval(blocks),
        median_s=median(ordered),
        p05_s=percentile(ordered, 5),
        p95_s=percentile(ordered, 95),
        data_wait_s=mean.wait_s,
        transfer_s=mean.copy_s,
        compute_s=mean.compute_s,
        block_means_s=blocks,
        of_last=of_last,
    )


def block_means(values: Sequence[float]) -> tuple[float, ...]:
    """Return the means of up to 20 equal consecutive blocks (the first values may be left out); () for fewer than 5."""
    count = min(_BLOCKS, len(values))
    if count < _LEAST_BLOCKS:
        return ()
    size = len(values) // count
    kept = values[len(values) - size * count :]
    return tuple(fmean(kept[at : at + size]) for at in range(0, len(kept), size))


def mean_interval(blocks: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the mean of these block means; None without any."""
    if not blocks:
        return None
    middle = fmean(blocks)
    half = _t(len(blocks) - 1) * sqrt(variance(blocks) / len(blocks))
    return max(0.0, middle - half), middle + half


def speedup(before: Sequence[float], after: Sequence[float]) -> tuple[float, tuple[float, float]] | None:
    """Return (how often as fast, its 95% interval): Welch's t on the logarithms of block means; None without any."""
    if not before or not after or min(*before, *after) <= 0:
        return None
    ratio = fmean(before) / fmean(after)
    parts = [variance([log(value) for value in side]) / len(side) for side in (before, after)]
    error = sqrt(sum(parts))
    if error == 0:
        return ratio, (ratio, ratio)
    freedom = error**4 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (before, after), strict=True))
    half = _t(int(freedom)) * error
    return ratio, (ratio * exp(-half), ratio * exp(half))


def _t(freedom: int) -> float:
    return _T_975[max(1, min(freedom, len(_T_975))) - 1]
