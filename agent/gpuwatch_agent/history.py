"""The node's history in SQLite: samples, steps, findings, runs. One writer, any number of readers.

A second of the node is one row: the values of all series as packed float64, in the order of a `layout`. Steps are one row a
message, their columns as they came over the wire. What is served is committed first, in one transaction.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import struct
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuwatch import wire
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import BY_NAME, Sample
from gpuwatch_agent.gpu_ledger import GpuRecord
from gpuwatch_agent.runs import RunRecord

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE layout (id INTEGER PRIMARY KEY, series TEXT NOT NULL UNIQUE);
CREATE TABLE tick (time_ms INTEGER PRIMARY KEY, layout INTEGER NOT NULL, row BLOB NOT NULL);
CREATE TABLE steps (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL, rank INTEGER NOT NULL, first_step INTEGER NOT NULL,
  count INTEGER NOT NULL, time_ms INTEGER NOT NULL, offset_ns INTEGER NOT NULL, columns BLOB NOT NULL);
CREATE INDEX steps_by_run ON steps (run, rank, first_step);
CREATE INDEX steps_by_time ON steps (time_ms);
CREATE TABLE run (run TEXT NOT NULL, rank INTEGER NOT NULL, time_ms INTEGER NOT NULL, record BLOB NOT NULL,
  PRIMARY KEY (run, rank));
CREATE TABLE gpu (uuid TEXT PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE finding (run TEXT NOT NULL, rank INTEGER NOT NULL, cause TEXT NOT NULL, gpu TEXT NOT NULL,
  since_ms INTEGER NOT NULL, seen_ms INTEGER NOT NULL, record TEXT NOT NULL,
  PRIMARY KEY (run, rank, cause, gpu, since_ms));
"""


@dataclass(frozen=True)
class StepBatch:
    """The step records of one message, with what turns their clock into Unix time."""

    run: str
    rank: int
    first_step: int
    time_s: float
    offset_ns: int
    """Unix time minus the sender's clock, in ns."""
    columns: Mapping[str, bytes]


@dataclass(frozen=True)
class FindingRow:
    run: str
    rank: int
    cause: str
    gpu: str
    since_s: float
    seen_s: float
    record: str
    """The finding as JSON."""


@dataclass(frozen=True)
class Tick:
    """All that one second adds to the history."""

    time_s: float
    samples: Sequence[Sample]
    runs: Sequence[RunRecord]
    gpus: Sequence[GpuRecord]
    steps: Sequence[StepBatch]
    findings: Sequence[FindingRow]


