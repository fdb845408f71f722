"""From arrival times of batches to the time between them. Pure arithmetic.

Two traps. The first `workers × prefetch` batches are made before they are asked for, at whatever pace the consumer takes them. And
workers that started together deliver together: of four workers, three batches come at once and then none for a whole fetch, so
that the median of single gaps is near 0. What counts is the time for a cycle of `workers` batches, divided by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

_ENOUGH_CYCLES = 4


@dataclass(frozen=True)
class Pace:
    """The time between batches."""

    batch_s: float
    spread_ratio: float | None
    batches: int
    cycles: int


def warm_up(workers: int, ahead: int) -> int:
    """Return how many batches at the start of a pass do not count: the first, and all that were made ahead."""
    return max(1, ahead, workers)


def cycles_s(passes: Sequence[Sequence[float]], workers: int, ahead: int) -> list[float]:
    """Return the time between batches in each cycle of all workers.

    Args:
        passes: for each pass over the loader the arrival times of its batches, oldest first.
    """
    length = max(1, workers)
    start = warm_up(workers, ahead) - 1
    found = []
    for arrivals in passes:
        marks = list(arrivals[start::length])
        found += [(later - earlier) / length for earlier, later in pairwise(marks)]
    return found


def pace(passes: Sequence[Sequence[float]], workers: int, ahead: int) -> Pace | None:
    """Return the steady pace, None where no cycle lies behind the batches that were made ahead."""
    cycles = cycles_s(passes, workers, ahead)
    if not cycles:
        return None
    middle = median(cycles)
    spread = None
    if len(cycles) >= _ENOUGH_CYCLES and middle > 0:
        lower, _, upper = quantiles(cycles, n=4, method="inclusive")
        spread = (upper - lower) / 2 / middle
    return Pace(middle, spread, len(cycles) * max(1, workers), len(cycles))


def whole_passes(durations_s: Sequence[float], batches: Sequence[int]) -> Pace | None:
    """Return the pace of whole passes, start-up included: for passes shorter than what is made ahead."""
    each = [duration / count for duration, count in zip(durations_s, batches, strict=True) if count]
    return Pace(median(each), None, sum(batches), len(each)) if each else None


def precise(cycles: Sequence[float]) -> bool:
    """Return whether the median is known to about 1%: the interquartile range over the root of the count."""
    if len(cycles) < 16:
        return False
    lower, middle, upper = quantiles(cycles, n=4, method="inclusive")
    return middle > 0 and (upper - lower) / middle / len(cycles) ** 0.5 < 0.01
