"""The node's history in SQLite: samples, steps, findings, runs. One writer, any number of readers.

A second of the node is one row: the values of all series as packed float64, in the order of a `layout`. Steps are one
row per message, with their columns as on the wire. A second is committed in one transaction before it is served.
"""

import logging
import os
import shutil
import sqlite3
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar

import msgspec

from gpuwatch import wire
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import Sample
from gpuwatch_agent.gpus import GpuRecord
from gpuwatch_agent.history.downsample import MINUTE_MS, downsample_steps, downsample_ticks
from gpuwatch_agent.history.file import connect_readonly, is_damage, lock_history, open_history, set_aside
from gpuwatch_agent.history.reader import LAST_RUNS, HistoryReader

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FULL_BYTES = 1 << 20  # A disk with less is full: then an agent starts without its history, as it goes on without it
_TRY_EVERY = 10
_MOST_RUNS_BYTES = 64 << 20  # of the records of all runs that are kept
_FAR_BACK_MS = 60_000
"""While a wall clock is set back by less, timestamps do not advance; a larger step back is followed."""


class StepBatch(NamedTuple):
    """The step records of one message."""

    run: str
    rank: int
    first_step: int
    time_s: float
    offset_ns: int  # Unix time minus the sender's clock, in ns
    columns: Mapping[str, bytes]


FindingRow = tuple[str, int, str, str, int, int, str]
"""A finding's run, rank, cause and GPU, when it was first and last seen in ms, and the finding as JSON."""
_JUMP_S, _BELIEVED_AFTER_S = 60.0, 3600.0


class Tick(NamedTuple):
    """One second of the history."""

    time_s: float
    samples: Sequence[Sample]
    runs: Mapping[tuple[str, int], bytes]  # `Run.record` by run and rank
    gpus: Sequence[GpuRecord]
    steps: Sequence[StepBatch]
    findings: Sequence[FindingRow]


