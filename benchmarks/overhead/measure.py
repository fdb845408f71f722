"""Measure one variant in this process: blocks of bare and measured steps take turns, so a slow moment falls on both."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median, quantiles

from benchmarks.overhead.variants import Loop, Variant, pair


@dataclass(frozen=True)
class Cost:
    """What a variant adds to a step. Times in µs; a spread is low and high."""

    key: str
    bare_us: float
    added_us: float
    added_quartiles_us: tuple[float, float]
    between_us: float
    """The part of it that lies between the work of two steps: the bracketed cost, with little noise."""
    other_threads_us: float
    """CPU time a step of all threads but the training thread's."""
    tail_us: float
    """99.9th percentile of the measured steps."""
    tail_spread_us: tuple[float, float]
    bare_tail_us: float
    bare_tail_spread_us: tuple[float, float]
    steps: int
    """Measured in all."""
    lost: int | None = None
    """Steps that the tool itself says it has lost; None where it does not count."""


@dataclass(frozen=True)
class Block:
    """A block of steps in µs; the first few, which warm up, are left out."""

    whole: list[float]
    """From the begin of each step's work to the begin of the next one's."""
    between: float
    """Median time from the end of a step's work to the next one's begin: what loader, loop and hook take here."""


def _block(loop: Loop, count: int) -> Block:
    times = loop(count)[5:]
    pairs = list(pairwise(times))
    return Block(
        whole=[(after[0] - before[0]) / 1e3 for before, after in pairs],
        between=median((after[0] - before[1]) / 1e3 for before, after in pairs),
    )


def measure(variant: Variant) -> Cost:
    """Return what the variant costs."""
    loops = pair(variant)
    for _ in range(2):
        loops.bare(variant.steps), loops.measured(variant.steps)
    other_us, steps = _other_threads(loops.measured, variant.steps)
    added, between, bares = [], [], []
    tails: tuple[list[list[float]], list[list[float]]] = ([], [])
    before = _block(loops.bare, variant.steps)
    for _ in range(variant.blocks):
        measured = _block(loops.measured, variant.steps)
        after = _block(loops.bare, variant.steps)
        bare = (median(before.whole) + median(after.whole)) / 2
        added.append(median(measured.whole) - bare)
        between.append(measured.between - (before.between + after.between) / 2)
        bares.append(bare)
        tails[0].append(measured.whole)
        tails[1].append(after.whole)
        before = after
    loops.close()
    low, middle, high = quantiles(added, n=4)
    tail, tail_spread = _tail(tails[0])
    bare_tail, bare_spread = _tail(tails[1])
    return Cost(
        key=variant.key,
        bare_us=median(bares),
        added_us=middle,
        added_quartiles_us=(low, high),
        between_us=median(between),
        other_threads_us=other_us,
        tail_us=tail,
        tail_spread_us=tail_spread,
        bare_tail_us=bare_tail,
        bare_tail_spread_us=bare_spread,
        steps=steps + sum(len(block) for block in tails[0]),
    )


def _other_threads(loop: Loop, steps: int, seconds: float = 3.0) -> tuple[float, int]:
    """Return the CPU time a step that threads other than the training thread take, in µs; and the steps.

    It is measured over some turns of theirs.
    """
    began, count = time.monotonic(), 0
    cpu = time.process_time_ns() - time.thread_time_ns()
    while time.monotonic() - began < seconds:
        loop(steps)
        count += steps
    return (time.process_time_ns() - time.thread_time_ns() - cpu) / 1e3 / count, count


def _tail(blocks: list[list[float]]) -> tuple[float, tuple[float, float]]:
    """Return the 99.9th percentile of all steps, and its lowest and highest in thirds of the run."""
    third = max(1, len(blocks) // 3)
    parts = [list(chain(*blocks[at : at + third])) for at in range(0, third * 3, third)]
    each = [quantiles(part, n=1000)[-1] for part in parts if part]
    return quantiles(chain(*blocks), n=1000)[-1], (min(each), max(each))
