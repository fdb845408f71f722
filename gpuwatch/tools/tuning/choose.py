"""Which settings to try, which to choose, and why: pure functions of the rows so far."""

from collections.abc import Iterable, Sequence
from math import floor, hypot, inf, sqrt

from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.formatting import duration, percent, size
from gpuwatch.tools.tuning.result import Failed, LeftOut, Limit, Measured, Room, Row, Setting, cost_s, measured

SHARE = 0.60  # of free memory and of free /dev/shm that a loader may take
_FEWEST_TRIED, _MOST_TRIED = 32, 128
"""Bounds of the number of workers tried for a fetch that sleeps, whatever the number of cores."""
SPARE = 0.90  # a step is fed when the time between batches is at most this share of it
ALONE = 0.05  # without workers the step waits for the whole fetch, which is harmless up to this share of the step
WORTH = 0.05
_ALONE_FASTER = 0.80
"""Without a known step, no workers are chosen only up to this share of the time with any: a worker hides its fetch."""


def fetch_s(rows: Iterable[Row]) -> float | None:
    """Return how long one worker makes a batch, from the trial with the fewest workers."""
    least = min(measured(rows), key=lambda row: row.setting.num_workers, default=None)
    return None if least is None else least.batch_s * max(1, least.setting.num_workers)


def fetch_cpu_ratio(rows: Iterable[Row]) -> float | None:
    """Return the share of a fetch that computes, 0–1, in the trial with the fewest workers, above 0 if there is one.
    Time in the queue for a core, on a shared machine, is excluded."""
    for row in sorted(measured(rows), key=lambda row: row.setting.num_workers or float("inf")):
        used = row.worker_cpu_ratio if row.setting.num_workers else row.main_cpu_ratio
        if row.cpu_demand_ratio is not None and used is not None:
            sleeps = 1 - row.cpu_demand_ratio
            return min(1.0, used / (used + sleeps)) if used + sleeps > 0 else row.cpu_demand_ratio
    return None


def most_workers(rows: Sequence[Row], cores: int, max_workers: int | None) -> tuple[int, Limit, str]:
    """Return the most workers worth trying, what limits them, and the reason as text.

    A fetch that computes needs a core; one that sleeps (storage, network) leaves its core to others meanwhile.
    """
    ceiling = max_workers if max_workers is not None else max(_FEWEST_TRIED, min(_MOST_TRIED, 8 * cores))
    ratio = fetch_cpu_ratio(rows) or 0.0
    useful = ceiling
    if ratio > 0:
        useful = cores if ratio >= THRESHOLDS.worker_busy else max(cores, floor(cores / ratio + 0.05))
    if useful >= ceiling:
        text = f"--max-workers {ceiling}" if max_workers is not None else f"{ceiling} workers is the most that is tried"
        return ceiling, "max_workers", text
    if ratio >= THRESHOLDS.fetch_on_cpu:
        return useful, "cpu", f"a fetch computes ({percent(ratio)} of a core), and there are {_cores(cores)}"
    return useful, "cpu", f"{useful} fetches at {percent(ratio)} of a core keep {_cores(cores)} busy"


def left_out(setting: Setting, rows: Sequence[Row], room: Room, ranks: int) -> LeftOut | None:
    """Return why a setting must not be tried, None if it may.

    /dev/shm is that of a training slower than its loader: all prefetched batches, and the current one. Before any trial
    with workers a worker is assumed to need what the main process did: at most a copy of the same objects.
    """
    done = measured(rows)
    batch = max((row.shared_bytes or 0 for row in done), default=0)
    main = max((row.usage.main_private_bytes or 0 for row in done), default=0)
    worker = max((row.usage.worker_private_bytes or 0 for row in done), default=0) or main
    shm = (setting.batches_ahead + 1) * batch if setting.num_workers else 0
    each = f", for each of {ranks} ranks" if ranks > 1 else ""
    batches = f" ({setting.num_workers} × {setting.prefetch_factor} + 1 batches{each})"
    limits: tuple[tuple[Limit, str, int, str], ...] = (
        ("shm", "/dev/shm", shm, batches),
        ("memory", "memory", main + setting.num_workers * worker + shm, each),
    )
    for kind, what, needed, of in limits:
        free, _ = room.get(what, (inf, 0))
        if needed * ranks > SHARE * free:
            text = f"would take up to {size(needed)} of {what}{of}; {percent(SHARE)} of the {size(free)} free is {size(SHARE * free)}"
            return LeftOut(setting, kind, text)
    return None


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def feeds(row: Measured, step_s: float) -> bool:
    return row.batch_s <= (SPARE if row.setting.num_workers else ALONE) * step_s


