"""Which setting to take, and why: pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, sqrt

from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.formatting import duration, percent, size
from gpuwatch.tools.tuning.bounds import measured
from gpuwatch.tools.tuning.rows import Failed, LeftOut, Measured, Row, Setting

SPARE = 0.90
"""A step is fed when a batch comes within this share of it."""
ALONE = 0.05
"""Without workers the step waits for the whole fetch: one of up to this share of the step does no harm."""
WORTH = 0.05
"""A gain smaller than this is none."""
_ALONE_FASTER = 0.80
"""Without workers is taken, where no step is known, only if it is this much faster: a worker also hides its fetch."""


def feeds(row: Measured, step_s: float) -> bool:
    """Return whether training would hardly wait."""
    if row.setting.num_workers == 0:
        return row.batch_s <= ALONE * step_s
    return row.batch_s <= SPARE * step_s


def cost_s(row: Measured, step_s: float | None) -> float:
    """Return the time of a training step with this loader; without a known step, of a batch."""
    if step_s is None:
        return row.batch_s
    return row.batch_s + step_s if row.setting.num_workers == 0 else max(step_s, row.batch_s)


def choose(rows: Sequence[Row], step_s: float | None) -> Measured | None:
    """Return the smallest setting that feeds the step; without such, or without a step, the smallest within 5% of the best."""
    done = sorted(measured(rows), key=lambda row: (row.setting.num_workers, row.setting.prefetch_factor or 0))
    if not done:
        return None
    if step_s is not None:
        fed = [row for row in done if feeds(row, step_s)]
        if fed:
            return fed[0]
    good = [row for row in done if good_enough(row, done, step_s)]
    return good[0] if good else None


def good_enough(row: Measured, done: Sequence[Measured], step_s: float | None) -> bool:
    """Return whether a setting feeds the step, or is within 5% of the best where that is what counts."""
    if step_s is not None and any(feeds(other, step_s) for other in done):
        return feeds(row, step_s)
    best = min(cost_s(other, step_s) for other in done)
    if step_s is None and row.setting.num_workers == 0:
        others = [other.batch_s for other in done if other.setting.num_workers]
        return not others or row.batch_s <= _ALONE_FASTER * min(others)
    return cost_s(row, step_s) <= (1 + WORTH) * best


def saturated(done: Sequence[Measured], step_s: float | None) -> bool:
    """Return whether the last two settings, in the order tried, brought less than 5%, with the doubt that their spread leaves.

    By the step where it is known. Else no workers are no measure for one worker, which makes batches no faster.
    """
    alike = [row for row in done if step_s is not None or row.setting.num_workers]
    if len(alike) < 3:
        return False
    before = min(cost_s(row, step_s) for row in alike[:-2])
    return min(cost_s(row, step_s) * (1 - doubt(row)) for row in alike[-2:]) > (1 - WORTH) * before


def faster(row: Measured, than: Measured) -> bool:
    """Return whether a setting is faster by 5%, and by more than the spread of both would make of nothing (95%)."""
    gain = 1 - row.batch_s / than.batch_s
    return gain >= max(WORTH, 2 * hypot(doubt(row), doubt(than)))


def doubt(row: Measured) -> float:
    """Return the standard error of the time between batches, as a share of it; 0.0 where the spread is not known.

    Of a median: 1.25 standard deviations over the root of the count; a standard deviation is the interquartile range over 1.35.
    """
    if row.spread_ratio is None:
        return 0.0
    cycles = row.batches / max(1, row.setting.num_workers)
    return min(0.5, 1.25 * (2 * row.spread_ratio / 1.35) / sqrt(cycles))


def limit(rows: Sequence[Row], cores: int) -> str:
    """Return what keeps the best setting from being faster, in numbers."""
    done = measured(rows)
    if not done:
        return "nothing could be measured"
    best = min(done, key=lambda row: row.batch_s)
    count = f"all {cores} cores are" if cores > 1 else "the one core is"
    if best.cpu_cores is not None and best.cpu_cores >= THRESHOLDS.cores_exhausted * cores:
        return f"{count} busy"
    others = best.others_cores
    if (
        best.cpu_cores is not None
        and others is not None
        and best.cpu_cores + others >= THRESHOLDS.cores_exhausted * cores
    ):
        return f"{count} busy, {others:.1f} of them with other processes"
    if best.setting.num_workers and best.main_cpu_ratio is not None and best.main_cpu_ratio >= 0.9:
        return f"the main process is busy receiving batches ({percent(min(1.0, best.main_cpu_ratio))} of a core)"
    if not any(row.setting.num_workers > best.setting.num_workers for row in done):
        untried = [row for row in rows if isinstance(row, LeftOut | Failed)]
        for row in untried:
            if row.setting.num_workers > best.setting.num_workers:
                return (
                    f"{row.setting} {row.text}"
                    if isinstance(row, Failed) or row.limit in ("shm", "memory")
                    else row.text
                )
    busy, wanted = best.worker_cpu_ratio, best.cpu_demand_ratio
    if busy is not None and max(busy, wanted or 0.0) < THRESHOLDS.worker_busy:
        read = best.read_bytes_per_s
        reads = f", reading {size(read)}/s from storage" if read is not None and read >= 1024**2 else ""
        return f"workers wait, on the CPU {percent(busy)} of the time{reads}: storage, network or a lock"
    if wanted is not None and wanted >= THRESHOLDS.worker_busy:
        return f"a fetch computes ({percent(wanted)} of its time it wants a core), and there are {cores} cores"
    return "no reason was seen"


def why(
    rows: Sequence[Row],
    chosen: Measured,
    setting: Setting,
    step_s: float | None,
    cores: int,
    interrupted: bool = False,
) -> str:
    """Return the verdict: what to take, what it does, and what its neighbours do not."""
    the_limit = "interrupted before more was tried" if interrupted else f"the limit: {limit(rows, cores)}"
    every = f"a batch every {duration(chosen.batch_s)}"
    name = f"num_workers={setting.num_workers}"
    others = [row for row in measured(rows) if row.setting.num_workers != setting.num_workers]
    larger = [row for row in others if row.setting.num_workers > setting.num_workers]
    if step_s is None:
        more = _brought(larger, chosen, limit(rows, cores)) if larger else f"; {the_limit}" if len(rows) > 1 else ""
        return f"{name} is the smallest within 5% of the best ({every}, {chosen.batches_per_s:.3g} a second){more}"
    step = duration(step_s)
    if feeds(chosen, step_s):
        smaller = [row for row in others if row.setting.num_workers < setting.num_workers]
        below = max(smaller, key=lambda row: row.setting.num_workers, default=None)
        if below is None:
            return f"{name} feeds a {step} step ({every})"
        if below.setting.num_workers == 0:
            return f"{name} feeds a {step} step ({every}); 0 would add its {duration(below.batch_s)} to each step"
        lacks = "leaves less than 10% to spare" if below.batch_s <= step_s else "does not"
        return f"{name} feeds a {step} step ({every}); {below.setting.num_workers} {lacks} ({duration(below.batch_s)})"
    if setting.num_workers and chosen.batch_s <= step_s:
        return f"{name} keeps up with a {step} step, with less than 10% to spare ({every}); {the_limit}"
    slower = percent(max(0.0, cost_s(chosen, step_s) / step_s - 1))
    nothing = "nothing that was tried" if interrupted else "nothing"
    return f"{nothing} feeds a {step} step; {name} comes closest ({every}, steps {slower} longer); {the_limit}"


def _brought(larger: Sequence[Measured], chosen: Measured, reason: str) -> str:
    next_one = min(larger, key=lambda row: row.setting.num_workers)
    gain = 1 - next_one.batch_s / chosen.batch_s
    brings = "brings nothing more" if gain < WORTH else f"brings {percent(gain)}"
    return f"; {next_one.setting.num_workers} {brings}: {reason}"
