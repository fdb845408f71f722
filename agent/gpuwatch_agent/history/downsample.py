"""Downsampling: old records to one row per minute, and a run's million steps to a few hundred buckets for an answer.

A group (a run's minute of steps, the node's minute of samples) is replaced by its row in one transaction.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from gpuwatch import api, wire
from gpuwatch.ledger.states import percentile

MINUTE_MS = 60_000
DURATIONS = tuple(name for name in wire.STEP_COLUMNS if name not in ("start_ns", "samples", "epoch_start"))
_MINUTE_EPOCHS = 64  # epoch starts that are kept of one minute
_MOST_NS = 1 << 62  # A sum of durations is no larger, whatever a damaged row has: it is kept in 64 bits
_UNREADABLE = (ValueError, TypeError, ArithmeticError, msgspec.MsgspecError)  # what a damaged row raises


class Spread(msgspec.Struct, array_like=True):
    """One column of some steps, the measured ones of them, in ns."""

    count: int = 0
    sum_ns: int = 0
    least_ns: int = 0
    most_ns: int = 0

    def plus(self, values: Sequence[int]) -> Spread:
        """Return the spread with these values too; -1: not measured."""
        known = values if min(values) >= 0 else [value for value in values if value >= 0]
        return self.merged(Spread(len(known), min(_MOST_NS, sum(known)), min(known), max(known))) if known else self

    def merged(self, other: Spread) -> Spread:
        """Return the spread of both."""
        if not self.count or not other.count:
            return self if self.count else other
        least, most = min(self.least_ns, other.least_ns), max(self.most_ns, other.most_ns)
        return Spread(self.count + other.count, min(_MOST_NS, self.sum_ns + other.sum_ns), least, most)


class StepMinute(msgspec.Struct):
    """Sums over consecutive steps of a run: a minute in the history, a bucket in an answer. Unix times in ns."""

    first_step: int
    count: int
    start_ns: int
    end_ns: int
    columns: dict[str, Spread]
    samples: int = 0
    samples_known: int = 0
    epochs: list[tuple[int, int]] = []  # (step, begin) of first batches

    def add(self, later: StepMinute) -> None:
        """Add the sums of later steps."""
        self.count += later.count
        self.end_ns = later.end_ns
        for name, spread in later.columns.items():
            self.columns[name] = self.columns.get(name, Spread()).merged(spread)
        self.samples += later.samples
        self.samples_known += later.samples_known
        self.epochs = self.epochs + later.epochs


@dataclass(frozen=True)
class Batch:
    """The steps of one message, packed as they came."""

    first_step: int
    offset_ns: int  # Unix time minus the sender's clock
    columns: Mapping[str, bytes]

    @classmethod
    def of_row(cls, first_step: int, offset_ns: int, blob: bytes) -> Batch:
        """Return a row's steps. Raises: ValueError for columns that no message has (a damaged row)."""
        columns = _decode_columns(blob)
        if len(set(map(len, columns.values()))) > 1 or len(columns.get("start_ns", b"")) % WIDTH:
            raise ValueError("step columns of unequal or odd lengths")
        return cls(first_step, offset_ns, columns)

    def __len__(self) -> int:
        return len(self.columns.get("start_ns", b"")) // WIDTH

    def column(self, name: str) -> array[int]:
        return wire.unpack(self.columns.get(name, b""))

    def start_ns(self, step: int) -> int:
        """Return when a step of the batch began, in ns of Unix time; -1 is the last one."""
        return self.column("start_ns")[step] + self.offset_ns

    def part(self, begin: int, end: int) -> Batch:
        cut = slice(WIDTH * begin, WIDTH * end)
        return Batch(self.first_step + begin, self.offset_ns, {n: c[cut] for n, c in self.columns.items()})


def joined(batches: Sequence[Batch], name: str) -> array[int]:
    """Return one column of all batches; -1: not measured."""
    return wire.unpack(b"".join(batch.columns.get(name) or _MISSING * len(batch) for batch in batches))