def choose(rows: Sequence[Row], step_s: float | None) -> Measured | None:
    """Return the smallest setting that feeds the step; if none does, or without a step, that is within 5% of the best.

    None where nothing was measured.
    """
    done = sorted(measured(rows), key=lambda row: (row.setting.num_workers, row.setting.prefetch_factor or 0))
    if step_s is not None and (enough := next((row for row in done if feeds(row, step_s)), None)) is not None:
        return enough
    working = [row for row in done if row.setting.num_workers]
    if step_s is None and working and done[0].batch_s > _ALONE_FASTER * min(row.batch_s for row in working):
        done = working
    least_s = min((cost_s(row, step_s) for row in done), default=0.0)
    return next((row for row in done if cost_s(row, step_s) <= (1 + WORTH) * least_s), None)


def saturated(done: Sequence[Measured], step_s: float | None) -> bool:
    """Return whether the last two settings, in the order tried, gained less than 5% beyond their medians' uncertainty.

    By the step where it is known. Else the trial without workers is left out: one worker makes batches no faster.
    """
    alike = [row for row in done if step_s is not None or row.setting.num_workers]
    if len(alike) < 3:
        return False
    before = min(cost_s(row, step_s) for row in alike[:-2])
    return min(cost_s(row, step_s) * (1 - doubt(row)) for row in alike[-2:]) > (1 - WORTH) * before


def faster(row: Measured, than: Measured) -> bool:
    """Return whether a setting is faster by 5%, and by more than chance explains (95%) given the spread of both."""
    return 1 - row.batch_s / than.batch_s >= max(WORTH, 2 * hypot(doubt(row), doubt(than)))


def doubt(row: Measured) -> float:
    """Return the relative standard error of the median time between batches; 0.0 where the spread is unknown.

    It is 1.25 standard deviations over the root of the count; one of those is the interquartile range over 1.35.
    """
    if row.spread_ratio is None:
        return 0.0
    cycles = row.batches / max(1, row.setting.num_workers)
    return min(0.5, 1.25 * (2 * row.spread_ratio / 1.35) / sqrt(cycles))


def limit(rows: Sequence[Row], cores: int) -> str:
    """Return what limits the best setting, with numbers."""
    done = measured(rows)
    best = min(done, key=lambda row: row.batch_s)
    workers, others = best.setting.num_workers, best.others_cores or 0.0
    if best.cpu_cores is not None and best.cpu_cores + others >= THRESHOLDS.cores_exhausted * cores:
        busy = f"all {cores} cores are busy" if cores > 1 else "the one core is busy"
        alone = best.cpu_cores >= THRESHOLDS.cores_exhausted * cores
        return busy if alone else f"{busy}, {others:.1f} of them with other processes"
    if workers and best.main_cpu_ratio is not None and best.main_cpu_ratio >= 0.9:
        return f"the main process is busy receiving batches ({percent(min(1.0, best.main_cpu_ratio))} of a core)"
    if not any(row.setting.num_workers > workers for row in done):
        for row in rows:
            if not isinstance(row, Measured) and row.setting.num_workers > workers:
                return reason(row)
    used, wanted = best.worker_cpu_ratio, best.cpu_demand_ratio or 0.0
    if wanted >= THRESHOLDS.worker_busy:
        return f"a fetch is CPU-bound ({percent(wanted)} of a core), and there are {_cores(cores)}"
    if used is not None and used < THRESHOLDS.worker_busy:
        read = best.read_bytes_per_s or 0.0
        reads = f", reading {size(read)}/s from storage" if read >= 1024**2 else ""
        return f"workers wait, on the CPU {percent(used)} of the time{reads}: storage, network or a lock"
    return "no reason was found"


