"""Step records of a run, condensed: a million steps as a few hundred buckets. Pure functions of packed columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuwatch import wire
from gpuwatch_agent.history_minutes import Spread, StepMinute

TIMES = ("data_wait", "transfer", "compute", "input_wait", "host_wait", "device_transfer", "device_compute")
"""Columns of durations: `<name>_ns` on the wire, `<name>_s` in an answer. The last four are the device's."""
MOST_EPOCHS = 2000
MOST_QUANTILE_STEPS = 100_000
"""Percentiles are exact up to so many steps, beyond it of every second, third … step."""


@dataclass(frozen=True)
class Batch:
    """The steps of one message."""

    first_step: int
    offset_ns: int
    """Unix time minus the sender's clock."""
    columns: Mapping[str, array[int]]

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def part(self, begin: int, end: int) -> Batch:
        return Batch(self.first_step + begin, self.offset_ns, {n: c[begin:end] for n, c in self.columns.items()})


@dataclass
class _Column:
    """Sum, least and greatest of what was measured in one bucket."""

    sum_ns: int = 0
    least_ns: int | None = None
    most_ns: int | None = None
    measured: int = 0

    def merge(self, spread: Spread) -> None:
        """Take a minute's sums."""
        self.sum_ns += spread.sum_ns
        self.measured += spread.count
        self.least_ns = spread.least_ns if self.least_ns is None else min(self.least_ns, spread.least_ns)
        self.most_ns = spread.most_ns if self.most_ns is None else max(self.most_ns, spread.most_ns)

    def add(self, values: array[int]) -> None:
        known = values if min(values) >= 0 else [value for value in values if value >= 0]
        if not known:
            return
        low, high = min(known), max(known)
        self.sum_ns += sum(known)
        self.measured += len(known)
        self.least_ns = low if self.least_ns is None else min(self.least_ns, low)
        self.most_ns = high if self.most_ns is None else max(self.most_ns, high)


@dataclass
class _Bucket:
    step: int
    time_s: float
    steps: int = 0
    end_s: float = 0.0
    samples: int = 0
    samples_known: int = 0
    columns: dict[str, _Column] = field(default_factory=lambda: {name: _Column() for name in TIMES})

    def add(self, batch: Batch) -> None:
        self.steps += len(batch)
        starts = batch.columns["start_ns"]
        host_ns = sum(batch.columns[f"{name}_ns"][-1] for name in TIMES[:3] if f"{name}_ns" in batch.columns)
        self.end_s = (starts[-1] + batch.offset_ns + max(0, host_ns)) / 1e9
        for name in TIMES:
            if (values := batch.columns.get(f"{name}_ns")) is not None:
                self.columns[name].add(values)
        samples = batch.columns.get("samples")
        if samples is not None:
            known = samples if min(samples) >= 0 else [value for value in samples if value >= 0]
            self.samples += sum(known)
            self.samples_known += len(known)

    def add_minute(self, minute: StepMinute) -> None:
        """Take a whole minute of old steps, of which only sums are left."""
        self.steps += minute.count
        self.end_s = minute.end_ns / 1e9
        for name in TIMES:
            if (spread := minute.columns.get(f"{name}_ns")) is not None and spread.count:
                self.columns[name].merge(spread)
        self.samples += minute.samples
        self.samples_known += minute.samples_known


def condense(batches: Iterable[Batch], total: int, points: int, old: Sequence[StepMinute] = ()) -> dict[str, Any]:
    """Return at most `points` buckets of equally many steps, epochs and percentiles; times in s, None: not measured.

    `total` is how many steps the batches and the `old` minutes before them hold. A minute is never divided, so that a bucket
    of old steps may be a larger one; in the percentiles its steps count as its mean.
    """
    size = max(1, -(-total // points))
    every = max(1, -(-total // MOST_QUANTILE_STEPS))
    buckets: list[_Bucket] = []
    epochs: list[dict[str, float]] = []
    step_ns: list[int] = []
    taken = 0
    for minute in old:
        if not buckets or buckets[-1].steps + minute.count > size:
            buckets.append(_Bucket(minute.first_step, minute.start_ns / 1e9))
        buckets[-1].add_minute(minute)
        epochs += [{"step": step, "time_s": begin_ns / 1e9} for step, begin_ns in minute.epochs]
        means = [minute.columns[f"{n}_ns"] for n in TIMES[:3] if f"{n}_ns" in minute.columns]
        step_ns += [sum(s.sum_ns // s.count for s in means if s.count)] * max(1, minute.count // every)
        taken += minute.count
    behind = taken
    for batch in batches:
        _note(batch, taken, every, epochs, step_ns)
        begin = 0
        while begin < len(batch):
            if (taken - behind) % size == 0:
                start_ns = batch.columns["start_ns"][begin] + batch.offset_ns
                buckets.append(_Bucket(batch.first_step + begin, start_ns / 1e9))
            end = min(len(batch), begin + size - (taken - behind) % size)
            buckets[-1].add(batch if begin == 0 and end == len(batch) else batch.part(begin, end))
            taken += end - begin
            begin = end
    step_ns.sort()
    return {
        "steps": taken,
        "bucket_steps": size,
        "epochs": epochs[:MOST_EPOCHS],
        "step_s": {f"p{q}": step_ns[min(len(step_ns) - 1, len(step_ns) * q // 100)] / 1e9 for q in (5, 50, 95, 99)}
        if step_ns
        else None,
        "step": [bucket.step for bucket in buckets],
        "time_s": [bucket.time_s for bucket in buckets],
        "end_s": [bucket.end_s for bucket in buckets],
        "count": [bucket.steps for bucket in buckets],
        "samples": [bucket.samples if bucket.samples_known else None for bucket in buckets],
        "columns": {f"{name}_s": _spread([b.columns[name] for b in buckets]) for name in TIMES},
    }


def _note(batch: Batch, taken: int, every: int, epochs: list[dict[str, float]], step_ns: list[int]) -> None:
    """Take a batch's epoch starts and the times of its steps."""
    columns = batch.columns
    for n, begins in enumerate(columns.get("epoch_start", ())):
        if begins == 1:
            epochs.append({"step": batch.first_step + n, "time_s": (columns["start_ns"][n] + batch.offset_ns) / 1e9})
    host = [columns[f"{name}_ns"][-taken % every :: every] for name in TIMES[:3] if f"{name}_ns" in columns]
    step_ns.extend(sum(max(0, part) for part in parts) for parts in zip(*host, strict=True))


def _spread(columns: list[_Column]) -> dict[str, list[float | None]] | None:
    """Return mean, min and max of each bucket in s, or None for a column that was never measured."""
    if not any(column.measured for column in columns):
        return None
    return {
        "mean": [column.sum_ns / column.measured / 1e9 if column.measured else None for column in columns],
        "min": [None if column.least_ns is None else column.least_ns / 1e9 for column in columns],
        "max": [None if column.most_ns is None else column.most_ns / 1e9 for column in columns],
    }


def unpacked(first_step: int, offset_ns: int, columns: Mapping[str, bytes]) -> Batch:
    return Batch(first_step, offset_ns, {name: wire.unpack(column) for name, column in columns.items()})