class History:
    """The history file. `commit` belongs to one thread; the queries open a connection of their own and may come from any."""

    def __init__(self, path: Path, keep_s: float = 7 * 86400.0, keep_bytes: int = 2 << 30) -> None:
        self.path = path
        self.failures = 0
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._layouts: dict[str, int] = {}
        self._last_layout: tuple[tuple[tuple[str, tuple[str, ...]], ...], int] | None = None
        self._last_ms = 0
        self._failing = False
        self._connection = _open_or_set_aside(path)

    @property
    def size_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def commit(self, tick: Tick) -> bool:
        """Write one second in one transaction; return False, counted and said once, when that failed."""
        try:
            with self._transaction():
                self._write(tick)
        except sqlite3.Error as error:
            self.failures += 1
            self._last_layout = None
            self._layouts.clear()
            if not self._failing:
                logger.warning("history %s cannot be written (%s); the agent goes on without it", self.path, error)
            self._failing = True
            return False
        if self._failing:
            logger.info("history %s is written again", self.path)
        self._failing = False
        return True

    def trim(self, now_s: float) -> None:
        """Delete what is older than is kept, and the oldest part of a file that is too large."""
        try:
            with self._transaction():
                self._delete_before(int((now_s - self._keep_s) * 1000))
            if self._used_bytes() > self._keep_bytes:
                first = self._connection.execute("SELECT min(time_ms), max(time_ms) FROM tick").fetchone()
                if first[0] is not None:
                    with self._transaction():
                        self._delete_before(first[0] + max(60_000, (first[1] - first[0]) // 10))
            self._connection.execute("PRAGMA incremental_vacuum").fetchall()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            self.failures += 1
            logger.debug("trimming the history failed: %s", error)

    def close(self) -> None:
        with closing(self._connection):
            pass

    # Writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _write(self, tick: Tick) -> None:
        run = self._connection.execute
        now_ms = int(tick.time_s * 1000)
        self._last_ms = now_ms = max(now_ms, self._last_ms + 1)  # the wall clock may be set back
        values = array("d", [sample.value for sample in tick.samples])
        layout = self._layout(tuple((sample.metric, sample.labels) for sample in tick.samples))
        run("INSERT OR REPLACE INTO tick VALUES (?, ?, ?)", (now_ms, layout, values.tobytes()))
        for record in tick.runs:
            run(
                "INSERT OR REPLACE INTO run VALUES (?, ?, ?, ?)",
                (record.run, record.rank, now_ms, msgspec.msgpack.encode(record)),
            )
        for gpu in tick.gpus:
            run("INSERT OR REPLACE INTO gpu VALUES (?, ?)", (gpu.uuid, msgspec.msgpack.encode(gpu)))
        for batch in tick.steps:
            run(
                "INSERT INTO steps (run, rank, first_step, count, time_ms, offset_ns, columns) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    batch.run,
                    batch.rank,
                    batch.first_step,
                    wire.step_count(batch.columns),
                    int(batch.time_s * 1000),
                    batch.offset_ns,
                    msgspec.msgpack.encode(batch.columns),
                ),
            )
        for f in tick.findings:
            row = (f.run, f.rank, f.cause, f.gpu, int(f.since_s * 1000), int(f.seen_s * 1000), f.record)
            run("INSERT OR REPLACE INTO finding VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def _layout(self, series: tuple[tuple[str, tuple[str, ...]], ...]) -> int:
        if self._last_layout is not None and self._last_layout[0] == series:
            return self._last_layout[1]
        text = json.dumps(series, separators=(",", ":"))
        if text not in self._layouts:
            self._connection.execute("INSERT OR IGNORE INTO layout (series) VALUES (?)", (text,))
            row = self._connection.execute("SELECT id FROM layout WHERE series = ?", (text,)).fetchone()
            self._layouts[text] = row[0]
        self._last_layout = (series, self._layouts[text])
        return self._layouts[text]

    def _delete_before(self, time_ms: int) -> None:
        run = self._connection.execute
        run("DELETE FROM tick WHERE time_ms < ?", (time_ms,))
        run("DELETE FROM steps WHERE time_ms < ?", (time_ms,))
        run("DELETE FROM finding WHERE seen_ms < ?", (time_ms,))
        run("DELETE FROM run WHERE time_ms < ?", (time_ms,))
        run("DELETE FROM layout WHERE id NOT IN (SELECT DISTINCT layout FROM tick)")
        self._layouts.clear()
        self._last_layout = None

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    # Reading ------------------------------------------------------------------------------------------------------

    def runs(self) -> list[RunRecord]:
        """Return the runs that are kept, an unreadable record left out."""
        return list(self._records("SELECT record FROM run", RunRecord))

    def gpus(self) -> list[GpuRecord]:
        return list(self._records("SELECT record FROM gpu", GpuRecord))

    def series(
        self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return (labels, [(Unix time, value)]) of each matching series, at most `points` a series: each interval's last."""
        step_ms = max(1, int((end_s - start_s) * 1000 / max(1, points)))
        names = BY_NAME[metric].labels
        found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        columns: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
        with self._reader() as reader:
            rows = reader.execute(
                "SELECT max(time_ms), layout, row FROM tick WHERE time_ms BETWEEN ? AND ? GROUP BY time_ms / ?",
                (int(start_s * 1000), int(end_s * 1000), step_ms),
            )
            for time_ms, layout, row in rows:
                if layout not in columns:
                    columns[layout] = _columns_of(reader, layout, metric, names, labels)
                for index, values in columns[layout]:
                    found.setdefault(values, []).append((time_ms / 1000, struct.unpack_from("=d", row, 8 * index)[0]))
        return [(dict(zip(names, values, strict=True)), series) for values, series in found.items()]

    def steps(self, run: str, rank: int, last: int) -> tuple[int, dict[str, list[float]]]:
        """Return (index of the first, columns) of the last steps: times in s, `time_s` the step's begin, oldest first."""
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
        out: dict[str, list[float]] = {
            name: [] for name in ("time_s", "data_wait_s", "transfer_s", "compute_s", "samples", "epoch_start")
        }
        for _, _, offset_ns, blob in kept:
            columns = {n: wire.unpack(c) for n, c in msgspec.msgpack.decode(blob, type=dict[str, bytes]).items()}
            out["time_s"] += [(start + offset_ns) / 1e9 for start in columns["start_ns"]]
            for name in ("data_wait", "transfer", "compute"):
                out[f"{name}_s"] += [ns / 1e9 for ns in columns[f"{name}_ns"]]
            for name in ("samples", "epoch_start"):
                out[name] += columns.get(name, [wire.MISSING] * len(columns["start_ns"]))
        surplus = max(0, taken - last)
        return first + surplus, {name: column[surplus:] for name, column in out.items()}

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=1.0)) as connection:
            yield connection

    def _records(self, query: str, kind: type[msgspec.Struct]) -> Iterable:  # type: ignore[type-arg]
        with self._reader() as reader:
            for (blob,) in reader.execute(query).fetchall():
                try:
                    yield msgspec.msgpack.decode(blob, type=kind)
                except msgspec.MsgspecError as error:
                    logger.warning("history %s: a record is left out: %s", self.path, error)


def _columns_of(
    reader: sqlite3.Connection, layout: int, metric: str, names: tuple[str, ...], labels: Mapping[str, str]
) -> list[tuple[int, tuple[str, ...]]]:
    (text,) = reader.execute("SELECT series FROM layout WHERE id = ?", (layout,)).fetchone()
    matching = []
    for index, (name, values) in enumerate(json.loads(text)):
        if name == metric and labels.items() <= dict(zip(names, values, strict=False)).items():
            matching.append((index, tuple(values)))
    return matching


def _open_or_set_aside(path: Path) -> sqlite3.Connection:
    """Open the file, making it if need be; one that is damaged is set aside, said, and a new one begun.

    Raises: ConfigError where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--history {path}: {error.strerror}; choose a folder that you may write in") from error
    try:
        return _open(path)
    except sqlite3.OperationalError as error:
        raise ConfigError(f"--history {path}: {error}; choose a file that you may write to") from error
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        logger.warning("history %s is damaged (%s): set aside as %s, a new one is begun", path, error, aside.name)
        return _open(path)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
    try:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.execute("PRAGMA synchronous=NORMAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"--history {path} was written by a newer gpuwatch (schema {version}, this one knows {SCHEMA_VERSION}): "
                "update gpuwatch, or choose another file"
            )
        if version == 0:
            connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        connection.execute("SELECT count(*) FROM layout").fetchone()
        connection.execute("BEGIN IMMEDIATE")  # fails here, not at the first second, where it cannot be written
        connection.execute("ROLLBACK")
    except BaseException:
        connection.close()
        raise
    return connection
