"""A history file that is removed, replaced, truncated or damaged: found, renamed, counted, replaced.

And a full disk at the start.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from gpuwatch.errors import ConfigError
from gpuwatch.metrics import Sample
from gpuwatch_agent.history import History, RetentionClock, Tick
from gpuwatch_agent.history.reader import HistoryReader
from gpuwatch_agent.history.writer import HistoryWriter
from gpuwatch_agent.runs import Run
from tests.unit.agent.hooks import BOOT, FakeHook, S

BEGIN_S = 1_790_000_000.0
STATES = "gpuwatch_run_seconds_total"


def commit(history: History, second: int) -> bool:
    samples = [Sample(STATES, float(second), (f"run-{n}", "0", "compute")) for n in range(50)]
    return history.commit(Tick(BEGIN_S + second, samples, {}, [], [], []))


def seconds(history: History) -> int:
    found = history.reader.series(STATES, {"run": "run-0"}, BEGIN_S, BEGIN_S + 400, 1000)
    return len(found[0].points) if found else 0


def unlink(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()


def replace(path: Path) -> None:
    path.rename(path.with_name("mine.db"))
    path.write_bytes(b"another file")


def truncate(path: Path) -> None:
    os.truncate(path, 8192)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        for page in range(4096, path.stat().st_size, 4096):
            file.seek(page)
            file.write(b"\xff" * 4096)


def another_database(path: Path) -> None:
    """Copy a valid database of another program over it: the same inode."""
    other = path.with_name("other.db")
    with closing(sqlite3.connect(other)) as connection:
        connection.executescript("CREATE TABLE mine (x); INSERT INTO mine VALUES (1); PRAGMA user_version=4")
    shutil.copyfile(other, path)


def folder(path: Path) -> None:
    path.rename(path.with_name("mine.db"))
    path.mkdir()
    (path / "file").touch()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_nowhere(path: Path) -> None:
    path.rename(path.with_name("mine.db"))
    path.symlink_to("nowhere")


OUTSIDE = [unlink, replace, folder, fifo, link_to_nowhere]
INSIDE = [truncate, empty, overwrite, another_database]


@pytest.mark.parametrize("harm", [*OUTSIDE, *INSIDE])
def test_a_harmed_file_is_found_and_replaced(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    history = History(tmp_path / "history.db")
    for second in range(100):
        assert commit(history, second)
    history.trim(BEGIN_S + 100)
    harm(history.path)
    for second in range(100, 220):
        commit(history, second)
        if second == 160:
            if harm in INSIDE:  # SQLite has these pages in memory: only another reader meets them
                history.check()
            history.trim(BEGIN_S + second)
    assert history.damaged == 1
    assert seconds(history) >= 59, "what is written since can be read by others"
    assert commit(history, 220)
    assert len([record for record in caplog.records if "a new one is created" in record.message]) == 1
    history.close()
    again = History(tmp_path / "history.db")
    assert again.damaged == 0 and seconds(again) >= 59
    again.close()


def test_damage_in_an_old_page_is_found_by_the_check(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    for second in range(300):
        commit(history, second)
    history.trim(BEGIN_S + 300)
    with history.path.open("r+b") as file:
        file.seek(history.path.stat().st_size // 2 // 4096 * 4096)
        file.write(b"\x00\xff" * 2048)
    history.check()
    history.trim(BEGIN_S + 301)
    assert history.damaged == 1
    assert commit(history, 302) and seconds(history) == 1
    history.close()


def test_damage_that_a_query_meets_is_noted(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    commit(history, 0)
    history.note_damage(sqlite3.OperationalError("database is locked"))
    history.trim(BEGIN_S)
    assert history.damaged == 0
    history.note_damage(sqlite3.DatabaseError("database disk image is malformed"))
    history.trim(BEGIN_S)
    assert history.damaged == 1
    history.close()


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    path.touch(0o644)
    history = History(path)
    commit(history, 0)
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir() if ".lock" not in each.name}
    assert modes == dict.fromkeys(("history.db", "history.db-wal", "history.db-shm"), 0o600)
    history.close()


def test_a_byte_that_is_not_utf_8_or_a_lost_field_costs_a_record_and_not_the_agent_s_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.db"
    hook = FakeHook().spend("compute", S)
    for name in ("good", "broken"):
        run = Run(name, 0, BOOT)
        run.apply(hook.hello(), hook.at_ns, 0.0)
        run.apply(hook.message(), hook.at_ns, 0.0)
        history = History(path)
        assert history.commit(Tick(BEGIN_S, [], {run.key: run.record() or b""}, [], [], []))
        history.close()
    for sound, broken in ((b"broken", b"\xffroken"), (b"ledger", b"medger")):
        change(path, "UPDATE run SET record = ? WHERE run = 'broken'", (run.record() or b"").replace(sound, broken))
        history = History(path)
        assert [run.run for run in history.reader.records()] == ["good"]
        history.close()
    assert "a record is skipped" in caplog.text
    change(path, "UPDATE run SET run = CAST(? AS TEXT) WHERE run = 'broken'", b"\xffroken")
    history = History(path)
    assert "a new one is created" in caplog.text and history.reader.records() == []
    history.close()


def change(path: Path, sql: str, value: bytes) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql, (value,))


@pytest.mark.parametrize("name", ["h?x#1.db", "100%25.db", "a b.db", "ü&mode=rw.db"])
def test_a_path_may_have_any_characters(tmp_path: Path, name: str) -> None:
    history = History(tmp_path / name)
    commit(history, 0)
    assert seconds(history) == 1
    assert HistoryReader.checked(tmp_path / name).runs() == []
    history.close()
    assert (tmp_path / name).is_file()


def test_an_agent_starts_on_a_full_disk_and_writes_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = "gpuwatch_agent.history"
    from gpuwatch_agent.history import file, shutil

    with monkeypatch.context() as patch:

        def full(path: Path) -> sqlite3.Connection:
            raise ConfigError(f"--history {path}: database or disk is full; choose a file that you may write to")

        patch.setattr(f"{module}.open_history", full)
        with pytest.raises(ConfigError):  # there is room: it is another error
            History(tmp_path / "other.db")
        patch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 0}))
        history = History(tmp_path / "history.db")
        assert [commit(history, second) for second in range(25)] == [False] * 25
        assert history.failures == 25
    assert file.open_history is not full
    assert any(commit(history, second) for second in range(25, 36))
    assert seconds(history) >= 1
    assert len([record for record in caplog.records if "continues without a history" in record.message]) == 1
    history.close()


def test_a_history_that_cannot_be_opened_for_a_while_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for damaged, and renamed, by the first downsampling on a full disk."""
    history = History(tmp_path / "history.db")
    for second in range(10):
        commit(history, second)
    history.close()
    with monkeypatch.context() as patch:

        def full(path: Path) -> sqlite3.Connection:
            raise ConfigError(f"--history {path}: database or disk is full; choose a file that you may write to")

        patch.setattr("gpuwatch_agent.history.open_history", full)
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
        history = History(tmp_path / "history.db")
        for second in range(10, 15):
            assert not commit(history, second)
        history.downsample(BEGIN_S + 15)
        history.trim(BEGIN_S + 15)
    assert (history.damaged, history.failures) == (0, 5)
    assert any(commit(history, second) for second in range(15, 30))
    assert seconds(history) > 10
    history.close()


