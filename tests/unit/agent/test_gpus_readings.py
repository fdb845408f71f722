"""Power and memory of a GPU over longer than a window, on a clock that the test moves."""

from __future__ import annotations

from gpuwatch import wire
from gpuwatch.diagnosis.window import MemoryTrend
from gpuwatch_agent.gpus import GpuAccount
from gpuwatch_agent.gpus.readings import GpuTrends
from gpuwatch_agent.runs import Run
from gpuwatch_agent.runs.timeline import read_columns
from gpuwatch_agent.runs.window import RecentSamples

S = 1_000_000_000


def held(run: Run | None) -> GpuAccount:
    account = GpuAccount("0", "GPU-a", 0)
    account.run = run
    return account


def step(run: Run, end_ns: int) -> None:
    columns = {"start_ns": end_ns, "data_wait_ns": 0, "transfer_ns": 0, "compute_ns": 0}
    run.steps = run.steps.followed_by(read_columns({name: wire.pack([v]) for name, v in columns.items()}, 0))


def test_usual_power_is_that_of_seconds_with_steps() -> None:
    trends, run = GpuTrends(), Run("run-a", 0, "boot")
    account = held(run)
    for second in range(40):
        step(run, second * S)
        trends.update(account, 400.0, None, second * S)
        if second == 20:
            assert trends.median_watts("GPU-a") is None  # too early to call anything usual
    for second in range(46, 100):
        trends.update(account, 100.0, None, second * S)  # it stands still
    assert trends.median_watts("GPU-a") == 400.0


def test_memory_is_looked_at_once_a_minute() -> None:
    trends, run = GpuTrends(), Run("run-a", 0, "boot")
    account = held(run)
    for second in range(0, 601, 10):
        trends.update(account, None, 1000 + second // 60 * 10, second * S)
    assert trends.memory("GPU-a", 2000) == MemoryTrend(600.0, 10, 0, 100, 2000)
    assert trends.memory("GPU-a", None) is None


def test_another_run_begins_anew_and_a_lost_gpu_is_forgotten() -> None:
    trends, run = GpuTrends(), Run("run-a", 0, "boot")
    for second in range(0, 200, 10):
        step(run, second * S)
        trends.update(held(run), 400.0, 1000 + second, second * S)
    assert trends.memory("GPU-a", 2000) is not None
    trends.update(held(Run("run-b", 0, "boot")), None, 5000, 210 * S)
    assert trends.memory("GPU-a", 2000) is None
    trends.sample([], RecentSamples(), 211 * S)
    assert trends._trends == {}


def test_a_gpu_that_no_run_holds_has_no_trend() -> None:
    trends = GpuTrends()
    for second in range(0, 600, 60):
        trends.update(held(None), 400.0, second, second * S)
    assert trends.memory("GPU-a", 2000) is None and trends.median_watts("GPU-a") is None
