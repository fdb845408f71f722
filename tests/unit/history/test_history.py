"""The history file: written and read at once, bounded, crash-safe, and never a reason for the agent to stop."""

from __future__ import annotations

import itertools
import logging
import random
import sqlite3
import threading
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from gpuwatch import wire
from gpuwatch.api import LastSteps
from gpuwatch.config import AgentSettings
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import Sample
from gpuwatch_agent.gpus import GpuRecord
from gpuwatch_agent.history import History, StepBatch, Tick
from gpuwatch_agent.runs import Run
from tests.unit.agent.hooks import BOOT, FakeHook

STATES = "gpuwatch_run_seconds_total"
BEGIN_S = 1_790_000_000.0


def tick(time_s: float, value: float = 0.0, *, runs=(), steps=(), run: str = "run-a") -> Tick:
    kept = {run.key: run.record() for run in runs}
    return Tick(time_s, [Sample(STATES, value, (run, "0", "compute"))], kept, [], list(steps), [])


def batch(hook: FakeHook, time_s: float) -> StepBatch:
    reported = hook.message()
    offset_ns = reported.origin.time_ns - reported.origin.monotonic_ns
    return StepBatch(reported.run, reported.rank, reported.first_step, time_s, offset_ns, reported.columns)


@pytest.fixture
def history(tmp_path: Path):
    history = History(tmp_path / "history.db")
    yield history
    history.close()


def points(history: History, begin: float, end: float, number: int) -> list[tuple[float, float]]:
    found = history.reader.series(STATES, {"state": "compute"}, begin, end, number)
    assert len(found) <= 1
    return list(found[0].points) if found else []


def test_a_gpu_whose_ledger_has_ended_is_not_kept_for_the_next_agent(history: History) -> None:
    former, present = (GpuRecord(uuid, "0", BOOT, (0, 0, {})) for uuid in ("GPU-former", "GPU-present"))
    for kept in ([former], [former, present], [present]):
        assert history.commit(tick(BEGIN_S)._replace(gpus=kept))
    assert [gpu.uuid for gpu in history.reader.gpus()] == ["GPU-present"]


@pytest.mark.parametrize("number", [1, 2, 7, 300, 899, 900, 2000])
def test_downsampled_counter_keeps_its_differences(history: History, number: int) -> None:
    for second in range(900):
        assert history.commit(tick(BEGIN_S + second, 0.25 * second))
    found = points(history, BEGIN_S, BEGIN_S + 900, number)
    assert len(found) <= number
    assert found[-1] == (BEGIN_S + 899, 0.25 * 899)
    assert all(value == 0.25 * (time_s - BEGIN_S) for time_s, value in found)
    if number > 1:
        assert len(found) >= min(number, 900) * 0.45
        differences = [b[1] - a[1] for a, b in itertools.pairwise(found)]
        assert sum(differences) == found[-1][1] - found[0][1]


def test_one_layout_serves_all_ticks_with_the_same_series(history: History) -> None:
    for second in range(20):
        history.commit(tick(BEGIN_S + second, run="run-a" if second % 4 < 2 else "run-b"))
    with sqlite3.connect(history.path) as connection:
        assert connection.execute("SELECT count(*) FROM layout").fetchone() == (2,)


def test_layout_id_is_never_given_again(history: History) -> None:
    """A deleted layout's id must not come to mean other series for rows that still name it."""
    history.commit(tick(BEGIN_S, 1.0, run="old"))
    history.trim(BEGIN_S + 8 * 86400)
    history.commit(tick(BEGIN_S + 8 * 86400, 2.0, run="new"))
    with sqlite3.connect(history.path) as connection:
        assert connection.execute("SELECT id FROM layout").fetchall() == [(2,)]
    found = history.reader.series(STATES, {}, BEGIN_S, BEGIN_S + 9 * 86400, 10)[0]
    assert found.labels["run"] == "new" and [value for _, value in found.points] == [2.0]


def test_series_of_an_agent_that_did_not_know_a_label_yet_are_read(history: History) -> None:
    """`address` of gpuwatch_build_info is a new one: the API answered with status 500 as long as old rows were kept."""
    for second, labels in enumerate([("0.1.0",), ("0.1.0", "10.1.2.3:9478")]):
        history.commit(Tick(BEGIN_S + second, [Sample("gpuwatch_build_info", 1.0, labels)], {}, [], [], []))
    found = history.reader.series("gpuwatch_build_info", {}, BEGIN_S, BEGIN_S + 9, 10)
    assert [each.labels["address"] for each in found] == ["", "10.1.2.3:9478"]


