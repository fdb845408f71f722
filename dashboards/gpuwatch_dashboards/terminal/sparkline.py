"""A line of numbers over time, in eighths of a cell. A gap stays a gap; a zero is a thin line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import median

from gpuwatch.api import Points

EIGHTHS = " ▁▂▃▄▅▆▇█"
HEADROOM = 1.15
"""So that a steady line is not taken for one at its limit."""


def bucket_of(time_s: float, start_s: float, end_s: float, width: int) -> int | None:
    """Return the column that a moment falls into, None outside of the span. A column takes its end, not its begin."""
    if not start_s < time_s <= end_s or width <= 0:
        return None
    return min(width - 1, int((time_s - start_s) / (end_s - start_s) * width - 1e-9))


def buckets(points: Points, width: int, start_s: float, end_s: float) -> list[float | None]:
    """Return the mean of each of `width` equal stretches of time; None where nothing was sampled.

    A column narrower than the samples' spacing takes the value of the next sample: that is the stretch that it was measured over.
    """
    sums: list[float] = [0.0] * width
    counts: list[int] = [0] * width
    gaps: set[int] = set()
    for time_s, value in points:
        at = bucket_of(time_s, start_s, end_s, width)
        if at is None:
            continue
        if value is None:
            gaps.add(at)
        else:
            sums[at] += value
            counts[at] += 1
    means: list[float | None] = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return _filled(means, gaps, _usual_spacing(points, (end_s - start_s) / max(1, width)))


def _usual_spacing(points: Points, column_s: float) -> int:
    """Return over how many columns one sample reaches."""
    times_s = [time_s for time_s, value in points if value is not None]
    apart_s = [after - before for before, after in pairwise(times_s)]
    return max(1, ceil(median(apart_s) / column_s - 1e-6)) if apart_s else 1


def _filled(means: list[float | None], gaps: set[int], spacing: int) -> list[float | None]:
    filled = list(means)
    for column, value in enumerate(means):
        if value is None:
            continue
        for before in range(column - 1, max(-1, column - spacing), -1):
            if means[before] is not None or before in gaps:
                break
            filled[before] = value
    return filled


def sparkline(values: Sequence[float | None], maximum: float | None = None, rows: int = 1) -> list[str]:
    """Return `rows` lines of text, top first, one column a value; `maximum` is the upper end (None: the largest value)."""
    known = [value for value in values if value is not None]
    top = maximum if maximum is not None else HEADROOM * max(known, default=0.0)
    levels = [None if value is None else _level(value, top, rows) for value in values]
    lines = []
    for row in reversed(range(rows)):
        lines.append("".join(" " if level is None else EIGHTHS[_part(level, row)] for level in levels))
    return lines


def _level(value: float, top: float, rows: int) -> int:
    """Return the height in eighths of a cell, at least one: a measured zero is not a gap."""
    share = min(1.0, max(0.0, value / top)) if top > 0 else 0.0
    return max(1, round(share * rows * 8))


def _part(level: int, row: int) -> int:
    return min(8, max(0, level - 8 * row))
