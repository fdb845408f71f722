"""Downsampling: old records to one row per minute, and a run's million steps to a few hundred buckets for an answer.

A group (a run's minute of steps, the node's minute of samples) is replaced by its row in one transaction.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gpuwatch import api, wire

MINUTE_MS = 60_000
DURATIONS = tuple(name for name in wire.STEP_COLUMNS if name not in ("start_ns", "samples", "epoch_start"))
_MOST_EPOCHS = 64
"""Epoch starts that are kept of one minute."""


class Spread(msgspec.Struct, array_like=True):
    """One column of some steps, the measured ones of them, in ns."""

    count: int = 0
    sum_ns: int = 0
    least_ns: int = 0
    most_ns: int = 0

    def plus(self, values: Sequence[int]) -> Spread:
        """Return the spread with these values too; -1: not measured."""
        known = values if min(values) >= 0 else [value for value in values if value >= 0]
        return self.merged(Spread(len(known), sum(known), min(known), max(known))) if known else self

    def merged(self, other: Spread) -> Spread:
        """Return the spread of both."""
        if not self.count or not other.count:
            return self if self.count else other
        least, most = min(self.least_ns, other.least_ns), max(self.most_ns, other.most_ns)
        return Spread(self.count + other.count, self.sum_ns + other.sum_ns, least, most)


class StepMinute(msgspec.Struct):
    """A run's steps of one minute. Times in ns of Unix time."""

    first_step: int
    count: int
    start_ns: int
    end_ns: int
    columns: dict[str, Spread]
    samples: int = 0
    samples_known: int = 0
    epochs: list[tuple[int, int]] = []
    """(step, begin) of first batches."""


def step_minute(messages: Iterable[tuple[int, int, bytes]]) -> StepMinute | None:
    """Return the sums over messages (index of the first step, Unix time minus the sender's clock, columns); None for none."""
    minute: StepMinute | None = None
    for first_step, offset_ns, blob in messages:
        columns = {n: wire.unpack(c) for n, c in msgspec.msgpack.decode(blob, type=dict[str, bytes]).items()}
        starts = columns.get("start_ns")
        if not starts:
            continue
        if minute is None:
            minute = StepMinute(first_step, 0, starts[0] + offset_ns, 0, {})
        minute.count += len(starts)
        host_ns = sum(max(0, columns[name][-1]) for name in wire.HOST_COLUMNS[1:4] if name in columns)
        minute.end_ns = max(minute.end_ns, starts[-1] + offset_ns + host_ns)
        for name in DURATIONS:
            if name in columns:
                minute.columns[name] = minute.columns.get(name, Spread()).plus(columns[name])
        known = [value for value in columns.get("samples", ()) if value >= 0]
        minute.samples += sum(known)
        minute.samples_known += len(known)
        begins = [
            (first_step + n, starts[n] + offset_ns)
            for n, flag in enumerate(columns.get("epoch_start", ()))
            if flag == 1
        ]
        minute.epochs = [*minute.epochs, *begins][:_MOST_EPOCHS]
    return minute


def downsample_steps(connection: sqlite3.Connection, before_ms: int) -> bool:
    """Replace one run's oldest minute of full records by its sums if it is older than `before_ms`; return whether there was one."""
    oldest = connection.execute(
        "SELECT run, rank, time_ms FROM steps WHERE time_ms < ? ORDER BY time_ms LIMIT 1", (before_ms,)
    ).fetchone()
    if oldest is None:
        return False
    run, rank, time_ms = oldest
    begin_ms = time_ms // MINUTE_MS * MINUTE_MS
    span = (run, rank, begin_ms, min(before_ms, begin_ms + MINUTE_MS))
    where = "WHERE run = ? AND rank = ? AND time_ms >= ? AND time_ms < ?"
    rows = connection.execute(
        f"SELECT first_step, offset_ns, columns FROM steps INDEXED BY steps_by_time {where} ORDER BY id", span
    )
    minute = step_minute(rows)
    if minute is not None:
        connection.execute(
            "INSERT INTO step_minute (run, rank, first_step, count, time_ms, record) VALUES (?, ?, ?, ?, ?, ?)",
            (run, rank, minute.first_step, minute.count, begin_ms + MINUTE_MS - 1, msgspec.msgpack.encode(minute)),
        )
    connection.execute(f"DELETE FROM steps {where}", span)
    return True


