"""Step records of a run, condensed: a million steps as a few hundred buckets. Pure functions of packed columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuwatch import api, wire
from gpuwatch_agent.history_minutes import Spread, StepMinute

TIMES = ("data_wait", "transfer", "compute", "input_wait", "host_wait", "device_transfer", "device_compute")
"""Columns of durations: `<name>_ns` on the wire, `<name>_s` in an answer. The last four are the device's."""
WIDTH = 8
"""Bytes of a packed value."""
MOST_EPOCHS = 2000
MOST_QUANTILE_STEPS = 100_000
"""Percentiles are exact up to so many steps, beyond it of every second, third … step."""
_HOST = tuple(f"{name}_ns" for name in TIMES[:3])
_MISSING, _BEGINS = wire.pack([wire.MISSING]), b"\x01"


@dataclass(frozen=True)
class Batch:
    """The steps of one message, packed as they came: a bucket's are joined before they are unpacked."""

    first_step: int
    offset_ns: int
    """Unix time minus the sender's clock."""
    columns: Mapping[str, bytes]

    def __len__(self) -> int:
        return len(self.columns["start_ns"]) // WIDTH

    def start_ns(self, step: int) -> int:
        """Return when a step of the batch began, in ns of Unix time; -1 is the last one."""
        return _at(self.columns["start_ns"], step) + self.offset_ns

    def part(self, begin: int, end: int) -> Batch:
        cut = slice(WIDTH * begin, WIDTH * end)
        return Batch(self.first_step + begin, self.offset_ns, {n: c[cut] for n, c in self.columns.items()})


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


class _Bucket:
    """Steps side by side. What batches bring is only put together here, and counted by `close`, once a bucket."""

    def __init__(self, step: int, time_s: float) -> None:
        self.step = step
        self.time_s = time_s
        self.steps = 0
        self.end_s = 0.0
        self.samples = 0
        self.samples_known = 0
        self.columns = {name: _Column() for name in TIMES}
        self.step_ns: list[int] = []
        """Of some of its steps, sorted; empty of old ones."""
        self._batches: list[Batch] = []

    def add(self, batch: Batch, steps: int) -> None:
        self.steps += steps
        self._batches.append(batch)

    def add_minute(self, minute: StepMinute) -> None:
        """Take a whole minute of old steps, of which only sums are left."""
        self.steps += minute.count
        self.end_s = minute.end_ns / 1e9
        for name in TIMES:
            if (spread := minute.columns.get(f"{name}_ns")) is not None and spread.count:
                self.columns[name].merge(spread)
        self.samples += minute.samples
        self.samples_known += minute.samples_known

    def close(self) -> list[list[int]]:
        """Count what batches brought; return their host's columns: data wait, transfer, compute, each of all their steps."""
        if not self._batches:
            return []
        last = self._batches[-1]
        host_ns = sum(_at(last.columns[name], -1) for name in _HOST if name in last.columns)
        self.end_s = (last.start_ns(-1) + max(0, host_ns)) / 1e9
        host = []
        for name in TIMES:
            values = self._joined(f"{name}_ns")
            known, least = _measured(values)
            if known:
                self.columns[name] = _Column(sum(known), least, max(known), len(known))
            if f"{name}_ns" in _HOST:
                host.append(values)
        known, _ = _measured(self._joined("samples"))
        self.samples, self.samples_known = sum(known), len(known)
        self._batches.clear()
        return host

    def _joined(self, name: str) -> list[int]:
        """Return a column of all batches; -1: not measured."""
        parts = [batch.columns.get(name) or _MISSING * len(batch) for batch in self._batches]
        return wire.unpack(parts[0] if len(parts) == 1 else b"".join(parts)).tolist()


