"""Waits that come back: at every pass, or once in a round of the workers."""

from collections.abc import Sequence
from itertools import compress, pairwise
from operator import mul
from statistics import fmean, median

from gpuwatch.diagnosis.finding import Evidence, Finding, Severity, found, lone, place_evidence, speedup_without
from gpuwatch.diagnosis.prediction import prefetch_of
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.host.frames import SPAWNED, SPAWNS
from gpuwatch.ledger.states import IN_STEPS, INPUT_WAIT


@lone("make the loader keep up, then raise prefetch_factor", stacks="workers", alert=None, runbook="GpuStarved")
def burst_every_n(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the wait repeats every `num_workers` steps (autocorrelation ≥ `burst_correlation`) and is concentrated
    in one step of each round (≥ `burst_share`, where 0% is evenly spread and 100% is all of it in one step)."""
    count, share, prefetch = window.workers or 0, window.share(INPUT_WAIT), prefetch_of(window.loader)
    if count < 2 or share < thresholds.input_share or window.waits_hidden_in:
        return None
    if window.mean_step.wait_s < thresholds.input_share * window.mean_step.whole_s:
        return None  # it is the wait for first batches
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
        advice=f"first make the loader keep up on average (see the finding about it); prefetch_factor {prefetch} → {2 * prefetch} then evens out the bursts that remain",
    )


def round_correlation(window: Window, thresholds: Thresholds, count: int) -> float | None:
    """Return the wait's autocorrelation at a lag of `count` steps, -1 to 1; None if a pass has too few rounds."""
    waits = longest_pass(window)
    if len(waits) < max(4 * count, thresholds.min_steps):
        return None
    mean = fmean(waits)
    off = [wait - mean for wait in waits]
    spread = sum(map(mul, off, off)) / len(off)
    return sum(map(mul, off, off[count:])) / (len(off) - count) / spread if spread > 0 else 0.0


def longest_pass(window: Window) -> Sequence[float]:
    """Return the waits of the longest stretch without a first batch: each pass begins a new order of workers."""
    steps = window.steps
    edges = compress(range(len(steps)), steps.epoch_start)
    bounds = [-1, *edges, len(steps)]
    begin, end = max(pairwise(bounds), key=lambda pair: pair[1] - pair[0])
    return steps.data_wait_s[begin + 1 : end]


def share_of_slowest(values: Sequence[float], count: int) -> float:
    """Return the share of the total that the largest of every `count` consecutive values has."""
    rounds = [values[at : at + count] for at in range(0, len(values) - count + 1, count)]
    whole = sum(sum(each) for each in rounds)
    return sum(max(each) for each in rounds) / whole if whole > 0 else 0.0


@lone(
    "set persistent_workers=True, or make passes longer",
    explains=("input_unexplained",), stacks="workers", alert="EpochPauses",
)  # fmt: skip
def epoch_start_pause(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when first batches take ≥ `first_batch_factor` × the median wait and ≥ `first_batch_share` of the step
    time, or together ≥ `input_share` of it more than as many later ones, a single first batch takes ≥ `input_share` of
    all time, or a new iterator for each batch takes ≥ `input_share` of it."""
    steps, loader = window.steps, window.loader
    firsts = [*compress(steps.data_wait_s, steps.epoch_start)]
    if not firsts or len(steps) < thresholds.min_steps or window.waits_hidden_in:
        return None
    later = steps.later(steps.data_wait_s)
    normal, pause = median(later or [0.0]), median(firsts)
    lost = sum(max(0.0, first - normal) for first in firsts)
    whole, in_steps = sum(steps.step_s), window.share(*IN_STEPS)
    share = in_steps * lost / whole if whole > 0 else 0.0
    first = f"the first batch of a pass takes {duration(pause)}, later ones {duration(normal)} (medians)"
    severity: Severity = thresholds.severity(share)
    title, who = "every pass over the loader begins with a pause", "a worker" if window.workers else "the dataset"
    advice = f"shorten what {who} does before its first item (opening files, shuffling an index, imports), or make passes longer"
    least_s, least = max(thresholds.first_batch_min_s, thresholds.first_batch_factor * normal), thresholds.input_share
    place = window.first_place if len(firsts) == 1 else None
    if not later:  # what follows a single batch is in no step
        share, least_s = window.share(INPUT_WAIT), 0.0
        title, first = "each batch is the first one of a new iterator", f"each takes {duration(pause)}"
        advice = "create the iterator once, before the loop (batches = iter(loader)), and call next(batches) in it"
    elif len(firsts) == 1:
        share = lost / (window.duration_s or 1.0)  # of the others only the last ones are known
        title, much = "the first batch takes a long time", share >= thresholds.phase_share
        if not (window.first_step_s and much and pause >= 10 * thresholds.first_batch_min_s):
            severity = "info"  # it is not the run's, or no headline
        if place is not None and place.has_most:
            title += f": most of that is {'in ' * bool(place.file)}{place}"
            shorter = f"shorten it: cache its result, or compute it on first use ({place.function})"
            advice = shorter if place.file else advice
            if place.function in (SPAWNS, SPAWNED):
                advice = "keep what each worker imports and unpickles small (paths instead of data; fewer imports), or start the workers by fork (multiprocessing_context)"
    else:
        least = thresholds.first_batch_share * in_steps
        if (pause - fmean(later)) * len(firsts) >= thresholds.input_share * whole:
            least_s = 0.0  # short each, but many
        if window.workers and not loader.persistent_workers:
            advice = "persistent_workers=True: the workers, and what they have loaded, then survive from pass to pass"
    if pause < least_s or share < least:
        return None
    return found(
        title,
        share,
        Evidence("first batch", pause, "s", first),
        *(place_evidence(place, "the first wait") if place is not None and place.file else ()),
        Evidence("passes", len(firsts), "", f"passes: {len(firsts)}; the pauses take {percent(share)} of the time"),
        severity=severity,
        advice=advice,
        predicted_speedup=None if later and len(firsts) == 1 else speedup_without(share),
    )