def sums(batches: Sequence[Batch], most_epochs: int) -> StepMinute:
    """Return the sums over at least one batch, none empty. They are joined before they are unpacked: that is faster."""
    first, last = batches[0], batches[-1]
    host_ns = sum(max(0, last.column(name)[-1]) for name in _HOST if name in last.columns)
    present = set().union(*(batch.columns for batch in batches))
    samples = Spread().plus(joined(batches, "samples"))
    return StepMinute(
        first.first_step,
        sum(map(len, batches)),
        first.start_ns(0),
        last.start_ns(-1) + host_ns,
        {name: Spread().plus(joined(batches, name)) for name in DURATIONS if name in present},
        samples.sum_ns,
        samples.count,
        list(islice(_epochs(batches), most_epochs)),
    )


def _epochs(batches: Iterable[Batch]) -> Iterator[tuple[int, int]]:
    for batch in batches:
        if _BEGINS in (flags := batch.columns.get("epoch_start", b"")):
            for number, begins in enumerate(wire.unpack(flags)):
                if begins == 1:
                    yield batch.first_step + number, batch.start_ns(number)


def downsample_steps(connection: sqlite3.Connection, before_ms: int) -> int | None:
    """Replace one run's oldest minute of full records by its sums if it is older than `before_ms`.

    Returns how many rows could not be read, and are deleted with the others; None without such a minute.
    """
    query = "SELECT run, rank, time_ms FROM steps WHERE time_ms < ? ORDER BY time_ms LIMIT 1"
    oldest = connection.execute(query, (before_ms,)).fetchone()
    if oldest is None:
        return None
    run, rank, time_ms = oldest
    begin_ms = time_ms // MINUTE_MS * MINUTE_MS
    span = (run, rank, begin_ms, min(before_ms, begin_ms + MINUTE_MS))
    where = "WHERE run = ? AND rank = ? AND time_ms >= ? AND time_ms < ?"
    query = f"SELECT first_step, offset_ns, columns FROM steps INDEXED BY steps_by_time {where} ORDER BY id"
    batches, bad = [], 0
    for row in connection.execute(query, span).fetchall():
        try:
            if len(batch := Batch.of_row(*row)):
                msgspec.msgpack.encode(sums([batch], 0))
                batches.append(batch)
        except _UNREADABLE:
            bad += 1
    if batches:
        minute = sums(batches, _MINUTE_EPOCHS)
        connection.execute(
            "INSERT INTO step_minute (run, rank, first_step, count, time_ms, record) VALUES (?, ?, ?, ?, ?, ?)",
            (run, rank, minute.first_step, minute.count, begin_ms + MINUTE_MS - 1, msgspec.msgpack.encode(minute)),
        )
    connection.execute(f"DELETE FROM steps {where}", span)
    return bad


def downsample_ticks(connection: sqlite3.Connection, before_ms: int) -> int:
    """Replace the oldest minute by last, least and greatest values; return how many rows could not be read."""
    oldest = connection.execute("SELECT min(time_ms) FROM tick").fetchone()[0]
    if oldest is None or oldest >= before_ms:
        return 0
    begin_ms = oldest // MINUTE_MS * MINUTE_MS
    span = (begin_ms, min(before_ms, begin_ms + MINUTE_MS))
    where = "WHERE time_ms >= ? AND time_ms < ?"
    rows = connection.execute(f"SELECT time_ms, layout, row FROM tick {where} ORDER BY time_ms", span)
    by_layout: dict[int, list[tuple[int, array[float]]]] = {}
    bad = 0
    for time_ms, layout, row in rows.fetchall():
        try:
            by_layout.setdefault(layout, []).append((time_ms, array("d", row)))
        except _UNREADABLE:
            bad += 1
    for layout, ticks in by_layout.items():
        values = [tick[1] for tick in ticks]
        low, high = (array("d", map(most, zip(*values, strict=False))) for most in (min, max))
        connection.execute(
            "INSERT OR REPLACE INTO tick_minute VALUES (?, ?, ?, ?, ?)",
            (ticks[-1][0], layout, values[-1].tobytes(), low.tobytes(), high.tobytes()),
        )
    connection.execute(f"DELETE FROM tick {where}", span)
    return bad


