"""Old history by the minute: nothing is lost of counts, sums and extremes, and queries go on over both."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch import wire
from gpuwatch.api import Epoch
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import Sample
from gpuwatch_agent.history import History, StepBatch, Tick, reader
from gpuwatch_agent.history.downsample import Spread, StepMinute, downsample
from gpuwatch_agent.history.reader import HistoryReader

VERSION_1 = Path(__file__).parents[2] / "fixtures/history/version-1.db"
BEGIN_S = 1_790_000_000.0 - 1_790_000_000.0 % 60  # a whole minute
STATES, POWER = "gpuwatch_run_seconds_total", "gpuwatch_gpu_power_watts"
MS = 1_000_000


def batch(first_step: int, time_s: float, waits_ms: list[int], run: str = "run-a", rank: int = 0) -> StepBatch:
    starts = [int(time_s * 1e9) + number * 100 * MS for number in range(len(waits_ms))]
    columns = {
        "start_ns": starts,
        "data_wait_ns": [ms * MS for ms in waits_ms],
        "transfer_ns": [0] * len(waits_ms),
        "compute_ns": [40 * MS] * len(waits_ms),
        "samples": [8] * len(waits_ms),
        "epoch_start": [int(first_step + number == 0) for number in range(len(waits_ms))],
        "input_wait_ns": [-1] * len(waits_ms),
    }
    return StepBatch(run, rank, first_step, time_s, 0, {name: wire.pack(column) for name, column in columns.items()})


def write(history: History, seconds: int, ranks: int = 1) -> None:
    """Two steps a second and rank, and a counter and a gauge."""
    for second in range(seconds):
        at_s = BEGIN_S + second
        samples = [
            Sample(STATES, 0.5 * second, ("run-a", "0", "compute")),
            Sample(POWER, 900.0 if second == 130 else 300.0 + second % 7, ("0", "GPU-1")),
        ]
        steps = [batch(2 * second, at_s, [second % 50, 20], rank=rank) for rank in range(ranks)]
        assert history.commit(Tick(at_s, samples, {}, [], steps, []))


def downsampled(history: History, full_until_s: float, turns: int = 100) -> None:
    for _ in range(turns):
        history.downsample(full_until_s + history._full_s)


@pytest.fixture
def history(tmp_path: Path):
    history = History(tmp_path / "history.db", full_s=3600)
    yield history
    history.close()


def rows(history: History, table: str) -> int:
    with sqlite3.connect(history.path) as connection:
        found: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return found


def test_minutes_take_the_place_of_seconds_and_steps(history: History) -> None:
    write(history, 600, ranks=2)
    downsampled(history, BEGIN_S + 300)
    assert (rows(history, "tick"), rows(history, "tick_minute")) == (300, 5)
    assert (rows(history, "steps"), rows(history, "step_minute")) == (2 * 300, 2 * 5)
    downsampled(history, BEGIN_S + 330)  # a minute that is not over stays as it is
    assert (rows(history, "tick"), rows(history, "step_minute")) == (300, 10)


def test_an_answer_is_of_one_moment(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes and full records are two queries, between which the writer's thread may downsample."""
    write(history, 600)
    real = reader._minutes

    def minutes(*arguments: object) -> list[object]:
        found = list(real(*arguments))  # type: ignore[arg-type]
        downsampled(history, BEGIN_S + 300)
        return found

    monkeypatch.setattr(reader, "_minutes", minutes)
    assert [history.reader.steps("run-a", 0, 20).steps for _ in range(2)] == [1200, 1200]  # type: ignore[union-attr]


def test_a_turn_does_a_little_at_a_time(history: History) -> None:
    write(history, 240, ranks=3)
    history.downsample(BEGIN_S + 240 + 3600, groups=2)
    assert (rows(history, "tick_minute"), rows(history, "step_minute")) == (1, 2)


@pytest.mark.parametrize("points", [3, 7, 100, 2000])
def test_counters_keep_their_differences_over_both(history: History, points: int) -> None:
    write(history, 600)
    downsampled(history, BEGIN_S + 300)
    (series,) = history.reader.series(STATES, {}, BEGIN_S, BEGIN_S + 600, points)
    found = series.points
    assert series.labels["run"] == "run-a"
    assert all(value == 0.5 * (time_s - BEGIN_S) for time_s, value in found)
    assert found[-1] == (BEGIN_S + 599, 299.5)
    if points == 2000:
        assert len(found) == 5 + 300
        assert [time_s for time_s, _ in found[:3]] == [BEGIN_S + 59, BEGIN_S + 119, BEGIN_S + 179]


def test_spike_is_in_the_extremes_of_its_minute(history: History) -> None:
    write(history, 300)
    before = history.reader.series(POWER, {}, BEGIN_S, BEGIN_S + 300, 20, None, True)
    downsampled(history, BEGIN_S + 300)
    after = history.reader.series(POWER, {}, BEGIN_S, BEGIN_S + 300, 20, None, True)
    for (found,) in (before, after):
        assert max(value for _, value in found.points) == 900.0
        assert min(value for _, value in found.points) == 300.0


