"""What a setting would take of the machine, forecast from what smaller ones took, before it is tried. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor

from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.formatting import percent, size
from gpuwatch.tools.tuning.host import Room
from gpuwatch.tools.tuning.rows import LeftOut, Limit, Measured, Row, Setting

SHARE = 0.60
"""Of free memory and of free /dev/shm that a loader may take."""


_FEWEST_TRIED, _MOST_TRIED = 32, 128
"""However few or many cores there are, so many workers of a sleeping fetch are tried."""


def measured(rows: Iterable[Row]) -> list[Measured]:
    return [row for row in rows if isinstance(row, Measured)]


def fetch_s(rows: Iterable[Row]) -> float | None:
    """Return how long one worker makes a batch, from the trial with the fewest workers."""
    done = sorted(measured(rows), key=lambda row: row.setting.num_workers)
    return done[0].batch_s * max(1, done[0].setting.num_workers) if done else None


def fetch_cpu_ratio(rows: Iterable[Row]) -> float | None:
    """Return for which share of a fetch a core is used, 0–1, from the trial with the fewest workers, one at least if there is one.

    Of a fetch that has a core whenever it wants one: time in the queue for it, on a machine that is shared, is left out.
    """
    done = sorted(measured(rows), key=lambda row: (row.setting.num_workers == 0, row.setting.num_workers))
    for row in done:
        used = row.worker_cpu_ratio if row.setting.num_workers else row.main_cpu_ratio
        if row.cpu_demand_ratio is not None and used is not None:
            sleeps = 1 - row.cpu_demand_ratio
            return min(1.0, used / (used + sleeps)) if used + sleeps > 0 else row.cpu_demand_ratio
    return None


def most_workers(rows: Iterable[Row], cores: int, max_workers: int | None) -> tuple[int, Limit, str]:
    """Return the most workers worth trying, what limits them, and why in words.

    A fetch that computes needs a core; one that sleeps (storage, network) leaves its core to others for that long.
    """
    rows = list(rows)
    ceiling = max_workers if max_workers is not None else max(_FEWEST_TRIED, min(_MOST_TRIED, 8 * cores))
    named = f"--max-workers {ceiling}" if max_workers is not None else f"{ceiling} workers is the most that is tried"
    ratio = fetch_cpu_ratio(rows)
    if ratio is None or ratio <= 0:
        return ceiling, "max_workers", named
    useful = cores if ratio >= THRESHOLDS.worker_busy else max(cores, floor(cores / ratio + 0.05))
    if useful >= ceiling:
        return ceiling, "max_workers", named
    if ratio >= THRESHOLDS.fetch_on_cpu:
        return useful, "cpu", f"a fetch computes ({percent(ratio)} of a core), and there are {_cores(cores)}"
    return useful, "cpu", f"{useful} fetches at {percent(ratio)} of a core keep {_cores(cores)} busy"


def forecast_shm_bytes(setting: Setting, rows: Iterable[Row]) -> int | None:
    """Return what fills /dev/shm when training is slower than the loader: all batches made ahead, and the one in hand.

    None before any batch was seen. A loader that is drained as fast as it fills takes less; training does not drain it so.
    """
    sizes = [row.shared_bytes for row in measured(rows) if row.shared_bytes is not None]
    return (setting.batches_ahead + 1) * max(sizes) if sizes and setting.num_workers else None


def forecast_memory_bytes(setting: Setting, rows: Iterable[Row]) -> int | None:
    """Return what workers and their batches add to the memory in use; None before any trial.

    Before a worker was seen, one is taken to need what the loader needed without: it holds a copy of the same things at most.
    """
    done = measured(rows)
    workers = [row.usage.worker_private_bytes for row in done if row.usage.worker_private_bytes]
    mains = [row.usage.main_private_bytes for row in done if row.usage.main_private_bytes]
    if not mains:
        return None
    worker = max(workers) if workers else max(mains)
    return max(mains) + setting.num_workers * worker + (forecast_shm_bytes(setting, done) or 0)


def left_out(setting: Setting, rows: Iterable[Row], room: Room, ranks: int) -> LeftOut | None:
    """Return why a setting must not be tried, None if it may."""
    rows = list(rows)
    each = f", for each of {ranks} ranks" if ranks > 1 else ""
    shm = forecast_shm_bytes(setting, rows)
    if shm is not None and room.shm_bytes is not None and shm * ranks > SHARE * room.shm_bytes:
        text = (
            f"would take up to {size(shm)} of /dev/shm ({setting.num_workers} × {setting.prefetch_factor} + 1 batches{each}); "
            f"{percent(SHARE)} of the {size(room.shm_bytes)} free is {size(SHARE * room.shm_bytes)}"
        )
        return LeftOut(setting, "shm", text)
    memory = forecast_memory_bytes(setting, rows)
    if memory is not None and room.memory_bytes is not None and memory * ranks > SHARE * room.memory_bytes:
        text = (
            f"would take up to {size(memory)} of memory{each}; "
            f"{percent(SHARE)} of the {size(room.memory_bytes)} available is {size(SHARE * room.memory_bytes)}"
        )
        return LeftOut(setting, "memory", text)
    return None


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"
