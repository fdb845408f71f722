"""What charts ask of the history: spikes that survive downsampling, sums by label, a million steps as a few buckets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch import wire
from gpuwatch.api import Spread
from gpuwatch.metrics import Sample
from gpuwatch_agent.history import History, StepBatch, Tick

BEGIN_S = 1_790_000_000.0
MS = 1_000_000
UTILIZATION, GPU_SECONDS = "gpuwatch_gpu_utilization_ratio", "gpuwatch_gpu_seconds_total"


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path / "history.db")
    yield history
    history.close()


def commit(history: History, time_s: float, samples: list[Sample], steps: list[StepBatch] | None = None) -> None:
    assert history.commit(Tick(time_s, samples, {}, [], steps or [], []))


def batch(first: int, count: int, *, wait_ms: list[int] | None = None, **columns: list[int]) -> StepBatch:
    """Steps of 10 ms each, of which `wait_ms` (default 3) is waiting; the sender's clock began at BEGIN_S."""
    waits = [3] * count if wait_ms is None else wait_ms
    known = {
        "start_ns": [(first + n) * 10 * MS for n in range(count)],
        "data_wait_ns": [wait * MS for wait in waits],
        "transfer_ns": [MS] * count,
        "compute_ns": [6 * MS] * count,
        **columns,
    }
    packed = {name: wire.pack(values) for name, values in known.items()}
    return StepBatch("r", 0, first, BEGIN_S + (first + count) * 0.01, int(BEGIN_S * 1e9), packed)


def test_extremes_keep_a_spike_and_a_hole_of_one_second(history: History) -> None:
    for second in range(600):
        value = {250: 0.99, 400: 0.01}.get(second, 0.5)
        commit(history, BEGIN_S + second, [Sample(UTILIZATION, value, ("0", "GPU-0"))])
    [found] = history.reader.series(UTILIZATION, {}, BEGIN_S, BEGIN_S + 599, 30, extremes=True)
    assert found.labels == {"gpu": "0", "UUID": "GPU-0"}
    points = list(found.points)
    assert len(points) <= 30
    assert (BEGIN_S + 250, 0.99) in points and (BEGIN_S + 400, 0.01) in points
    assert points == sorted(points)
    [last] = history.reader.series(UTILIZATION, {}, BEGIN_S, BEGIN_S + 599, 30)
    assert {value for _, value in last.points} == {0.5}


def test_sum_by_label_keeps_the_others_apart(history: History) -> None:
    for second in range(10):
        rows = [(gpu, state) for gpu in ("0", "1") for state in ("compute", "input_wait")]
        samples = [Sample(GPU_SECONDS, second * (2.0 if s == "compute" else 1.0), (g, f"GPU-{g}", s)) for g, s in rows]
        commit(history, BEGIN_S + second, samples)
    found = history.reader.series(GPU_SECONDS, {}, BEGIN_S, BEGIN_S + 9, 100, by=["state"])
    assert {each.labels["state"]: each.points[-1] for each in found} == {
        "compute": (BEGIN_S + 9, 36.0),
        "input_wait": (BEGIN_S + 9, 18.0),
    }
    of_one = history.reader.series(GPU_SECONDS, {"gpu": "1"}, BEGIN_S, BEGIN_S + 9, 100, by=["state"])
    assert {each.labels["state"]: each.last for each in of_one} == {"compute": 18.0, "input_wait": 9.0}
    [whole] = history.reader.series(GPU_SECONDS, {}, BEGIN_S, BEGIN_S + 9, 100, by=[])
    assert whole.labels == {} and whole.last == 54.0


def test_buckets_have_mean_least_and_most_of_their_steps_whatever_the_messages(history: History) -> None:
    waits = [3] * 100
    waits[42] = 250
    for first, count in ((0, 33), (33, 1), (34, 66)):
        commit(history, BEGIN_S + first, [], [batch(first, count, wait_ms=waits[first : first + count])])
    found = history.reader.steps("r", 0, 10)
    assert (found.steps, found.bucket_steps) == (100, 10)
    assert found.step == list(range(0, 100, 10))
    assert found.count == [10] * 10
    assert found.time_s == pytest.approx([BEGIN_S + 0.1 * n for n in range(10)])
    assert found.end_s[0] == pytest.approx(BEGIN_S + 0.1)
    wait = found.columns["data_wait_s"]
    assert wait.mean == pytest.approx([0.003] * 4 + [0.0277] + [0.003] * 5)
    assert wait.max[4] == 0.25 and wait.min[4] == 0.003
    assert found.columns["input_wait_s"] is None, "no device column was ever sent"
    assert found.step_s == pytest.approx({"p5": 0.01, "p50": 0.01, "p95": 0.01, "p99": 0.257})
    assert found.bucket_s["p50"] == pytest.approx([0.01] * 10)
    assert found.bucket_s["p95"] == pytest.approx([0.01] * 4 + [0.257] + [0.01] * 5)


def test_steps_that_the_device_did_not_measure_are_left_out_of_its_mean(history: History) -> None:
    commit(history, BEGIN_S, [], [batch(0, 4, input_wait_ns=[2 * MS, -1, 4 * MS, -1])])
    found = history.reader.steps("r", 0, 1)
    assert found.columns["input_wait_s"] == Spread([0.003], [0.002], [0.004])
    later = history.reader.steps("r", 0, 4)
    assert later.columns["input_wait_s"].mean == [0.002, None, 0.004, None]


def test_epochs_and_samples(history: History) -> None:
    begins = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    commit(history, BEGIN_S, [], [batch(0, 10, epoch_start=begins, samples=[64] * 9 + [-1])])
    found = history.reader.steps("r", 0, 5)
    assert [epoch.step for epoch in found.epochs] == [0, 5]
    assert found.epochs[1].time_s == pytest.approx(BEGIN_S + 0.05)
    assert found.samples == [128, 128, 128, 128, 64]


def test_a_stretch_of_time_has_exactly_the_steps_that_began_in_it(history: History) -> None:
    for n in range(10):
        commit(history, BEGIN_S + n, [], [batch(10 * n, 10)])
    found = history.reader.steps("r", 0, 100, BEGIN_S + 0.245, BEGIN_S + 0.3801)
    assert found.bucket_steps == 1
    assert found.step == list(range(25, 39))
    assert history.reader.steps("r", 0, 100, BEGIN_S + 50) is None
    assert history.reader.steps("unknown-run", 0, 100) is None