def test_downsampled_steps_over_both_have_every_step(history: History) -> None:
    write(history, 600)
    whole = history.reader.steps("run-a", 0, 10)
    downsampled(history, BEGIN_S + 300)
    both = history.reader.steps("run-a", 0, 10)
    assert None not in whole.bucket_s["p50"]
    assert [mark is None for mark in both.bucket_s["p95"]] == [True] * 5 + [False] * 5
    for found in (whole, both):
        assert found.steps == sum(found.count) == 1200
        assert sum(found.samples) == 9600
        assert found.epochs == [Epoch(0, BEGIN_S)]
        waits = found.columns["data_wait_s"]
        assert (min(waits.min), max(waits.max)) == (0.0, 0.049)
        mean = sum(m * n for m, n in zip(waits.mean, found.count, strict=True)) / 1200
        assert mean == pytest.approx((24.5 + 20) / 2 / 1e3)
        assert found.columns["input_wait_s"] is None  # never measured, and not 0
        assert found.step[0] == 0 and found.time_s == sorted(found.time_s)
    assert len(both.count) <= 11
    recent = history.reader.steps("run-a", 0, 10, BEGIN_S + 240, BEGIN_S + 400)
    assert recent.steps == 120 + 201  # the minute that began there, and the full records up to the end
    assert history.reader.last_steps("run-a", 0, 5000).first_step == 600  # each for itself, those that still are


def test_a_history_of_old_minutes_is_deleted_by_age(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db", keep_s=400, full_s=60)
    write(history, 600)
    downsampled(history, BEGIN_S + 540)
    history.trim(BEGIN_S + 600)
    (found,) = history.reader.series(STATES, {}, BEGIN_S, BEGIN_S + 600, 2000)
    assert found.points[0][0] == BEGIN_S + 239
    assert history.reader.steps("run-a", 0, 10).steps == 2 * 420  # a minute goes when its end is too old
    history.close()


def test_too_large_a_history_of_minutes_shrinks(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db", full_s=60, keep_bytes=200 << 10)
    write(history, 3000)
    downsampled(history, BEGIN_S + 3000)
    assert rows(history, "tick") == 0
    for _ in range(60):
        history.trim(BEGIN_S + 3000)
    assert history.size_bytes <= 1.2 * (200 << 10)
    assert 0 < rows(history, "tick_minute") <= 50
    history.close()


@given(st.lists(st.lists(st.integers(-1, 1000), min_size=1, max_size=20), max_size=20))
@settings(max_examples=200, deadline=None)
def test_spread_is_that_of_what_was_measured(messages: list[list[int]]) -> None:
    spread = Spread()
    for values in messages:
        spread = spread.plus(values)
    known = [value for values in messages for value in values if value >= 0]
    assert (spread.count, spread.sum_ns) == (len(known), sum(known))
    if known:
        assert (spread.least_ns, spread.most_ns) == (min(known), max(known))


def test_minutes_that_an_earlier_version_kept_have_their_samples(history: History) -> None:
    """Their record is read by the names of its fields: one that is renamed is lost without a word."""
    start_ns = int(BEGIN_S * 1e9)
    record = {"first_step": 0, "count": 3, "start_ns": start_ns, "end_ns": start_ns + 60_000 * MS, "epochs": []}
    record |= {"columns": {"data_wait_ns": [3, 9 * MS, MS, 5 * MS]}, "samples": 16, "samples_known": 2}
    row = ("run-a", 0, 0, 3, int(BEGIN_S * 1000), msgspec.msgpack.encode(record))
    history._connection.execute(
        "INSERT INTO step_minute (run, rank, first_step, count, time_ms, record) VALUES (?, ?, ?, ?, ?, ?)", row
    )
    found = history.reader.steps("run-a", 0, 10)
    assert found is not None and (found.count, found.samples) == ([3], [16])
    waits = found.columns["data_wait_s"]
    assert waits is not None and (waits.mean, waits.min, waits.max) == ([0.003], [0.001], [0.005])


def test_a_file_of_an_older_schema_is_renamed_and_a_new_one_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.db"
    shutil.copy(VERSION_1, path)
    with pytest.raises(ConfigError, match="not a history that this gpuwatch reads"):
        HistoryReader.checked(path)
    history = History(path)
    (renamed,) = (each for each in tmp_path.iterdir() if "damaged" in each.name)
    assert f"(an old schema: 1, this gpuwatch writes 4): renamed to {renamed.name}" in caplog.text
    with sqlite3.connect(renamed) as connection:
        assert connection.execute("SELECT sum(count) FROM steps").fetchone() == (90,)
    assert history.reader.records() == [] and history.damaged == 0
    history.close()


@pytest.mark.parametrize(("steps", "points"), [(6, 600), (6, 1), (7, 300), (1, 1000), (601, 2)])
def test_minutes_of_slow_steps_are_no_more_buckets_than_asked_for(steps: int, points: int) -> None:
    """A run of ten-second steps, 6 a minute: `points=600` gave 1,000 buckets."""
    minutes = [StepMinute(steps * n, steps, n * 60 * 10**9, (n + 1) * 60 * 10**9, {}) for n in range(1000)]
    found = downsample([], steps * 1000, points, minutes)
    assert found.steps == sum(found.count) == steps * 1000
    assert points / 2 - 1 <= len(found.step) <= points + 1 and max(found.count) <= 2 * (found.bucket_steps + steps)
