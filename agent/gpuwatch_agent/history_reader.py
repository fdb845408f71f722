"""Queries of the node's history: each opens a connection of its own, so that any thread may ask while it is written."""

from __future__ import annotations

import logging
import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from gpuwatch import api, wire
from gpuwatch_agent.gpu_ledger import GpuRecord
from gpuwatch_agent.history_file import MINUTES
from gpuwatch_agent.history_minutes import StepMinute
from gpuwatch_agent.history_series import Series, read_series
from gpuwatch_agent.history_steps import Batch, condense
from gpuwatch_agent.run_records import RunRecord

logger = logging.getLogger(__name__)

_STEP_COLUMNS = api.LastSteps.__struct_fields__[:10]


class HistoryReader:
    """Reads one history file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs(self) -> list[RunRecord]:
        """Return the runs that are kept, an unreadable record left out."""
        return list(self._records("SELECT record FROM run", RunRecord))

    def findings(self, run: str) -> list[api.Finding]:
        """Return every finding that a run's ranks have had, the oldest first, an unreadable record left out."""
        with self._reader() as reader:
            rows = reader.execute(
                "SELECT rank, seen_ms, record FROM finding WHERE run = ? ORDER BY since_ms, rank, cause", (run,)
            ).fetchall()
        found = []
        for rank, seen_ms, record in rows:
            try:
                finding = msgspec.json.decode(record, type=api.Finding)
            except msgspec.MsgspecError as error:
                logger.warning("history %s: a finding is left out: %s", self.path, error)
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
        """Return (labels, [(Unix time, value)]) of each matching series, at most `points` a series: each interval's last.

        With `by`, series that agree in these labels are summed. With `extremes`, each two intervals give their least and
        their greatest value instead, in the order in which they came: a spike is not lost. (Over more than `MOST_TICKS`
        seconds only every second, third … one is looked at.)
        """
        with self._reader() as reader:
            return read_series(reader, metric, labels, (start_s, end_s), points, by, extremes)

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
        first = kept[0][0] if kept else 0
        out: dict[str, list[Any]] = {name: [] for name in _STEP_COLUMNS}
        for _, _, offset_ns, blob in kept:
            columns = {n: wire.unpack(c) for n, c in msgspec.msgpack.decode(blob, type=dict[str, bytes]).items()}
            missing = [wire.MISSING] * len(columns["start_ns"])
            out["time_s"] += [(start + offset_ns) / 1e9 for start in columns["start_ns"]]
            for name in ("data_wait", "transfer", "compute"):
                out[f"{name}_s"] += [ns / 1e9 if ns >= 0 else None for ns in columns.get(f"{name}_ns", missing)]
            for name in ("input_wait", "host_wait", "device_transfer", "device_compute"):
                out[f"{name}_s"] += [ns / 1e9 if ns >= 0 else None for ns in columns.get(f"{name}_ns", missing)]
            out["samples"] += [value if value >= 0 else None for value in columns.get("samples", missing)]
            out["epoch_start"] += columns.get("epoch_start", [0] * len(missing))
        surplus = max(0, taken - last)
        kept_columns = {name: column[surplus:] for name, column in out.items()}
        return api.LastSteps(run=run, rank=rank, first_step=first + surplus, **kept_columns)

    def condensed_steps(
        self, run: str, rank: int, points: int, start_s: float | None = None, end_s: float | None = None
    ) -> api.Steps:
        """Return the steps that began between `start_s` and `end_s` (None: all), as `history_steps.condense` does."""
        where, values = "run = ? AND rank = ?", [run, rank]
        if start_s is not None:  # a message is sent after its steps
            where, values = f"{where} AND time_ms >= ?", [*values, int(start_s * 1000)]
        with self._reader() as reader:
            old = list(_minutes(reader, run, rank, start_s, end_s))
            query = f"FROM steps WHERE {where}"
            if start_s is None and end_s is None:
                total = reader.execute(f"SELECT sum(count) {query}", values).fetchone()[0] or 0
                total += sum(minute.count for minute in old)
                return condense(self._batches(reader, query, values), total, points, old)
            kept = list(_between(self._batches(reader, query, values), start_s, end_s))
        return condense(kept, sum(map(len, kept)) + sum(minute.count for minute in old), points, old)

    def _batches(self, reader: sqlite3.Connection, query: str, values: Sequence[object]) -> Iterator[Batch]:
        decode = msgspec.msgpack.Decoder(dict[str, bytes]).decode
        # the ids first: sorted together with their blobs, all of them would be read twice
        batches = f"SELECT first_step, offset_ns, columns FROM steps WHERE id IN (SELECT id {query}) ORDER BY id"
        for first_step, offset_ns, blob in reader.execute(batches, values):
            yield Batch(first_step, offset_ns, decode(blob))

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=1.0)) as connection:
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
                    logger.warning("history %s: a record is left out: %s", self.path, error)


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
