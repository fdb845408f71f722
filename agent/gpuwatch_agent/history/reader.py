"""Queries of the node's history, from any thread, with or without an agent: each opens its own connection."""

from __future__ import annotations

import logging
import sqlite3
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from gpuwatch import api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import BY_NAME
from gpuwatch.wire import UNDECODABLE
from gpuwatch_agent.gpus import GpuRecord
from gpuwatch_agent.gpus.energy import MOST_WATTS
from gpuwatch_agent.history.downsample import TIMES, Batch, StepMinute, downsample, joined
from gpuwatch_agent.history.file import SCHEMA_VERSION, connect_readonly
from gpuwatch_agent.runs import Run, read_record
from gpuwatch_agent.runs.views import run_view

logger = logging.getLogger(__name__)

MOST_TICKS = 25_000  # over a longer time than so many seconds, extremes are those of every second, third … sample
MOST_POINTS = 50_000  # of all series of an answer together
EVER_S = 1e15  # no time is later
_LATE_S = 60.0  # of a message or a booking: so much may be older than the rows between which a counter grew

_MOST_RUN_BYTES = 8 << 20
LAST_RUNS = (
    "rowid IN (SELECT rowid FROM (SELECT rowid, sum(length(record)) OVER (ORDER BY time_ms DESC, rowid) AS bytes FROM run)"
    " WHERE bytes <= ?)"
)
"""Which of the runs are the last ones, as many as take so many bytes."""