def test_a_wal_file_that_filled_the_disk_during_a_backup_is_emptied_after_it(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    for second in range(400):
        commit(history, second)
    history._connection.execute(f"DELETE FROM tick WHERE time_ms < {int((BEGIN_S + 200) * 1000)}")
    history._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(sqlite3.connect(history.path)) as backup:
        backup.execute("BEGIN")
        backup.execute("SELECT count(*) FROM tick").fetchall()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * history.path.stat().st_size, limits[1]))
        try:
            assert not all(commit(history, second) for second in range(400, 800))
            backup.close()
            history.trim(BEGIN_S + 800)
            assert commit(history, 801)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    history.close()


def test_a_wall_clock_that_jumps_ahead_deletes_nothing_for_an_hour() -> None:
    now = {"wall": 1_790_000_000.0, "monotonic": 5_000.0}

    def passes(seconds: float, jump_s: float = 0.0) -> float:
        now["monotonic"] += seconds
        now["wall"] += seconds + jump_s
        return retention()

    retention = RetentionClock(lambda: now["wall"], lambda: now["monotonic"])
    assert passes(10) == now["wall"]
    wrong = passes(1, jump_s=30 * 86400)
    assert wrong == pytest.approx(now["wall"] - 30 * 86400)
    assert passes(70) == pytest.approx(wrong + 70)
    assert passes(1, jump_s=-30 * 86400) == now["wall"], "it was wrong for 72 s"
    passes(1, jump_s=86400)
    assert passes(3599) == pytest.approx(now["wall"] - 86400)
    assert passes(2) == now["wall"], "after an hour it is believed"
    assert passes(1, jump_s=-7200) == now["wall"], "back is always believed: less is deleted"
    assert passes(1, jump_s=59) == now["wall"], "as NTP corrects it"