def condense(batches: Iterable[Batch], total: int, points: int, old: Sequence[StepMinute] = ()) -> api.Steps:
    """Return at most `points` buckets of equally many steps, epochs and percentiles of all and of each; times in s, None: not measured.

    `total` is how many steps the batches and the `old` minutes before them hold. A minute is never divided, so that a bucket
    of old steps may be a larger one; in the percentiles its steps count as its mean.
    """
    size = max(1, -(-total // points))
    every = max(1, -(-total // MOST_QUANTILE_STEPS))
    buckets: list[_Bucket] = []
    epochs: list[api.Epoch] = []
    step_ns: list[int] = []
    taken = 0
    for minute in old:
        if not buckets or buckets[-1].steps + minute.count > size:
            buckets.append(_Bucket(minute.first_step, minute.start_ns / 1e9))
        buckets[-1].add_minute(minute)
        epochs += [api.Epoch(step, begin_ns / 1e9) for step, begin_ns in minute.epochs]
        means = [minute.columns[f"{n}_ns"] for n in TIMES[:3] if f"{n}_ns" in minute.columns]
        step_ns += [sum(s.sum_ns // s.count for s in means if s.count)] * max(1, minute.count // every)
        taken += minute.count
    behind = taken
    for batch in batches:
        if _BEGINS in batch.columns.get("epoch_start", b""):
            epochs += _epochs(batch)
        begin, count = 0, len(batch)
        while begin < count:
            filled = (taken - behind) % size
            if filled == 0:
                _close(buckets, taken, every, step_ns)
                buckets.append(_Bucket(batch.first_step + begin, batch.start_ns(begin) / 1e9))
            end = min(count, begin + size - filled)
            buckets[-1].add(batch if end - begin == count else batch.part(begin, end), end - begin)
            taken += end - begin
            begin = end
    _close(buckets, taken, every, step_ns)
    step_ns.sort()
    return api.Steps(
        steps=taken,
        bucket_steps=size,
        epochs=epochs[:MOST_EPOCHS],
        step_s={f"p{q}": _quantile_s(step_ns, q) for q in (5, 50, 95, 99)} if step_ns else None,
        step=[bucket.step for bucket in buckets],
        time_s=[bucket.time_s for bucket in buckets],
        end_s=[bucket.end_s for bucket in buckets],
        count=[bucket.steps for bucket in buckets],
        samples=[bucket.samples if bucket.samples_known else None for bucket in buckets],
        bucket_s={f"p{q}": [_quantile_s(b.step_ns, q) if b.step_ns else None for b in buckets] for q in (5, 50, 95)},
        columns={f"{name}_s": _spread([b.columns[name] for b in buckets]) for name in TIMES},
    )


def _close(buckets: Sequence[_Bucket], taken: int, every: int, step_ns: list[int]) -> None:
    """Count the last bucket, and take the times of its every second, third … step."""
    if buckets and (host := buckets[-1].close()):
        first = -(taken - buckets[-1].steps) % every
        parts = [column[first::every] for column in host]
        buckets[-1].step_ns = sorted(sum(max(0, part) for part in parts) for parts in zip(*parts, strict=True))
        step_ns.extend(buckets[-1].step_ns)


def _quantile_s(ordered_ns: Sequence[int], percent: int) -> float:
    return ordered_ns[min(len(ordered_ns) - 1, len(ordered_ns) * percent // 100)] / 1e9


def _epochs(batch: Batch) -> list[api.Epoch]:
    flags = wire.unpack(batch.columns["epoch_start"])
    return [api.Epoch(batch.first_step + n, batch.start_ns(n) / 1e9) for n, begins in enumerate(flags) if begins == 1]


def _spread(columns: list[_Column]) -> api.Spread | None:
    """Return mean, min and max of each bucket in s, or None for a column that was never measured."""
    if not any(column.measured for column in columns):
        return None
    return api.Spread(
        mean=[column.sum_ns / column.measured / 1e9 if column.measured else None for column in columns],
        min=[None if column.least_ns is None else column.least_ns / 1e9 for column in columns],
        max=[None if column.most_ns is None else column.most_ns / 1e9 for column in columns],
    )


def _measured(values: list[int]) -> tuple[list[int], int]:
    """Return what was measured, and the least of it."""
    least = min(values)
    if least >= 0:
        return values, least
    known = [value for value in values if value >= 0]
    return known, min(known, default=0)


def _at(column: bytes, step: int) -> int:
    """Return one value of a packed column."""
    begin = step * WIDTH if step >= 0 else len(column) + step * WIDTH
    return int.from_bytes(column[begin : begin + WIDTH], "little", signed=True)
