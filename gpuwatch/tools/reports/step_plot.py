"""Step time over a run, for its plots: of single steps where those of the whole run are at hand, else of the run condensed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from gpuwatch.api import Steps
from gpuwatch.diagnosis.window import StepColumns
from gpuwatch.tools.reports import model
from gpuwatch.tools.reports.statistics import quantile

GROUPS = 120
_DEVICE = ("input_wait_s", "device_transfer_s", "device_compute_s", "host_wait_s")
_HOST = ("data_wait_s", "transfer_s", "compute_s")
_Row = tuple[float, float, float, float, float]
"""Begin, 5th percentile, median, 95th percentile, mean wait for data."""


def of_steps(columns: StepColumns, times: Sequence[float]) -> model.StepsOverTime:
    """Return groups of single steps; `times` are their begins."""
    totals = step_totals(columns)
    size = max(1, -(-len(totals) // GROUPS))
    rows: list[_Row] = []
    for at in range(0, len(totals), size):
        group = sorted(totals[at : at + size])
        rows.append(
            (times[at], quantile(group, 0.05), median(group), quantile(group, 0.95), fmean(columns.data_wait_s[at : at + size]))
        )  # fmt: skip
    return _over_time(rows, steps=len(totals), means=0)


def of_buckets(condensed: Steps) -> model.StepsOverTime:
    """Return groups of /api/v1/runs/{run}/steps?points=. Those of old steps, of which sums are left alone, come first and say their mean."""
    spread = condensed.bucket_s
    rows: list[_Row] = []
    means = 0
    for index, time_s in enumerate(condensed.time_s):
        device = [_mean(condensed, name, index) for name in _DEVICE]
        wait_s, *rest = device if device[0] is not None else [_mean(condensed, name, index) for name in _HOST]
        if wait_s is None:
            continue
        mean_s = wait_s + sum(part for part in rest if part is not None)
        low, middle, high = (spread[name][index] if name in spread else None for name in ("p5", "p50", "p95"))
        if low is None or middle is None or high is None:
            means += 1
            low = middle = high = mean_s
        rows.append((time_s, low, middle, high, wait_s))
    return _over_time(rows, steps=condensed.steps, means=means)


def _over_time(rows: Sequence[_Row], steps: int, means: int) -> model.StepsOverTime:
    time_s, p05_s, median_s, p95_s, data_wait_s = (tuple(row[index] for row in rows) for index in range(5))
    return model.StepsOverTime(time_s, p05_s, median_s, p95_s, data_wait_s, steps, means)


def step_totals(columns: StepColumns) -> list[float]:
    """Return how long each step took, in seconds."""
    return [sum(parts) for parts in zip(columns.data_wait_s, columns.transfer_s, columns.compute_s, strict=True)]


def _mean(condensed: Steps, name: str, index: int) -> float | None:
    column = condensed.column(name)
    return None if column is None else column.mean[index]