def reason(row: Failed | LeftOut) -> str:
    """Return why a setting gave no measurement; with its name where the text is about it alone."""
    return f"{row.setting} {row.text}" if isinstance(row, Failed) or row.limit in ("shm", "memory") else row.text


def why(rows: Sequence[Row], chosen: Measured, step_s: float | None, cores: int, interrupted: bool = False) -> str:
    """Return the verdict: what to choose, what it achieves, and what smaller or larger settings do."""
    the_limit = "interrupted before more was tried" if interrupted else f"the limit: {limit(rows, cores)}"
    every = f"a batch every {duration(chosen.batch_s)}"
    workers = chosen.setting.num_workers
    name = f"num_workers={workers}"
    done = sorted(measured(rows), key=lambda row: row.setting.num_workers)
    if step_s is None:
        more = f"; {the_limit}" if len(rows) > 1 else ""
        if above := next((row for row in done if row.setting.num_workers > workers), None):
            gain = 1 - above.batch_s / chosen.batch_s
            gained = "gains nothing more" if gain < WORTH else f"gains {percent(gain)}"
            more = f"; {above.setting.num_workers} {gained}: {limit(rows, cores)}"
        best = "the best with workers" if done[0].batch_s < chosen.batch_s else "the best"
        return f"{name} is the smallest within 5% of {best} ({every}, {chosen.batches_per_s:.3g} a second){more}"
    step = duration(step_s)
    if feeds(chosen, step_s):
        below = next((row for row in reversed(done) if row.setting.num_workers < workers), None)
        if below is None:
            return f"{name} feeds a {step} step ({every})"
        if below.setting.num_workers == 0:
            return f"{name} feeds a {step} step ({every}); 0 would add its {duration(below.batch_s)} to each step"
        lacks = "leaves less than 10% to spare" if below.batch_s <= step_s else "does not"
        return f"{name} feeds a {step} step ({every}); {below.setting.num_workers} {lacks} ({duration(below.batch_s)})"
    if workers and chosen.batch_s <= step_s:
        return f"{name} keeps up with a {step} step, with less than 10% to spare ({every}); {the_limit}"
    slower = percent(max(0.0, cost_s(chosen, step_s) / step_s - 1))
    nothing = "nothing that was tried" if interrupted else "nothing"
    return f"{nothing} feeds a {step} step; {name} comes closest ({every}, steps {slower} longer); {the_limit}"


def warnings(rows: Sequence[Row], chosen: Measured, cores: int) -> list[str]:
    """Return a sentence for each way in which the measurements may mislead."""
    found = []
    done = measured(rows)
    first = done[0]
    if first.batch_bytes and first.read_bytes_per_s is not None and chosen.read_bytes_per_s is not None:
        before, later = first.read_bytes_per_s * first.batch_s, chosen.read_bytes_per_s * chosen.batch_s
        if before > 0.05 * first.batch_bytes and later < 0.5 * before:
            found.append(
                f"storage: the first trial read {size(before)} a batch, the chosen one {size(later)}; "
                "the rest came from the page cache, and a cold pass is slower"
            )
    if any(not row.steady for row in done):
        found.append("* a pass is shorter than what workers prefetch: whole passes were timed, their start included")
    if chosen.cpu_cores is not None and chosen.setting.num_workers and chosen.cpu_cores > cores - 0.5:
        found.append("the loader alone takes all cores; training needs one of them too")
    return found
