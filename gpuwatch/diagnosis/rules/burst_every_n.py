"""One slow step every `num_workers` steps: the workers deliver in step with each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import mul
from statistics import fmean

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.shm_need import prefetch_of
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import INPUT_WAIT


def burst_every_n(window: Window) -> Finding | None:
    """Found when the wait for data repeats every `num_workers` steps, and nearly all of it is in one step of each such round."""
    loader, share = window.loader, window.share(INPUT_WAIT)
    count = loader.num_workers if loader is not None else None
    if loader is None or count is None or count < 2 or share < THRESHOLDS.input_share or window.waits_hidden_in:
        return None
    waits = longest_pass(window)
    if len(waits) < max(4 * count, THRESHOLDS.min_steps):
        return None
    again = autocorrelation(waits, count)
    if again < THRESHOLDS.burst_correlation:
        return None
    inside, even = share_of_slowest(waits, count), 1 / count
    if inside - even < THRESHOLDS.burst_share * (1 - even):
        return None
    prefetch = prefetch_of(loader)
    return Finding(
        cause="burst_every_n",
        severity="warning",
        title=f"one slow step in every {count}: the workers deliver all at once",
        ratio=share,
        evidence=(
            Evidence("autocorrelation", again, "", f"the wait repeats every {count} steps, the number of workers (autocorrelation {again:.2f})"),
            Evidence("in one step", inside, "ratio", f"{percent(inside)} of the wait is in the slowest step of each {count}"),
        ),
        advice=f"feed the step on average first (see the loader's cause); prefetch_factor {prefetch} → {2 * prefetch} evens out the bursts that are left",
    )  # fmt: skip


def longest_pass(window: Window) -> tuple[float, ...]:
    """Return the waits of the longest stretch without a first batch: between passes the workers' order begins anew."""
    steps = window.steps
    edges = [index for index, first in enumerate(steps.epoch_start) if first]
    bounds = [-1, *edges, len(steps)]
    begin, end = max(pairwise(bounds), key=lambda pair: pair[1] - pair[0])
    return steps.data_wait_s[begin + 1 : end]


def autocorrelation(values: Sequence[float], lag: int) -> float:
    """Return the correlation of a series with itself so many places on, -1 to 1; 0 for a constant one."""
    mean = fmean(values)
    off = [value - mean for value in values]
    spread = sum(map(mul, off, off)) / len(off)
    return sum(map(mul, off, off[lag:])) / (len(off) - lag) / spread if spread > 0 else 0.0


def share_of_slowest(values: Sequence[float], count: int) -> float:
    """Return the share of all waiting that the slowest of every `count` consecutive steps has."""
    rounds = [values[at : at + count] for at in range(0, len(values) - count + 1, count)]
    whole = sum(sum(each) for each in rounds)
    return sum(max(each) for each in rounds) / whole if whole > 0 else 0.0
