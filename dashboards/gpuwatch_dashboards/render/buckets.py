"""Condensed steps for charts: fine buckets merged to fewer, and what a wait was made of."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuwatch.api import Series, Spread, Steps

HOST = ("compute_s", "transfer_s", "data_wait_s")
"""Bottom of a stack first."""
DEVICE = ("device_compute_s", "device_transfer_s", "host_wait_s", "input_wait_s")


def merged(steps: Steps, most: int) -> Steps:
    """Return the steps in at most `most` buckets: means by their numbers of steps, the least, the greatest."""
    size = max(1, -(-len(steps.step) // most))
    if size == 1:
        return steps
    starts = range(0, len(steps.step), size)
    return msgspec.structs.replace(
        steps,
        bucket_steps=steps.bucket_steps * size,
        step=tuple(steps.step[n] for n in starts),
        time_s=tuple(steps.time_s[n] for n in starts),
        end_s=tuple(steps.end_s[min(n + size, len(steps.end_s)) - 1] for n in starts),
        count=tuple(sum(steps.count[n : n + size]) for n in starts),
        samples=(),
        bucket_s={},
        columns={
            name: None if spread is None else _merged(spread, steps.count, size)
            for name, spread in steps.columns.items()
        },
    )


def _merged(spread: Spread, counts: Sequence[int], size: int) -> Spread:
    mean, least, most = [], [], []
    for n in range(0, len(counts), size):
        known = [(m, c) for m, c in zip(spread.mean[n : n + size], counts[n : n + size], strict=True) if m is not None]
        weight = sum(count for _, count in known)
        mean.append(sum(m * count for m, count in known) / weight if weight else None)
        least.append(min((value for value in spread.min[n : n + size] if value is not None), default=None))
        most.append(max((value for value in spread.max[n : n + size] if value is not None), default=None))
    return Spread(tuple(mean), tuple(least), tuple(most))


def trace(steps: Steps, values: Sequence[float | None], label: str, name: str) -> Series:
    """Return one line over the buckets' times; where the steps pause (an evaluation, a stall) it is interrupted."""
    points: list[tuple[float, float | None]] = []
    usual_s = _usual_s(steps)
    for n, (time_s, value) in enumerate(zip(steps.time_s, values, strict=True)):
        if n and time_s - steps.end_s[n - 1] > max(2 * usual_s, 1.0):
            points += [(steps.end_s[n - 1], values[n - 1]), ((steps.end_s[n - 1] + time_s) / 2, None)]
        points.append((time_s, value))
    if steps.time_s and steps.end_s[-1] > steps.time_s[-1]:
        points.append((steps.end_s[-1], values[-1]))
    return Series({label: name}, tuple(points))


def _usual_s(steps: Steps) -> float:
    lengths = sorted(end - begin for begin, end in zip(steps.time_s, steps.end_s, strict=True))
    return lengths[len(lengths) // 2] if lengths else 0.0


def hidden(steps: Steps) -> tuple[float | None, ...] | None:
    """Return each bucket's mean wait that the device did not feel; None without a device's timeline."""
    waited, felt = steps.column("data_wait_s"), steps.column("input_wait_s")
    if waited is None or felt is None:
        return None
    pairs = zip(waited.mean, felt.mean, strict=True)
    return tuple(None if a is None or b is None else max(0.0, a - b) for a, b in pairs)
