"""Queries of the node's history, from any thread: each opens its own connection. HistorySource reads a file without an agent, for reports."""

from __future__ import annotations

import json
import logging
import sqlite3
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from gpuwatch import api, wire
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import BY_NAME
from gpuwatch_agent.gpus import GpuRecord
from gpuwatch_agent.history.downsample import TIMES, Batch, StepMinute, downsample
from gpuwatch_agent.history.file import MINUTES, check_readable, connect_readonly
from gpuwatch_agent.runs.records import RunRecord
from gpuwatch_agent.runs.views import record_view

logger = logging.getLogger(__name__)

MOST_TICKS = 25_000
"""Over a longer time than so many seconds, extremes are those of every second, third … sample."""
Series = list[tuple[dict[str, str], list[tuple[float, float]]]]
_STEP_COLUMNS = api.LastSteps.__struct_fields__[:10]


class HistoryReader:
    """Reads one history file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs(self) -> list[RunRecord]:
        """Return the runs that are kept; an unreadable record is skipped."""
        return list(self._records("SELECT record FROM run", RunRecord))

    def findings(self, run: str) -> list[api.Finding]:
        """Return all findings of a run's ranks, oldest first; an unreadable record is skipped."""
        with self._reader() as reader:
            rows = reader.execute(
                "SELECT rank, seen_ms, record FROM finding WHERE run = ? ORDER BY since_ms, rank, cause", (run,)
            ).fetchall()
        found = []
        for rank, seen_ms, record in rows:
            try:
                finding = msgspec.json.decode(record, type=api.Finding)
            except msgspec.MsgspecError as error:
                logger.warning("history %s: a finding is skipped: %s", self.path, error)
                continue
            found.append(msgspec.structs.replace(finding, rank=rank, seen_s=seen_ms / 1000))
        return found

    def gpus(self) -> list[GpuRecord]:
        return list(self._records("SELECT record FROM gpu", GpuRecord))

    def series(
        self,
        metric: str,
        labels: Mapping[str, str],
        start_s: float,
        end_s: float,
        points: int,
        by: Sequence[str] | None = None,
        extremes: bool = False,
    ) -> Series:
        """Return (labels, [(Unix time, value)]) of each matching series, at most `points` of them: each interval's last.

        With `by`, series that agree in these labels are summed. With `extremes`, each two intervals give their min and max instead, in
        their order in time: a spike is not lost. (Over more than `MOST_TICKS` seconds only every second, third … sample is read.)
        """
        start_ms, end_ms = int(start_s * 1000), int(end_s * 1000)
        # Intervals are the same at every request (panels do not flicker), so that one more may be touched.
        step_ms = max(1, -((start_ms - end_ms) // (points - 1))) if points > 1 else end_ms + 1
        names = BY_NAME[metric].labels
        shown = names if by is None else tuple(name for name in names if name in by)
        found: dict[tuple[str, ...], list[tuple[int, float]]] = {}
        columns: dict[int, dict[tuple[str, ...], list[int]]] = {}
        with self._reader() as reader:
            for time_ms, layout, row in _ticks(reader, start_ms, end_ms, step_ms, extremes):
                if layout not in columns:
                    columns[layout] = _columns_of(reader, layout, metric, labels, shown)
                values = array("d", row) if columns[layout] else ()
                for group, indexes in columns[layout].items():
                    value = values[indexes[0]] if len(indexes) == 1 else sum(values[index] for index in indexes)
                    found.setdefault(group, []).append((time_ms, value))
        return [
            (
                dict(zip(shown, group, strict=True)),
                [(ms / 1000, value) for ms, value in (_extremes(series, 2 * step_ms) if extremes else series)],
            )
            for group, series in found.items()
        ]

    def steps(self, run: str, rank: int, last: int) -> api.LastSteps:
        """Return the last steps, oldest first; empty columns where none are kept."""
        with self._reader() as reader:
            rows = reader.execute(
                "SELECT first_step, count, offset_ns, columns FROM steps WHERE run = ? AND rank = ? ORDER BY id DESC",
                (run, rank),
            )
            taken, kept = 0, []
            for row in rows:
                kept.append(row)
                taken += row[1]
                if taken >= last:
                    break
        kept.reverse()
        out: dict[str, list[Any]] = {name: [] for name in _STEP_COLUMNS}
        for _, _, offset_ns, blob in kept:
            columns = {n: wire.unpack(c) for n, c in msgspec.msgpack.decode(blob, type=dict[str, bytes]).items()}
            missing = [wire.MISSING] * len(columns["start_ns"])
            out["time_s"] += [(start + offset_ns) / 1e9 for start in columns["start_ns"]]
            for name in TIMES:
                out[f"{name}_s"] += [ns / 1e9 if ns >= 0 else None for ns in columns.get(f"{name}_ns", missing)]
            out["samples"] += [value if value >= 0 else None for value in columns.get("samples", missing)]
            out["epoch_start"] += columns.get("epoch_start", [0] * len(missing))
        surplus = max(0, taken - last)
        first_step = (kept[0][0] if kept else 0) + surplus
        kept_columns = {name: column[surplus:] for name, column in out.items()}
        return api.LastSteps(run=run, rank=rank, first_step=first_step, **kept_columns)

    def downsampled_steps(
        self, run: str, rank: int, points: int, start_s: float | None = None, end_s: float | None = None
    ) -> api.Steps:
        """Return the steps that began between `start_s` and `end_s` (None: all), as `downsample` does."""
        where, values = "run = ? AND rank = ?", [run, rank]
        if start_s is not None:  # a message is sent after its steps
            where, values = f"{where} AND time_ms >= ?", [*values, int(start_s * 1000)]
        with self._reader() as reader:
            old = list(_minutes(reader, run, rank, start_s, end_s))
            query = f"FROM steps WHERE {where}"
            if start_s is None and end_s is None:
                total = reader.execute(f"SELECT sum(count) {query}", values).fetchone()[0] or 0
                total += sum(minute.count for minute in old)
                return downsample(self._batches(reader, query, values), total, points, old)
            kept = list(_between(self._batches(reader, query, values), start_s, end_s))
        return downsample(kept, sum(map(len, kept)) + sum(minute.count for minute in old), points, old)

    def _batches(self, reader: sqlite3.Connection, query: str, values: Sequence[object]) -> Iterator[Batch]:
        # the ids first: sorted together with their blobs, all of them would be read twice
        batches = f"SELECT first_step, offset_ns, columns FROM steps WHERE id IN (SELECT id {query}) ORDER BY id"
        for row in reader.execute(batches, values):
            yield Batch.of_row(*row)

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with closing(connect_readonly(self.path, 1.0)) as connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] == 1:  # nothing of it is by the minute yet
                connection.executescript(
                    MINUTES.replace("CREATE TABLE", "CREATE TEMP TABLE").partition("CREATE INDEX")[0]
                )
            yield connection

    def _records(self, query: str, kind: type[msgspec.Struct]) -> Iterable:  # type: ignore[type-arg]
        with self._reader() as reader:
            for (blob,) in reader.execute(query).fetchall():
                try:
                    yield msgspec.msgpack.decode(blob, type=kind)
                except msgspec.MsgspecError as error:
                    logger.warning("history %s: a record is skipped: %s", self.path, error)


def _minutes(
    reader: sqlite3.Connection, run: str, rank: int, start_s: float | None, end_s: float | None
) -> Iterator[StepMinute]:
    """Yield a run's old steps by the minute, those whose first step began in a stretch of Unix time."""
    rows = reader.execute("SELECT record FROM step_minute WHERE run = ? AND rank = ? ORDER BY id", (run, rank))
    for (record,) in rows:
        minute = msgspec.msgpack.decode(record, type=StepMinute)
        begin_s = minute.start_ns / 1e9
        if (start_s is None or begin_s >= start_s) and (end_s is None or begin_s <= end_s):
            yield minute


def _between(batches: Iterable[Batch], start_s: float | None, end_s: float | None) -> Iterator[Batch]:
    """Yield the parts of batches whose steps began in a stretch of Unix time."""
    for batch in batches:
        starts = wire.unpack(batch.columns["start_ns"])
        first = 0 if start_s is None else bisect_left(starts, int(start_s * 1e9) - batch.offset_ns)
        last = len(starts) if end_s is None else bisect_right(starts, int(end_s * 1e9) - batch.offset_ns)
        if last == 0:
            return  # all that follow are later
        if first < last:
            yield batch if (first, last) == (0, len(starts)) else batch.part(first, last)


def _ticks(
    reader: sqlite3.Connection, start_ms: int, end_ms: int, step_ms: int, all_of_them: bool
) -> Iterator[tuple[int, int, bytes]]:
    """Yield (time in ms, layout, packed values): each interval's last, or all of them (thinned out beyond MOST_TICKS).

    A downsampled minute has one row; of all of them, two: its min and max.
    """
    span = (start_ms, end_ms)
    if not all_of_them:
        yield from reader.execute(
            "SELECT max(time_ms), layout, row FROM ("
            " SELECT time_ms, layout, row FROM tick_minute WHERE time_ms BETWEEN ? AND ?"
            " UNION ALL SELECT time_ms, layout, row FROM tick WHERE time_ms BETWEEN ? AND ?"
            ") GROUP BY time_ms / ?",
            (*span, *span, step_ms),
        )
        return
    minutes = "SELECT time_ms, layout, low, high FROM tick_minute WHERE time_ms BETWEEN ? AND ? ORDER BY time_ms"
    for time_ms, layout, low, high in reader.execute(minutes, span):
        yield time_ms, layout, low
        yield time_ms, layout, high
    every = -(-(end_ms - start_ms) // (1000 * MOST_TICKS)) or 1
    yield from reader.execute(
        "SELECT time_ms, layout, row FROM tick WHERE time_ms BETWEEN ? AND ? AND time_ms / 1000 % ? = 0 ORDER BY time_ms",
        (*span, every),
    )


def _extremes(series: Iterable[tuple[int, float]], interval_ms: int) -> list[tuple[int, float]]:
    """Return each interval's min and max in their order in time; one point where they are the same."""
    out: list[tuple[int, float]] = []
    for _, points in groupby(series, key=lambda point: point[0] // interval_ms):
        of_interval = list(points)
        low, high = min(of_interval, key=itemgetter(1)), max(of_interval, key=itemgetter(1))
        out += sorted({low, high})
    return out


def _columns_of(
    reader: sqlite3.Connection, layout: int, metric: str, labels: Mapping[str, str], shown: tuple[str, ...]
) -> dict[tuple[str, ...], list[int]]:
    """Return the indexes of a metric's matching series in a row, by the values of the labels in `shown`."""
    (text,) = reader.execute("SELECT series FROM layout WHERE id = ?", (layout,)).fetchone()
    matching: dict[tuple[str, ...], list[int]] = {}
    for index, (name, values) in enumerate(json.loads(zlib.decompress(text) if isinstance(text, bytes) else text)):
        if name == metric:
            own = dict(zip(BY_NAME[metric].labels, values, strict=False))
            if labels.items() <= own.items():
                matching.setdefault(tuple(own[label] for label in shown), []).append(index)
    return matching


class HistorySource:
    """An `api.client.RunSource` that reads a history file. Raises: ConfigError for another file."""

    def __init__(self, path: Path) -> None:
        check_readable(path)
        self.where = f"the history {path}"
        self._reader = HistoryReader(path)
        self.findings = self._reader.findings

    def runs(self, kept: bool = True) -> Sequence[api.Run]:
        try:
            return [record_view(record) for record in self._reader.runs()]
        except sqlite3.Error as error:
            raise ConfigError(f"{self.where} cannot be read: {error}") from error

    def series(
        self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int
    ) -> Sequence[api.Series]:
        found = self._reader.series(metric, labels, start_s, end_s, points)
        return [api.Series(names, tuple(values)) for names, values in found]

    def last_steps(self, run: str, rank: int, last: int) -> api.LastSteps | None:
        found = self._reader.steps(run, rank, last)
        return found if found.time_s else None

    def steps(self, run: str, rank: int, points: int) -> api.Steps | None:
        found = self._reader.downsampled_steps(run, rank, points)
        return found if found.steps else None
