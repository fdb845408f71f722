"""The node's history in SQLite: samples, steps, findings, runs. One writer, any number of readers.

A second of the node is one row: the values of all series as packed float64, in the order of a `layout`. Steps are one row per message,
with their columns as on the wire. A second is committed in one transaction before it is served.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuwatch import wire
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import Sample
from gpuwatch_agent.gpus import GpuRecord
from gpuwatch_agent.history.downsample import MINUTE_MS, downsample_steps, downsample_ticks
from gpuwatch_agent.history.file import is_damage, lock_history, open_history, set_aside
from gpuwatch_agent.history.reader import HistoryReader
from gpuwatch_agent.runs.records import RunRecord

logger = logging.getLogger(__name__)

_FAR_BACK_MS = 60_000
"""While a wall clock is set back by less, timestamps do not advance; a larger step back is followed."""


@dataclass(frozen=True)
class StepBatch:
    """The step records of one message, with the offset of their clock to Unix time."""

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
    """One second of the history."""

    time_s: float
    samples: Sequence[Sample]
    runs: Sequence[RunRecord]
    gpus: Sequence[GpuRecord]
    steps: Sequence[StepBatch]
    findings: Sequence[FindingRow]


class History:
    """The history file. `commit`, `downsample` and `trim` belong to one thread; `reader` to any."""

    def __init__(
        self, path: Path, keep_s: float = 7 * 86400.0, keep_bytes: int = 2 << 30, full_s: float = 86400.0
    ) -> None:
        self.path = path
        self.reader = HistoryReader(path)
        self.failures = 0
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._full_s = full_s
        self._layouts: dict[str, int] = {}
        self._last_layout: tuple[tuple[tuple[str, tuple[str, ...]], ...], int] | None = None
        self._last_ms = 0
        self._failing = False
        self._lock = lock_history(path)
        try:
            self._connection = open_history(path)
        except BaseException:
            self._lock.close()
            raise

    @property
    def size_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def commit(self, tick: Tick) -> bool:
        """Write one second in one transaction; return False on failure, which is counted and logged once.

        A damaged file is renamed, and a new one created.
        """
        try:
            with self._transaction():
                self._write(tick)
        except sqlite3.Error as error:
            self.failures += 1
            self._last_layout = None
            self._layouts.clear()
            if is_damage(error) and self._replace_damaged(error):
                return False
            if not self._failing:
                logger.warning("history %s cannot be written (%s); the agent continues without it", self.path, error)
            self._failing = True
            return False
        if self._failing:
            logger.info("history %s can be written again", self.path)
        self._failing = False
        return True

    def downsample(self, now_s: float, groups: int = 8) -> None:
        """Downsample a few minutes that are past full resolution to one row each; called once a second."""
        before_ms = int((now_s - self._full_s) * 1000) // MINUTE_MS * MINUTE_MS
        try:
            with self._transaction():
                downsample_ticks(self._connection, before_ms)
                for _ in range(groups):
                    if not downsample_steps(self._connection, before_ms):
                        break
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            self.failures += 1
            logger.debug("downsampling the history failed: %s", error)

    def trim(self, now_s: float) -> None:
        """Delete what is older than the retention, and the oldest part of a file that is too large."""
        try:
            with self._transaction():
                self._delete_before(int((now_s - self._keep_s) * 1000))
            if self._used_bytes() > self._keep_bytes:
                first = self._connection.execute(
                    "SELECT min(a), max(b) FROM (SELECT min(time_ms) a, max(time_ms) b FROM tick"
                    " UNION ALL SELECT min(time_ms), max(time_ms) FROM tick_minute)"
                ).fetchone()
                if first[0] is not None:
                    with self._transaction():
                        self._delete_before(first[0] + max(60_000, (first[1] - first[0]) // 10))
            # As a script: `execute` would take one step of it, which frees one page. At most 80 MB at a time, as it is slow.
            self._connection.executescript("PRAGMA incremental_vacuum(20000)")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            self.failures += 1
            logger.debug("trimming the history failed: %s", error)

    def close(self) -> None:
        self._connection.close()
        self._lock.close()

    def _replace_damaged(self, error: sqlite3.Error) -> bool:
        with suppress(sqlite3.Error):
            self._connection.close()
        with suppress(OSError):  # it cannot be renamed: opening it gives the error
            set_aside(self.path, error)
        try:
            self._connection = open_history(self.path)
        except ConfigError as refusal:
            logger.warning("%s", refusal)
            self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            return False
        return True

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
        if self._last_ms - now_ms < _FAR_BACK_MS:  # the wall clock may be set back
            now_ms = max(now_ms, self._last_ms + 1)
        self._last_ms = now_ms
        values = array("d", [sample.value for sample in tick.samples])
        layout = self._layout(tuple((sample.metric, sample.labels) for sample in tick.samples))
        run("INSERT OR REPLACE INTO tick VALUES (?, ?, ?)", (now_ms, layout, values.tobytes()))
        encode, run_many = msgspec.msgpack.encode, self._connection.executemany
        runs = [(record.run, record.rank, now_ms, encode(record)) for record in tick.runs]
        run_many("INSERT OR REPLACE INTO run VALUES (?, ?, ?, ?)", runs)
        run_many("INSERT OR REPLACE INTO gpu VALUES (?, ?)", [(gpu.uuid, encode(gpu)) for gpu in tick.gpus])
        steps = [
            (
                b.run,
                b.rank,
                b.first_step,
                wire.step_count(b.columns),
                int(b.time_s * 1000),
                b.offset_ns,
                encode(b.columns),
            )
            for b in tick.steps
        ]
        names = "run, rank, first_step, count, time_ms, offset_ns, columns"
        run_many(f"INSERT INTO steps ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", steps)
        found = [
            (f.run, f.rank, f.cause, f.gpu, int(f.since_s * 1000), int(f.seen_s * 1000), f.record)
            for f in tick.findings
        ]
        run_many("INSERT OR REPLACE INTO finding VALUES (?, ?, ?, ?, ?, ?, ?)", found)

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
        for table in ("tick", "tick_minute", "steps", "step_minute", "run"):
            run(f"DELETE FROM {table} WHERE time_ms < ?", (time_ms,))
        run("DELETE FROM finding WHERE seen_ms < ?", (time_ms,))
        run("DELETE FROM layout WHERE id NOT IN (SELECT layout FROM tick UNION SELECT layout FROM tick_minute)")
        self._layouts.clear()
        self._last_layout = None

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)
