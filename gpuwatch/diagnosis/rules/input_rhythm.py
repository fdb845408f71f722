"""Waits that come back: at every pass, or once in a round of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, pairwise
from operator import mul
from statistics import fmean, median

from gpuwatch.diagnosis.finding import Evidence, Finding, found, rule, speedup_without
from gpuwatch.diagnosis.prediction import prefetch_of
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import INPUT_WAIT


@rule(explains=(), explained_by=(), stacks="workers", alert=None, runbook="GpuStarved")
def burst_every_n(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the wait for data repeats every `num_workers` steps, and falls almost entirely on one step of each round."""
    count, share, prefetch = window.workers or 0, window.share(INPUT_WAIT), prefetch_of(window.loader)
    if count < 2 or share < thresholds.input_share or window.waits_hidden_in:
        return None
    correlation = round_correlation(window, thresholds, count)
    if correlation is None or correlation < thresholds.burst_correlation:
        return None
    inside, even = share_of_slowest(longest_pass(window), count), 1 / count
    if inside - even < thresholds.burst_share * (1 - even):
        return None
    repeats = f"the wait repeats every {count} steps, the number of workers (autocorrelation {correlation:.2f})"
    slowest = f"{percent(inside)} of the wait falls on the slowest of every {count} steps"
    return found(
        f"one slow step in every {count}: the workers deliver their batches at the same time",
        share,
        Evidence("autocorrelation", correlation, "", repeats),
        Evidence("in one step", inside, "ratio", slowest),
        advice="first make the loader keep up on average (see its own cause); "
        f"prefetch_factor {prefetch} → {2 * prefetch} then evens out the bursts that remain",
    )


def round_correlation(window: Window, thresholds: Thresholds, count: int) -> float | None:
    """Return the autocorrelation of the wait at a lag of `count` steps; None with too few rounds in a pass to tell."""
    waits = longest_pass(window)
    return None if len(waits) < max(4 * count, thresholds.min_steps) else autocorrelation(waits, count)


def longest_pass(window: Window) -> tuple[float, ...]:
    """Return the waits of the longest stretch without a first batch: each pass begins a new order of workers."""
    steps = window.steps
    edges = [index for index, first in enumerate(steps.epoch_start) if first]
    bounds = [-1, *edges, len(steps)]
    begin, end = max(pairwise(bounds), key=lambda pair: pair[1] - pair[0])
    return steps.data_wait_s[begin + 1 : end]


def autocorrelation(values: Sequence[float], lag: int) -> float:
    """Return the correlation of a series with itself at this lag, -1 to 1; 0 for a constant one."""
    mean = fmean(values)
    off = [value - mean for value in values]
    spread = sum(map(mul, off, off)) / len(off)
    return sum(map(mul, off, off[lag:])) / (len(off) - lag) / spread if spread > 0 else 0.0


def share_of_slowest(values: Sequence[float], count: int) -> float:
    """Return the share of the total that the largest of every `count` consecutive values has."""
    rounds = [values[at : at + count] for at in range(0, len(values) - count + 1, count)]
    whole = sum(sum(each) for each in rounds)
    return sum(max(each) for each in rounds) / whole if whole > 0 else 0.0


@rule(explains=("input_unexplained",), explained_by=(), stacks="workers", alert="EpochPauses", runbook="EpochPauses")
def epoch_start_pause(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when, over two passes or more, training waits far longer for first batches than for later ones."""
    steps, loader = window.steps, window.loader
    firsts = [*compress(steps.data_wait_s, steps.epoch_start)]
    later = [*compress(steps.data_wait_s, (not first for first in steps.epoch_start))]
    if len(firsts) < 2 or len(later) < thresholds.min_steps or window.waits_hidden_in:
        return None
    usual, pause = median(later), median(firsts)
    lost = sum(max(0.0, first - usual) for first in firsts)
    whole = sum(steps.data_wait_s) + sum(steps.transfer_s) + sum(steps.compute_s)
    share = lost / whole if whole > 0 else 0.0
    least = max(thresholds.first_batch_min_s, thresholds.first_batch_factor * usual)
    if pause < least or share < thresholds.first_batch_share:
        return None
    who = "a worker" if window.workers else "the dataset"
    advice = f"shorten what {who} does before its first item (opening files, shuffling an index), or make passes longer"
    if window.workers and not loader.persistent_workers:
        advice = "persistent_workers=True: the workers, and what they have loaded, then live on from pass to pass"
    first = f"the first batch of a pass takes {duration(pause)}, later ones {duration(usual)} (medians)"
    passes = f"{len(firsts)} passes; the pauses take {percent(share)} of the step time"
    return found(
        "every pass over the loader begins with a pause",
        share,
        Evidence("first batch", pause, "s", first),
        Evidence("passes", len(firsts), "", passes),
        severity="critical" if share >= thresholds.input_share_critical else "warning",
        advice=advice,
        predicted_speedup=speedup_without(share),
    )