class HistoryReader:
    """Reads one history file: an `api.client.RunSource`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = f"the history {path}"

    @classmethod
    def checked(cls, path: Path) -> HistoryReader:
        """Return the reader of a file that a user names. Raises: ConfigError for one that this version cannot read."""
        if not path.is_file():
            raise ConfigError(f"--history {path}: there is no such file; /api/v1/status of an agent has its path")
        try:
            with closing(connect_readonly(path)) as connection:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as error:
            raise ConfigError(f"--history {path} cannot be read: {error}; name an agent's history.db") from error
        if version != SCHEMA_VERSION:
            raise ConfigError(f"--history {path} is not a history that this gpuwatch reads; name an agent's history.db")
        return cls(path)

    def records(self) -> list[Run]:
        """Return the last runs that are kept, for `Run.restore`."""
        rows = self._rows(f"SELECT record FROM run WHERE {LAST_RUNS}", (_MOST_RUN_BYTES,), read_record)
        return [run for (run,) in rows if run.ledger is not None]  # else it is damaged

    def runs(self, kept: bool = True) -> list[api.Run]:
        try:
            return [run_view(run, Prices()) for run in self.records()]
        except sqlite3.Error as error:
            raise ConfigError(f"{self.where} cannot be read: {error}") from error

    def findings(self, run: str) -> list[api.Finding]:
        """Return all findings of a run's ranks, oldest first."""
        query = "SELECT record, rank, seen_ms FROM finding WHERE run = ? ORDER BY since_ms, rank, cause"
        rows = self._rows(query, (run,), msgspec.json.Decoder(api.Finding).decode)
        return [replace(finding, rank=rank, seen_s=seen_ms / 1000) for finding, rank, seen_ms in rows]

    def gpus(self) -> list[GpuRecord]:
        return [gpu for (gpu,) in self._rows("SELECT record FROM gpu", (), msgspec.msgpack.Decoder(GpuRecord).decode)]

    def series(
        self,
        metric: str,
        labels: Mapping[str, str],
        start_s: float,
        end_s: float,
        points: int,
        by: Sequence[str] | None = None,
        extremes: bool = False,
        most: int = MOST_POINTS,
    ) -> list[api.Series]:
        """Return each matching series, at most `points` points: an interval's last; fewer if all had more than `most`.

        With `by`, series that agree in these labels are summed. With `extremes`, two intervals give their min and max
        in order of time: no spike is lost. (Over more than `MOST_TICKS` seconds, every second, third … sample is read.)
        """
        start_ms, end_ms = int(start_s * 1000), int(end_s * 1000)
        # Intervals are the same at every request (panels do not flicker), so that one more may be touched.
        step_ms = max(1, -((start_ms - end_ms) // (points - 1))) if points > 1 else end_ms + 1
        names = BY_NAME[metric].labels
        shown = names if by is None else tuple(name for name in names if name in by)
        interval_ms, count = 2 * step_ms if extremes else step_ms, 0
        found: dict[tuple[str, ...], list[tuple[int, float]]] = {}
        for time_ms, values in self._rows_of(metric, labels, shown, (start_ms, end_ms, step_ms, extremes)):
            for group, value in values.items():
                found.setdefault(group, []).append((time_ms, value))
            count += len(values)
            while count > most + 2 * len(found):
                found = {group: _reduced(series, interval_ms, extremes) for group, series in found.items()}
                count = sum(map(len, found.values()))
                interval_ms *= 2 if count > most // 2 else 1
        return [
            api.Series(
                dict(zip(shown, group, strict=True)),
                tuple((ms / 1000, value) for ms, value in _reduced(series, interval_ms, extremes)),
            )
            for group, series in found.items()
        ]

    def growth(self, metric: str, start_s: float, end_s: float, points: int) -> dict[tuple[str, str], dict[str, float]]:
        """Return the growth of each state of a GPU's or run's counter. One that falls, or is new, has begun at 0.

        What is more than the time since it last changed allows is left out: a run that goes on after a pause comes back
        with its totals, and rows that were written while the clock was set wrong lie between others.
        """
        start_ms, end_ms = int(start_s * 1000), int(end_s * 1000)
        span = (start_ms, end_ms, max(1, (end_ms - start_ms) // (points - 1)), False)
        most_per_s = MOST_WATTS if BY_NAME[metric].unit == "joules" else 1.0
        last: dict[tuple[str, ...], tuple[int, float]] = {}  # when each last changed, in ms, and its value
        grown: dict[tuple[str, str], dict[str, float]] = {}
        for number, (time_ms, values) in enumerate(self._rows_of(metric, {}, BY_NAME[metric].labels, span)):
            for key, value in values.items():
                name, part, state = key
                changed_ms, before = last.get(key, (start_ms, 0.0 if number else value))
                growth = value - before if value >= before else value
                if 0 < growth <= most_per_s * ((time_ms - changed_ms) / 1000 + _LATE_S):
                    states = grown.setdefault((name, part), {})
                    states[state] = states.get(state, 0.0) + growth
                if value != before or key not in last:
                    last[key] = time_ms, value
        return grown

    def _rows_of(
        self, metric: str, labels: Mapping[str, str], shown: tuple[str, ...], span: tuple[int, int, int, bool]
    ) -> Iterator[tuple[int, dict[tuple[str, ...], float]]]:
        """Yield (time in ms, matching series' values, summed by the labels in `shown`) for each row of `_ticks`."""
        last: int | None = None
        columns: dict[tuple[str, ...], list[int]] = {}
        with self._reader() as reader:
            for time_ms, layout, row in _ticks(reader, *span):
                if layout != last:
                    last, columns = layout, _columns_of(reader, layout, metric, labels, shown)
                values = array("d", row if columns else b"")
                yield time_ms, {group: sum(map(values.__getitem__, places)) for group, places in columns.items()}

    def last_steps(self, run: str, rank: int, last: int) -> api.LastSteps | None:
        """Return the last steps, oldest first; None where none are kept."""
        with self._reader() as reader:
            query = "SELECT first_step, offset_ns, columns FROM steps WHERE run = ? AND rank = ? ORDER BY id DESC"
            rows = reader.execute(query, (run, rank))
            batches: list[Batch] = []
            missing = last
            while missing > 0 and (row := rows.fetchone()) is not None:
                batches.append(Batch.of_row(*row))
                missing -= len(batches[-1])
        batches.reverse()
        surplus = max(0, -missing)
        starts_s = [(ns + batch.offset_ns) / 1e9 for batch in batches for ns in batch.column("start_ns")]
        if not starts_s:
            return None

        def known(name: str) -> list[int | None]:
            return [value if value >= 0 else None for value in joined(batches, name)[surplus:]]

        return api.LastSteps(
            run=run,
            rank=rank,
            first_step=batches[0].first_step + surplus,
            time_s=starts_s[surplus:],
            samples=known("samples"),
            epoch_start=[value or 0 for value in known("epoch_start")],
            **{f"{name}_s": [None if ns is None else ns / 1e9 for ns in known(f"{name}_ns")] for name in TIMES},
        )

    def steps(
        self, run: str, rank: int, points: int, start_s: float = -EVER_S, end_s: float = EVER_S
    ) -> api.Steps | None:
        """Return the steps that began between two times, by default all, as `downsample` does; None without any."""
        # a message is sent after its steps
        where, values = "run = ? AND rank = ? AND time_ms >= ?", (run, rank, int(start_s * 1000))
        # the ids first: sorted together with their blobs, all of them would be read twice
        ids = f"SELECT id FROM steps WHERE {where}"
        query = f"SELECT first_step, offset_ns, columns FROM steps WHERE id IN ({ids}) ORDER BY id"
        with self._reader() as reader:
            old = list(_minutes(reader, run, rank, start_s, end_s))
            batches: Iterable[Batch] = (Batch.of_row(*row) for row in reader.execute(query, values))
            if (start_s, end_s) == (-EVER_S, EVER_S):
                total = reader.execute(f"SELECT sum(count) FROM steps WHERE {where}", values).fetchone()[0] or 0
            else:
                batches = list(_between(batches, start_s, end_s))
                total = sum(map(len, batches))
            found = downsample(batches, total + sum(minute.count for minute in old), points, old)
        return replace(found, run=run, rank=rank) if found.steps else None

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with closing(connect_readonly(self.path, 1.0)) as connection:
            connection.execute("BEGIN")  # all of an answer is of one moment
            yield connection

    def _rows(self, query: str, values: Sequence[object], decode: Callable[[Any], Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows with their first column decoded; one that cannot be is skipped."""
        with self._reader() as reader:
            for record, *rest in reader.execute(query, values).fetchall():
                try:
                    yield decode(record), *rest
                except UNDECODABLE as error:
                    logger.warning("%s: a record is skipped: %s", self.where, error)


def _minutes(reader: sqlite3.Connection, run: str, rank: int, start_s: float, end_s: float) -> Iterator[StepMinute]:
    """Yield a run's old steps by the minute, those whose first step began in a stretch of Unix time."""
    rows = reader.execute("SELECT record FROM step_minute WHERE run = ? AND rank = ? ORDER BY id", (run, rank))
    for (record,) in rows:
        minute = msgspec.msgpack.decode(record, type=StepMinute)
        if start_s <= minute.start_ns / 1e9 <= end_s:
            yield minute


def _between(batches: Iterable[Batch], start_s: float, end_s: float) -> Iterator[Batch]:
    """Yield the parts of batches whose steps began in a stretch of Unix time."""
    for batch in batches:
        starts = batch.column("start_ns")
        first = bisect_left(starts, int(start_s * 1e9) - batch.offset_ns)
        last = bisect_right(starts, int(end_s * 1e9) - batch.offset_ns)
        if last == 0:
            return  # all that follow are later
        if first < last:
            yield batch if (first, last) == (0, len(starts)) else batch.part(first, last)


def _ticks(
    reader: sqlite3.Connection, start_ms: int, end_ms: int, step_ms: int, all_of_them: bool
) -> Iterator[tuple[int, int, bytes]]:
    """Return (time in ms, layout, packed values): each interval's last, or all of them (thinned out beyond MOST_TICKS).

    A downsampled minute has one row; of all of them, two: its min and max.
    """
    minutes, ticks = (f"FROM {table} WHERE time_ms BETWEEN :start AND :end" for table in ("tick_minute", "tick"))
    query = (
        f"SELECT max(time_ms), layout, row FROM (SELECT time_ms, layout, row {minutes}"
        f" UNION ALL SELECT time_ms, layout, row {ticks}) GROUP BY time_ms / :step"
    )
    if all_of_them:
        query = (
            f"SELECT time_ms, layout, low {minutes} UNION ALL SELECT time_ms, layout, high {minutes}"
            f" UNION ALL SELECT time_ms, layout, row {ticks} AND time_ms / 1000 % :every = 0 ORDER BY time_ms"
        )
    every = -(-(end_ms - start_ms) // (1000 * MOST_TICKS)) or 1
    return reader.execute(query, {"start": start_ms, "end": end_ms, "step": step_ms, "every": every})


def _reduced(series: Iterable[tuple[int, float]], interval_ms: int, extremes: bool) -> list[tuple[int, float]]:
    """Return each interval's last point, or its min and max in order of time (one point where they are the same)."""
    out: list[tuple[int, float]] = []
    for _, points in groupby(series, key=lambda point: point[0] // interval_ms):
        of_interval = list(points)
        low, high = min(of_interval, key=itemgetter(1)), max(of_interval, key=itemgetter(1))
        out += sorted({low, high}) if extremes else of_interval[-1:]
    return out


def _columns_of(
    reader: sqlite3.Connection, layout: int, metric: str, labels: Mapping[str, str], shown: tuple[str, ...]
) -> dict[tuple[str, ...], list[int]]:
    """Return the indexes of a metric's matching series in a row, by the values of the labels in `shown`."""
    (text,) = reader.execute("SELECT series FROM layout WHERE id = ?", (layout,)).fetchone()
    matching: dict[tuple[str, ...], list[int]] = {}
    for index, (name, values) in enumerate(msgspec.json.decode(zlib.decompress(text))):
        if name == metric:
            own = dict(zip(BY_NAME[metric].labels, values, strict=False))
            if labels.items() <= own.items():  # a label that an older agent did not have is empty
                matching.setdefault(tuple(own.get(label, "") for label in shown), []).append(index)
    return matching