class RetentionClock:
    """The wall clock, for deletion by age. A jump ahead counts after an hour only: a wrong clock would delete all."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._lead_s = wall() - monotonic()  # of the wall clock, as it was last believed
        self._jumped_s: float | None = None  # when it was first seen too far ahead

    def __call__(self) -> float:
        now_s = self._monotonic()
        lead_s = self._wall() - now_s
        if lead_s <= self._lead_s + _JUMP_S:
            self._lead_s, self._jumped_s = lead_s, None
        elif self._jumped_s is None:
            self._jumped_s = now_s
        elif now_s - self._jumped_s >= _BELIEVED_AFTER_S:
            self._lead_s, self._jumped_s = lead_s, None
        return now_s + self._lead_s


class History:
    """The history file. `commit`, `downsample` and `trim` belong to one thread; `reader` to any."""

    def __init__(self, path: Path, keep_s: float = 7 * 86400, keep_bytes: int = 2 << 30, full_s: float = 86400) -> None:
        self.path = path
        self.reader = HistoryReader(path)
        self.failures = 0
        self.bad_rows = 0  # rows that could not be read, and were deleted
        self.size_bytes = 0  # of the file at the last commit
        self.damaged = 0  # damaged, removed or replaced files in whose place a new one was created
        self._is_damaged = Event()
        self._inode: int | None = None  # of the file; None: it cannot be opened now (a full disk)
        self._keep_s, self._keep_bytes, self._full_s = keep_s, keep_bytes, full_s
        self._layout_id = lru_cache(1)(self._find_layout)
        self._last_ms = 0
        self._failing: set[str] = set()
        self._lock = lock_history(path)
        self.is_behind = self.was_behind = os.fstat(self._lock.fileno()).st_mtime == 0
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)  # no job runs on it
        self._parts: list[Path] = []  # SQLite's other files
        self._open_if_possible(is_start=True)

    def commit(self, tick: Tick) -> bool:
        """Write one second in one transaction; return False on failure, which is counted and logged once."""
        if self._inode is None and not self.failures % _TRY_EVERY:
            with suppress(ConfigError):
                self._open()
        if self._inode is None:
            self.failures += 1
            return False
        written = self._job("written", lambda: self._write(tick)) is not None
        if not written:
            self._layout_id.cache_clear()
        self._note_size()
        return written

    def mark_behind(self, behind: bool) -> None:
        """Tell the next agent if more was served than written: as the lock file's time 0, which needs no disk space."""
        os.utime(self._lock.fileno(), (0, 0) if behind else None)
        self.is_behind = behind

    def downsample(self, now_s: float, groups: int = 40) -> None:
        """Downsample some minutes that are past full resolution to one row each; called every five seconds."""
        before_ms = int((now_s - self._full_s) * 1000) // MINUTE_MS * MINUTE_MS
        self._count_bad(self._job("downsampled", lambda: downsample_ticks(self._connection, before_ms)))
        for _ in range(groups):
            bad = self._job("downsampled", lambda: downsample_steps(self._connection, before_ms))
            if bad is None:
                return
            self._count_bad(bad)

    def trim(self, now_s: float) -> None:
        """Delete what is past the retention, and the oldest part of a file that is too large; replace a removed one."""
        if self._inode is not None and not self._is_there():
            self._replace_file("it was removed or replaced")
        elif not all(each.exists() for each in self._parts):
            logger.warning("history %s: its -wal or -shm file was removed; reopening it", self.path)
            self._close_file()
            self._open_if_possible()
        self._job("trimmed", lambda: self._delete_before(int((now_s - self._keep_s) * 1000)))
        self._job("trimmed", self._delete_surplus)
        # As a script: `execute` would take one step, which frees one page. At most 80 MB at a time, as it is slow.
        # A -wal file that has filled the disk is emptied before: nothing can be written until then.
        vacuum = "PRAGMA wal_checkpoint; PRAGMA incremental_vacuum(20000); PRAGMA wal_checkpoint(TRUNCATE)"
        self._job("vacuumed", lambda: self._connection.executescript(vacuum), whole=False)
        if self._is_damaged.is_set() and self._inode is not None:
            self._replace_file("a page of it cannot be read")
        self._note_size()

    def note_damage(self, error: Exception) -> None:
        """Call where a query failed, from any thread: a damaged file is replaced at the next trimming."""
        if isinstance(error, sqlite3.Error) and is_damage(error):
            self._is_damaged.set()

    def check(self) -> None:
        """Read the whole file, and note damage. It may take minutes, and belongs into a thread of its own."""
        try:
            with closing(connect_readonly(self.path)) as connection:
                if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                    self._is_damaged.set()
        except sqlite3.Error as error:
            self.note_damage(error)

    def _job(self, what: str, work: Callable[[], T], whole: bool = True) -> T | None:
        """Return a job's result, in a transaction if `whole`; None on failure: counted, and logged when it begins."""
        if self._inode is None:
            return None
        try:
            with self._connection if whole else nullcontext():  # which commits, or rolls back
                if whole:
                    self._connection.execute("BEGIN IMMEDIATE")
                result = work()
        except (sqlite3.Error, msgspec.MsgspecError, ValueError, ArithmeticError) as error:
            self.failures += 1
            if isinstance(error, sqlite3.Error) and is_damage(error):
                self._replace_file(str(error))
            elif what not in self._failing:
                logger.warning("history %s cannot be %s (%s); the agent continues without it", self.path, what, error)
            self._failing.add(what)
            return None
        if what in self._failing:
            self._failing.remove(what)
            logger.warning("history %s can be %s again", self.path, what)
        return result

    def _count_bad(self, rows: int | None) -> None:
        if rows:
            if not self.bad_rows:
                logger.warning("history %s: %s unreadable rows were deleted; later ones are counted", self.path, rows)
            self.bad_rows += rows

    def _delete_surplus(self) -> None:
        if self._used_bytes() <= self._keep_bytes:
            return
        uids = {run.run: run.uid for run in self.reader.records()}
        by_user: dict[int | None, dict[str, int]] = {}
        sizes = "SELECT run, sum(length(columns) + 100) FROM steps GROUP BY run"
        for run, size in self._connection.execute(sizes):
            by_user.setdefault(uids.get(run), {})[run] = size
        totals = {uid: sum(sizes.values()) for uid, sizes in by_user.items()}
        greedy = max(totals, key=lambda uid: totals[uid], default=None)
        if len(totals) > 1 and totals[greedy] > 2 / 3 * sum(totals.values()):  # one user's flood is no other one's loss
            its = "FROM steps WHERE run IN (SELECT value FROM json_each(?))"
            names = msgspec.json.encode([*by_user[greedy]]).decode()
            half = f"SELECT (min(time_ms) + max(time_ms)) / 2 {its}"
            self._connection.execute(f"DELETE {its} AND time_ms <= ({half})", (names, names))
            return
        first, last = self._connection.execute(
            "SELECT min(a), max(b) FROM (SELECT min(time_ms) a, max(time_ms) b FROM tick"
            " UNION ALL SELECT min(time_ms), max(time_ms) FROM tick_minute)"
        ).fetchone()
        if first is not None:
            self._delete_before(first + max(60_000, (last - first) // 10))

    def _is_there(self) -> bool:
        with suppress(OSError):
            return self.path.stat().st_ino == self._inode and self.path.stat().st_size > 0
        return False

    def close(self) -> None:
        self._connection.close()
        self._lock.close()

    def _replace_file(self, reason: str) -> None:
        """Rename the file, and create a new one."""
        self.damaged += 1
        self._close_file()
        with suppress(OSError):  # it cannot be renamed: opening it gives the error
            set_aside(self.path, reason)
        self._open_if_possible()

    def _close_file(self) -> None:
        self._is_damaged.clear()
        self._connection.close()
        self._inode, self._parts = None, []

    def _open_if_possible(self, is_start: bool = False) -> None:
        """Open the file or create it; else commits fail. Raises: ConfigError at the start, unless the disk is full."""
        try:
            self._open()
        except ConfigError as refusal:
            if is_start and shutil.disk_usage(self.path.parent).free > _FULL_BYTES:
                self._lock.close()
                raise
            logger.warning("%s; the agent continues without a history and retries", refusal)

    def _open(self) -> None:
        self._layout_id.cache_clear()
        self._connection = open_history(self.path)
        self._inode = self.path.stat().st_ino
        self._parts = [each for each in (Path(f"{self.path}-wal"), Path(f"{self.path}-shm")) if each.exists()]
        self._note_size()

    def _note_size(self) -> None:
        with suppress(OSError):
            self.size_bytes = self.path.stat().st_size

    def _write(self, tick: Tick) -> int:
        """Return the time under which it is kept, in ms."""
        run = self._connection.execute
        now_ms = int(tick.time_s * 1000)
        if self._last_ms - now_ms < _FAR_BACK_MS:  # the wall clock may be set back
            now_ms = max(now_ms, self._last_ms + 1)
        self._last_ms = now_ms
        values = array("d", [sample.value for sample in tick.samples])
        layout = self._layout_id(tuple((sample.metric, sample.labels) for sample in tick.samples))
        run("INSERT OR REPLACE INTO tick VALUES (?, ?, ?)", (now_ms, layout, values.tobytes()))
        encode, run_many = msgspec.msgpack.encode, self._connection.executemany
        run_many("INSERT OR REPLACE INTO run VALUES (?, ?, ?, ?)", [(*key, now_ms, r) for key, r in tick.runs.items()])
        run("DELETE FROM gpu")
        run_many("INSERT OR REPLACE INTO gpu VALUES (?, ?)", [(gpu.uuid, encode(gpu)) for gpu in tick.gpus])
        run_many(
            "INSERT INTO steps (run, rank, first_step, count, time_ms, offset_ns, columns) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (*b[:3], wire.step_count(b.columns), int(b.time_s * 1000), b.offset_ns, encode(b.columns))
                for b in tick.steps
            ],
        )
        run_many("INSERT OR REPLACE INTO finding VALUES (?, ?, ?, ?, ?, ?, ?)", tick.findings)
        return now_ms

    def _find_layout(self, series: tuple[tuple[str, tuple[str, ...]], ...]) -> int:
        packed = zlib.compress(msgspec.json.encode(series), 1)
        self._connection.execute("INSERT OR IGNORE INTO layout (series) VALUES (?)", (packed,))
        return int(self._connection.execute("SELECT id FROM layout WHERE series = ?", (packed,)).fetchone()[0])

    def _delete_before(self, time_ms: int) -> None:
        run = self._connection.execute
        for table in ("tick", "tick_minute", "steps", "step_minute", "run"):
            run(f"DELETE FROM {table} WHERE time_ms < ?", (time_ms,))
        run("DELETE FROM finding WHERE seen_ms < ?", (time_ms,))
        run(f"DELETE FROM run WHERE NOT {LAST_RUNS}", (_MOST_RUNS_BYTES,))
        run("DELETE FROM layout WHERE id NOT IN (SELECT layout FROM tick UNION SELECT layout FROM tick_minute)")
        self._layout_id.cache_clear()

    def _used_bytes(self) -> int:
        used = "(page_count - freelist_count) * page_size"
        query = f"SELECT {used} FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        return int(self._connection.execute(query).fetchone()[0])