TIMES = ("data_wait", "transfer", "compute", "input_wait", "host_wait", "device_transfer", "device_compute")
"""Columns of durations: `<name>_ns` on the wire, `<name>_s` in an answer. The last four are the device's."""
WIDTH = 8  # bytes of a packed value
MOST_EPOCHS = 2000
MOST_PERCENTILE_STEPS = 100_000  # percentiles are exact up to so many steps, beyond it of every second, third … step
_HOST = tuple(f"{name}_ns" for name in TIMES[:3])
_MISSING, _BEGINS = wire.pack([wire.MISSING]), b"\x01"
_decode_columns = msgspec.msgpack.Decoder(dict[str, bytes]).decode


def downsample(batches: Iterable[Batch], total: int, points: int, old: Sequence[StepMinute] = ()) -> api.Steps:
    """Return at most `points` buckets of equally many steps, with epochs, percentiles; times in s, None: not measured.

    `total` is the number of steps in the batches and in the `old` minutes before them. A minute is never divided, so
    its bucket may be larger, and there may be one bucket more; in the percentiles its steps count as their mean.
    """
    size = max(1, -(-total // points))
    every = max(1, -(-total // MOST_PERCENTILE_STEPS))
    buckets: list[StepMinute] = []
    bucket_ns: list[list[int]] = []
    """Step times of each bucket, or of every second, third … step of it, sorted; none of downsampled ones."""
    means_ns: list[int] = []
    taken = next_bucket = 0
    for minute in old:
        if taken < next_bucket:
            buckets[-1].add(minute)
        else:
            buckets.append(minute)
            bucket_ns.append([])
            next_bucket = (taken // size + 1) * size
        taken += minute.count
        means = [minute.columns[name] for name in _HOST if name in minute.columns]
        means_ns += [sum(s.sum_ns // s.count for s in means if s.count)] * max(1, minute.count // every)
    for group in _groups(batches, size):
        host = [joined(group, name)[-taken % every :: every] for name in _HOST]
        bucket_ns.append(sorted(sum(max(0, part) for part in parts) for parts in zip(*host, strict=True)))
        buckets.append(sums(group, MOST_EPOCHS))
        taken += buckets[-1].count
    step_ns = sorted(chain(means_ns, *bucket_ns))
    begins = chain.from_iterable(bucket.epochs for bucket in buckets)
    return api.Steps(
        steps=taken,
        bucket_steps=size,
        epochs=[api.Epoch(step, begin_ns / 1e9) for step, begin_ns in islice(begins, MOST_EPOCHS)],
        step_s={f"p{q}": percentile(step_ns, q) / 1e9 for q in (5, 50, 95, 99)} if step_ns else None,
        step=[bucket.first_step for bucket in buckets],
        time_s=[bucket.start_ns / 1e9 for bucket in buckets],
        end_s=[bucket.end_ns / 1e9 for bucket in buckets],
        count=[bucket.count for bucket in buckets],
        samples=[bucket.samples if bucket.samples_known else None for bucket in buckets],
        bucket_s={f"p{q}": [percentile(found, q) / 1e9 if found else None for found in bucket_ns] for q in (5, 50, 95)},
        columns={f"{name}_s": _spread([b.columns.get(f"{name}_ns", Spread()) for b in buckets]) for name in TIMES},
    )


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield the batches, divided where needed, in groups of `size` steps."""
    group: list[Batch] = []
    free = size
    for batch in batches:
        begin, count = 0, len(batch)
        while begin < count:
            end = min(count, begin + free)
            group.append(batch if end - begin == count else batch.part(begin, end))
            free -= end - begin
            begin = end
            if not free:
                yield group
                group, free = [], size
    if group:
        yield group


def _spread(columns: list[Spread]) -> api.Spread | None:
    """Return mean, min and max of each bucket in s, or None for a column that was never measured."""
    if not any(column.count for column in columns):
        return None
    return api.Spread(
        mean=[column.sum_ns / column.count / 1e9 if column.count else None for column in columns],
        min=[column.least_ns / 1e9 if column.count else None for column in columns],
        max=[column.most_ns / 1e9 if column.count else None for column in columns],
    )