def downsample_ticks(connection: sqlite3.Connection, before_ms: int) -> bool:
    """Replace the oldest minute of samples by the last, least and greatest values; return whether there was one."""
    oldest = connection.execute("SELECT min(time_ms) FROM tick").fetchone()[0]
    if oldest is None or oldest >= before_ms:
        return False
    begin_ms = oldest // MINUTE_MS * MINUTE_MS
    span = (begin_ms, min(before_ms, begin_ms + MINUTE_MS))
    rows = connection.execute(
        "SELECT time_ms, layout, row FROM tick WHERE time_ms >= ? AND time_ms < ? ORDER BY time_ms", span
    )
    by_layout: dict[int, list[tuple[int, array[float]]]] = {}
    for time_ms, layout, row in rows.fetchall():
        by_layout.setdefault(layout, []).append((time_ms, array("d", row)))
    for layout, ticks in by_layout.items():
        values = [tick[1] for tick in ticks]
        low = array("d", map(min, *values)) if len(values) > 1 else values[0]
        high = array("d", map(max, *values)) if len(values) > 1 else values[0]
        connection.execute(
            "INSERT OR REPLACE INTO tick_minute VALUES (?, ?, ?, ?, ?)",
            (ticks[-1][0], layout, values[-1].tobytes(), low.tobytes(), high.tobytes()),
        )
    connection.execute("DELETE FROM tick WHERE time_ms >= ? AND time_ms < ?", span)
    return True


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


class _Bucket:
    """Consecutive steps. Batches are collected, and counted once per bucket by `close`."""

    def __init__(self, step: int, time_s: float) -> None:
        self.step = step
        self.time_s = time_s
        self.steps = 0
        self.end_s = 0.0
        self.samples = 0
        self.samples_known = 0
        self.columns = dict.fromkeys(TIMES, Spread())
        self.step_ns: list[int] = []
        """Of a sample of its steps, sorted; none of downsampled ones."""
        self._batches: list[Batch] = []

    def add(self, batch: Batch, steps: int) -> None:
        self.steps += steps
        self._batches.append(batch)

    def add_minute(self, minute: StepMinute) -> None:
        """Add a downsampled minute."""
        self.steps += minute.count
        self.end_s = minute.end_ns / 1e9
        for name in TIMES:
            self.columns[name] = self.columns[name].merged(minute.columns.get(f"{name}_ns", Spread()))
        self.samples += minute.samples
        self.samples_known += minute.samples_known

    def close(self) -> list[list[int]]:
        """Count the batches; return their host columns: data wait, transfer, compute, each of all their steps."""
        if not self._batches:
            return []
        last = self._batches[-1]
        host_ns = sum(_at(last.columns[name], -1) for name in _HOST if name in last.columns)
        self.end_s = (last.start_ns(-1) + max(0, host_ns)) / 1e9
        host = []
        for name in TIMES:
            values = self._joined(f"{name}_ns")
            self.columns[name] = Spread().plus(values)
            if f"{name}_ns" in _HOST:
                host.append(values)
        samples = Spread().plus(self._joined("samples"))
        self.samples, self.samples_known = samples.sum_ns, samples.count
        self._batches.clear()
        return host

    def _joined(self, name: str) -> list[int]:
        """Return a column of all batches; -1: not measured."""
        parts = [batch.columns.get(name) or _MISSING * len(batch) for batch in self._batches]
        return wire.unpack(parts[0] if len(parts) == 1 else b"".join(parts)).tolist()


def downsample(batches: Iterable[Batch], total: int, points: int, old: Sequence[StepMinute] = ()) -> api.Steps:
    """Return at most `points` buckets of equally many steps, with epochs and percentiles; times in s, None: not measured.

    `total` is the number of steps in the batches and in the `old` minutes before them. A minute is never divided, so that its bucket may
    be larger; in the percentiles its steps count as their mean.
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


def _spread(columns: list[Spread]) -> api.Spread | None:
    """Return mean, min and max of each bucket in s, or None for a column that was never measured."""
    if not any(column.count for column in columns):
        return None
    return api.Spread(
        mean=[column.sum_ns / column.count / 1e9 if column.count else None for column in columns],
        min=[column.least_ns / 1e9 if column.count else None for column in columns],
        max=[column.most_ns / 1e9 if column.count else None for column in columns],
    )


def _at(column: bytes, step: int) -> int:
    """Return one value of a packed column."""
    begin = step * WIDTH if step >= 0 else len(column) + step * WIDTH
    return int.from_bytes(column[begin : begin + WIDTH], "little", signed=True)