def test_the_next_agent_knows_that_more_was_served_than_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / "history.db")
    writer, tick = HistoryWriter(history), Tick(BEGIN_S, [], {}, [], [], [])
    assert writer.commit(tick) and not history.is_behind
    with monkeypatch.context() as patch:
        patch.setattr(history, "_write", lambda tick: 1 / 0)
        assert not writer.commit(tick)
        assert history.is_behind
        history.close()  # as kill -9 does
    history = History(tmp_path / "history.db")
    assert history.was_behind
    assert HistoryWriter(history).commit(tick) and not history.is_behind
    history.close()
    history = History(tmp_path / "history.db")
    assert not history.was_behind
    history.close()


def test_a_record_that_could_not_be_written_is_written_with_the_next_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's record comes only when it has changed.

    A quiet second after a failure says nothing of it, and was taken for the whole state.
    """
    history = History(tmp_path / "history.db")
    writer = HistoryWriter(history)

    def commit(second: int, **records: bytes) -> bool:
        runs = {(name, 0): record for name, record in records.items()}
        return writer.commit(Tick(BEGIN_S + second, [], runs, [], [], []))

    def kept() -> dict[str, bytes]:
        return dict(history._connection.execute("SELECT run, record FROM run").fetchall())

    assert commit(0, a=b"1", b=b"1")
    with monkeypatch.context() as patch:
        patch.setattr(history, "_write", lambda tick: 1 / 0)
        assert not commit(1, a=b"2") and not commit(2, a=b"3", c=b"1") and history.is_behind
    assert commit(3, c=b"2") and not history.is_behind
    assert kept() == {"a": b"3", "b": b"1", "c": b"2"}
    with monkeypatch.context() as patch:  # the disk hangs, and memory is full
        patch.setattr("gpuwatch_agent.history.writer._MOST_WAITING_BYTES", 0)
        patch.setattr(writer, "_do", lambda work, waits=True: None)
        for second, record in enumerate((b"4", b"5", b"6"), 4):
            assert not commit(second, a=record)
        assert writer.skipped == 2
    assert commit(7) and not history.is_behind and kept()["a"] == b"6"
    history.close()


def test_an_error_of_work_that_is_pending_does_not_escape_close(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    writer, may_fail = HistoryWriter(history), Event()

    def fail() -> bool:
        assert may_fail.wait(60)
        raise ValueError("of work that had begun before")

    assert writer._do(fail, waits=False) is None
    may_fail.set()
    writer.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        history._connection.execute("SELECT 1")


@pytest.mark.parametrize("gone", ["-wal", "-shm", "-wal -shm"])
def test_a_removed_wal_is_found_and_nothing_is_lost(
    tmp_path: Path, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(tmp_path / "history.db")
    for second in range(10):
        assert commit(history, second)
    for suffix in gone.split():
        Path(f"{history.path}{suffix}").unlink()
    for second in range(10, 20):
        assert commit(history, second)
    history.trim(BEGIN_S + 20)
    assert commit(history, 20)
    assert seconds(history) == 21, "others read what is written"
    assert (history.damaged, history.failures) == (0, 0)
    assert len([record for record in caplog.records if "was removed" in record.message]) == 1
    history.close()
    again = History(tmp_path / "history.db")
    assert (again.damaged, seconds(again)) == (0, 21)
    again.close()


@pytest.mark.parametrize("harm", [fifo, folder, another_database])
def test_queries_go_on_while_it_is_no_history(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    history = History(tmp_path / "history.db")
    commit(history, 0)
    history.trim(BEGIN_S)
    harm(history.path)
    with ThreadPoolExecutor(1) as pool, pytest.raises(sqlite3.Error) as refused:
        pool.submit(seconds, history).result(60)
    history.note_damage(refused.value)
    history.trim(BEGIN_S + 1)
    assert commit(history, 2) and seconds(history) == 1
    assert history.damaged == 1
    history.close()


@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/null") if kind == "device" else tmp_path / "history.db"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/null")
    before = path.stat()
    with pytest.raises(ConfigError, match="is a folder, or no regular file"):
        History(path)
    assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode)