def test_what_is_too_old_goes_and_the_rest_stays(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db", keep_s=100.0)
    hook = FakeHook()
    for second in range(200):
        history.commit(tick(BEGIN_S + second, second, steps=[batch(hook.step(), BEGIN_S + second)]))
    history.trim(BEGIN_S + 200)
    assert points(history, BEGIN_S, BEGIN_S + 200, 300)[0] == (BEGIN_S + 100, 100.0)
    kept = history.reader.last_steps("run-a", 0, 1000)
    assert (kept.first_step, len(kept.time_s)) == (100, 100)
    history.close()


def test_the_longest_retention_that_can_be_set_deletes_nothing(tmp_path: Path) -> None:
    longest = {field.name: field.type for field in msgspec.structs.fields(AgentSettings)}
    days, gib, hours = (
        next(each.le for each in get_args(longest[name]) if isinstance(each, msgspec.Meta))
        for name in ("keep_days", "keep_gib", "full_hours")
    )
    history = History(tmp_path / "history.db", days * 86400, int(gib * 2**30), hours * 3600)
    assert history.commit(tick(BEGIN_S, 1.0))
    history.downsample(BEGIN_S + 90_000)
    history.trim(BEGIN_S + 90_000)
    assert history.failures == 0 and points(history, BEGIN_S, BEGIN_S + 1, 1) == [(BEGIN_S, 1.0)]
    history.close()


def test_file_that_is_too_large_shrinks_from_its_old_end(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db", keep_bytes=1 << 20)
    noise = random.Random(0)
    for second in range(1200):
        columns = {"start_ns": noise.randbytes(8 * 200), "data_wait_ns": bytes(1600), "compute_ns": bytes(1600)}
        step = StepBatch("run-a", 0, 200 * second, BEGIN_S + second, 0, columns)
        history.commit(tick(BEGIN_S + second, second, steps=[step]))
    history.trim(BEGIN_S)
    before = history.size_bytes
    assert before > 5 << 20
    for _ in range(40):
        history.trim(BEGIN_S + 1200)
    assert history.size_bytes < 1.2 * (1 << 20)
    kept = points(history, BEGIN_S, BEGIN_S + 1200, 2000)
    assert kept[-1] == (BEGIN_S + 1199, 1199.0)
    assert kept[0][0] > BEGIN_S + 600
    history.close()


def test_file_is_made_so_that_it_can_shrink(history: History) -> None:
    with sqlite3.connect(history.path) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_clock_set_back_a_little_leaves_every_second_in_its_order(history: History) -> None:
    for second, value in [(0, 1.0), (1, 2.0), (-20, 3.0), (-19, 4.0), (2, 5.0)]:
        assert history.commit(tick(BEGIN_S + second, value))
    assert [value for _, value in points(history, BEGIN_S - 100, BEGIN_S + 100, 2000)] != []
    with sqlite3.connect(history.path) as connection:
        rows = connection.execute("SELECT time_ms FROM tick ORDER BY rowid").fetchall()
    assert [row[0] - int(BEGIN_S * 1000) for row in rows] == [0, 1000, 1001, 1002, 2000]


def test_clock_set_back_by_hours_is_followed(history: History) -> None:
    history.commit(tick(BEGIN_S, 1.0))
    history.commit(tick(BEGIN_S - 7200, 2.0))
    history.commit(tick(BEGIN_S - 7199, 3.0))
    assert points(history, BEGIN_S - 7300, BEGIN_S - 7000, 300) == [(BEGIN_S - 7200, 2.0), (BEGIN_S - 7199, 3.0)]


def test_readers_see_whole_seconds_while_one_writes_and_trims(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db", keep_s=50.0)
    stop = threading.Event()
    failures: list[BaseException] = []
    reads = [0]

    def read() -> None:
        try:
            while not stop.is_set():
                for series in history.reader.series(STATES, {}, BEGIN_S - 1, BEGIN_S + 10_000, 2000):
                    assert all(value == float(time_s - BEGIN_S) for time_s, value in series.points)
                reads[0] += 1
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for second in range(400):
        assert history.commit(tick(BEGIN_S + second, float(second), run=f"run-{second // 7}"))
        if second % 20 == 0:
            history.trim(BEGIN_S + second)
    stop.set()
    for reader in readers:
        reader.join(60)
    assert not failures
    assert reads[0] > 0
    assert history.failures == 0
    history.close()


def test_full_disk_is_counted_said_once_and_got_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    history = History(tmp_path / "history.db")
    history.commit(tick(BEGIN_S))
    pages = history._connection.execute("PRAGMA page_count").fetchone()[0]
    history._connection.execute(f"PRAGMA max_page_count={pages}").fetchall()
    hook = FakeHook()
    for _ in range(8000):
        hook.step()
    full = tick(BEGIN_S + 1, steps=[batch(hook, BEGIN_S + 1)])
    assert [history.commit(full) for _ in range(3)] == [False, False, False]
    assert history.failures == 3
    history._connection.execute("PRAGMA max_page_count=100000").fetchall()
    assert history.commit(tick(BEGIN_S + 2, 7.0))
    assert [record.message for record in caplog.records if "cannot be written" in record.message] == [
        f"history {history.path} cannot be written (database or disk is full); the agent continues without it"
    ]
    again = [record.levelname for record in caplog.records if "can be written again" in record.message]
    assert again == ["WARNING"], "it ends what was logged at this level"
    assert points(history, BEGIN_S, BEGIN_S + 10, 300)[-1] == (BEGIN_S + 2, 7.0)
    history.close()


def test_run_is_found_again_as_it_was_kept(history: History) -> None:
    hook = FakeHook().step()
    run = Run("run-a", 0, BOOT)
    for message in (hook.hello(), hook.message()):
        run.apply(message, hook.at_ns, BEGIN_S)
    history.commit(tick(BEGIN_S, runs=[run]))
    [kept] = history.reader.records()
    assert kept.key == ("run-a", 0) and kept.record() == run.record()


def test_steps_come_back_with_unmeasured_values_as_none(history: History) -> None:
    columns = {"start_ns": wire.pack([5, 6]), "compute_ns": wire.pack([7, wire.MISSING])}
    history.commit(tick(BEGIN_S, steps=[StepBatch("run-a", 0, 40, BEGIN_S, 0, columns)]))
    assert history.reader.last_steps("run-a", 0, 1) == LastSteps(
        run="run-a",
        rank=0,
        first_step=41,
        time_s=[6e-9],
        data_wait_s=[None],
        transfer_s=[None],
        compute_s=[None],
        input_wait_s=[None],
        host_wait_s=[None],
        device_transfer_s=[None],
        device_compute_s=[None],
        samples=[None],
        epoch_start=[0],  # left out of a message in which no pass begins
    )


def test_damaged_file_is_set_aside_and_a_new_one_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(b"this is no database at all, whatever its name says" * 100)
    history = History(path)
    assert history.commit(tick(BEGIN_S))
    aside = [each for each in tmp_path.iterdir() if "damaged" in each.name]
    assert len(aside) == 1 and aside[0].read_bytes().startswith(b"this is no database")
    assert f"renamed to {aside[0].name}" in caplog.text
    history.close()


def test_file_of_the_users_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import gpuwatch\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=rf"--history {path} is not a history; name another file"):
        History(path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("train.py", "import gpuwatch\n")]
    assert path.stat().st_mode & 0o777 == 0o644
    empty = tmp_path / "empty"
    empty.touch()
    History(empty).close()
    History(empty).close()


def test_file_damaged_inside_is_set_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    history = History(path)
    for number in range(300):
        hook = FakeHook(run=f"run-{number}")
        run = Run(hook.run, 0, BOOT)
        run.apply(hook.message(), hook.at_ns, BEGIN_S)
        history.commit(tick(BEGIN_S + number, runs=[run], run=f"run-{number}"))
    history.close()
    content = bytearray(path.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 200] = b"\xff" * 200
    path.write_bytes(content)
    history = History(path)
    assert history.reader.runs() == []
    assert history.commit(tick(BEGIN_S))
    assert sum("damaged" in each.name for each in tmp_path.iterdir()) == 1
    history.close()


def test_file_that_is_damaged_at_work_is_set_aside_and_replaced(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.DatabaseError("database disk image is malformed")
    if hasattr(error, "sqlite_errorcode"):
        error.sqlite_errorcode = 11

    def fail(_tick: Tick) -> None:
        raise error

    history.commit(tick(BEGIN_S))
    with monkeypatch.context() as patch:
        patch.setattr(history, "_write", fail)
        assert history.commit(tick(BEGIN_S + 1)) is False
    assert history.commit(tick(BEGIN_S + 2, 3.0))
    assert points(history, BEGIN_S, BEGIN_S + 9, 300) == [(BEGIN_S + 2, 3.0)]
    assert history.failures == 1


def test_newer_schema_is_left_alone_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(ConfigError, match=r"written by a newer gpuwatch \(schema 99.*update gpuwatch, or choose"):
        History(path)
    assert [each.name for each in tmp_path.iterdir() if "damaged" in each.name] == []


def test_other_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE run (mine TEXT)")
    with pytest.raises(ConfigError, match="another program's database; choose another file"):
        History(path)


def test_directory_and_unwritable_place_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"--history {tmp_path} is a folder, or no regular file; name one, e.g. {tmp_path}/history.db",
    ):
        History(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose a file that you may write to"):
        History(tmp_path / "file" / "history.db")


def test_second_agent_is_kept_from_the_same_file(history: History) -> None:
    with pytest.raises(ConfigError, match="another agent uses it already"):
        History(history.path)
