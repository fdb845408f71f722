"""A series as two arrays, and its arithmetic: rates, sums, quotients, gaps. An hour of eight GPUs is redrawn every second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuwatch.api import Points

GAP_FACTOR = 3.0
"""A spacing of more than so many usual spacings is a gap: nothing was sampled there, so nothing is drawn."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """Values at times, both [n], oldest first; every value is known."""

    times_s: Floats
    values: Floats

    @staticmethod
    def of(points: Points) -> Line:
        """Return the points whose value is known."""
        if not points:
            return NOTHING
        table = np.array(points, dtype=np.float64)  # None becomes nan
        known = ~np.isnan(table[:, 1])
        if not known.all():
            table = table[known]
        return Line(table[:, 0], table[:, 1])

    def rates(self) -> Line:
        """Return the rate per second of a counter at the end of each interval between samples.

        A counter that went back was reset: it grew by what it now says. An interval over a gap has no rate.
        """
        elapsed_s = np.diff(self.times_s)
        grown = np.diff(self.values)
        grown = np.where(grown < 0.0, self.values[1:], grown)
        counts = (elapsed_s > 0.0) & (elapsed_s <= _longest_s(elapsed_s))
        return Line(self.times_s[1:][counts], grown[counts] / elapsed_s[counts])

    def plus(self, other: Line) -> Line:
        """Return the sum; where only one is known, that one."""
        return self._with(other, np.add)

    def greatest(self, other: Line) -> Line:
        """Return the greater value of both; where only one is known, that one."""
        return self._with(other, np.maximum)

    def _with(self, other: Line, both: np.ufunc) -> Line:
        if np.array_equal(self.times_s, other.times_s):
            return Line(self.times_s, both(self.values, other.values))
        known = dict(zip(self.times_s.tolist(), self.values.tolist(), strict=True))
        for time_s, value in zip(other.times_s.tolist(), other.values.tolist(), strict=True):
            known[time_s] = float(both(known[time_s], value)) if time_s in known else value
        return Line.of(tuple(sorted(known.items())))

    def over(self, divisor: Line) -> Line:
        """Return the quotient where both are known and the divisor is above 0."""
        values, divisors, times_s = self.values, divisor.values, self.times_s
        if not np.array_equal(times_s, divisor.times_s):
            times_s, own, others = np.intersect1d(times_s, divisor.times_s, return_indices=True)
            values, divisors = values[own], divisors[others]
        counts = divisors > 0.0
        return Line(times_s[counts], values[counts] / divisors[counts])

    def points(self, longest_s: float | None = None) -> Points:
        """Return the points, with a None wherever nothing was sampled for longer than `longest_s`; None: than usual."""
        elapsed_s = np.diff(self.times_s)
        gaps = np.nonzero(elapsed_s > (_longest_s(elapsed_s) if longest_s is None else longest_s))[0]
        known: list[tuple[float, float | None]] = list(zip(self.times_s.tolist(), self.values.tolist(), strict=True))
        for before in reversed(gaps.tolist()):
            known.insert(before + 1, ((known[before][0] + known[before + 1][0]) / 2, None))
        return tuple(known)


NOTHING = Line(np.empty(0), np.empty(0))


def _longest_s(elapsed_s: Floats) -> float:
    return GAP_FACTOR * float(np.median(elapsed_s)) if len(elapsed_s) else float("inf")
