"""Old history by the minute: step records as count, sum, least and greatest of each phase, samples as last, least and greatest.

One group at a time (a run's minute of steps, the node's minute of samples), each in one transaction with the deletion of what it stands for.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from gpuwatch import wire

MINUTE_MS = 60_000
DURATIONS = tuple(name for name in wire.STEP_COLUMNS if name not in ("start_ns", "samples", "epoch_start"))
_MOST_EPOCHS = 64
"""Epoch starts that are kept of one minute."""


class Spread(msgspec.Struct, array_like=True):
    """One column of a minute's steps, those of them that were measured, in ns."""

    count: int = 0
    sum_ns: int = 0
    least_ns: int = 0
    most_ns: int = 0

    def plus(self, values: Sequence[int]) -> Spread:
        """Return the spread with these values too; -1 among them was not measured."""
        known = values if min(values) >= 0 else [value for value in values if value >= 0]
        if not known:
            return self
        low, high = min(known), max(known)
        if self.count:
            low, high = min(low, self.least_ns), max(high, self.most_ns)
        return Spread(self.count + len(known), self.sum_ns + sum(known), low, high)


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
    """Return what messages (index of the first step, Unix time minus the sender's clock, columns) say together; None for none."""
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


def condense_steps(connection: sqlite3.Connection, before_ms: int) -> bool:
    """Replace one run's oldest minute of full records by its sums, if it is older than `before_ms`; return whether there was one."""
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


def condense_ticks(connection: sqlite3.Connection, before_ms: int) -> bool:
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
