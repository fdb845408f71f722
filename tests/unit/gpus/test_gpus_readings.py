"""Power and memory of a GPU over longer than a window, on a clock that the test moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwatch import wire
from gpuwatch.diagnosis.rules.device import host_bound
from gpuwatch.diagnosis.window import HostFacts, MemoryTrend
from gpuwatch.metrics import Sample
from gpuwatch_agent.gpus import GpuAccount
from gpuwatch_agent.gpus.readings import GpuTrends, dense_peak, gpu_facts
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import Run
from gpuwatch_agent.runs.timeline import read_columns
from gpuwatch_agent.runs.window import RecentSamples, run_window
from tests.unit.agent.hooks import BOOT, MS, FakeHook, wall_s

S = 1_000_000_000


def held(run: Run | None) -> GpuAccount:
    account = GpuAccount("0", "GPU-a", 0)
    account.run = run
    return account


def step(run: Run, end_ns: int) -> None:
    columns = {"start_ns": end_ns, "data_wait_ns": 0, "transfer_ns": 0, "compute_ns": 0}
    message = read_columns({name: wire.pack([v]) for name, v in columns.items()}, 0)
    run.steps = run.steps.followed_by(message)


def sample(trends: GpuTrends, account: GpuAccount, now_ns: int, **figures: float) -> RecentSamples:
    node = RecentSamples()
    node.remember([Sample(f"gpuwatch_gpu_{name}", value, ("0", "GPU-a")) for name, value in figures.items()], now_ns)
    trends.sample([account], node, now_ns)
    return node


def test_usual_power_is_that_of_seconds_with_steps() -> None:
    trends, run = GpuTrends(), Run("run-a", 0, "boot")
    account = held(run)
    for second in range(40):
        step(run, second * S)
        sample(trends, account, second * S, power_watts=400.0)
        if second == 20:
            assert trends.median_watts("GPU-a") is None  # too early to call anything usual
    for second in range(46, 100):
        sample(trends, account, second * S, power_watts=100.0)  # it stands still
    assert trends.median_watts("GPU-a") == 400.0


H200 = dense_peak("NVIDIA H200")


def test_mfu_is_estimated_from_half_a_minute_of_steps_on() -> None:
    trends, run = GpuTrends(), Run("run-a", 0, "boot", gpus={"GPU-a": "NVIDIA H200"})
    account = held(run)
    for second in range(90):
        if second < 40:
            step(run, second * S)
        tensor = 0.4 if second < 40 else 0.01  # an evaluation: no steps
        figures = {"tensor_active_ratio": tensor, "sm_clock_hertz": 1.83e9, "utilization_ratio": 0.9}
        node = sample(trends, account, second * S, **figures)
        if second == 28:
            assert trends.mfu("GPU-a", H200) is None
        if second == 39:
            assert trends.mfu("GPU-a", H200) == pytest.approx(0.4, rel=0.002)
    assert trends.mfu("GPU-a", H200) == pytest.approx((40 * 0.4 + 4 * 0.01) / 44, rel=0.002)
    facts = gpu_facts(account, node, 90 * S, trends)
    assert facts.mfu_ratio == trends.mfu("GPU-a", H200) and facts.peak_flops == 989.5e12
    run.gpus = {"GPU-a": "NVIDIA GeForce RTX 4090"}
    facts = gpu_facts(account, node, 90 * S, trends)
    assert facts.mfu_ratio is None and facts.peak_flops is None


@pytest.mark.parametrize("missing", ["tensor_active_ratio", "sm_clock_hertz", "utilization_ratio"])
def test_mfu_is_not_estimated_without_its_parts(missing: str) -> None:
    """No GPM before Hopper; and no utilisation of a GPU split by MIG, whose activity is that of all its instances."""
    trends, run = GpuTrends(), Run("run-a", 0, "boot")
    names = {"tensor_active_ratio", "sm_clock_hertz", "utilization_ratio"} - {missing}
    for second in range(40):
        step(run, second * S)
        sample(trends, held(run), second * S, **dict.fromkeys(names, 1.0))
    assert trends.mfu("GPU-a", H200) is None


def test_mfu_is_that_of_the_last_minute_and_0_for_idle_tensor_cores() -> None:
    trends, run = GpuTrends(), Run("run-a", 0, "boot")
    for second in range(100):
        step(run, second * S)
        tensor = 0.5 if second < 40 else 0.0
        sample(trends, held(run), second * S, tensor_active_ratio=tensor, sm_clock_hertz=2e9, utilization_ratio=1.0)
    assert trends.mfu("GPU-a", H200) == 0.0


def test_memory_is_looked_at_once_a_minute() -> None:
    trends, run = GpuTrends(), Run("run-a", 0, "boot")
    account = held(run)
    for second in range(0, 601, 10):
        sample(trends, account, second * S, memory_used_bytes=1000 + second // 60 * 10)
    assert trends.memory("GPU-a", 2000) == MemoryTrend(600.0, 10, 0, 100, 2000)
    assert trends.memory("GPU-a", None) is None


def test_another_run_starts_over_and_a_lost_gpu_is_forgotten() -> None:
    trends, run = GpuTrends(), Run("run-a", 0, "boot")
    for second in range(0, 200, 10):
        step(run, second * S)
        sample(trends, held(run), second * S, power_watts=400.0, memory_used_bytes=1000 + second)
    assert trends.memory("GPU-a", 2000) is not None
    sample(trends, held(Run("run-b", 0, "boot")), 210 * S, memory_used_bytes=5000)
    assert trends.memory("GPU-a", 2000) is None
    trends.sample([], RecentSamples(), 211 * S)
    assert trends._trends == {}


def test_a_gpu_that_no_run_holds_has_no_trend() -> None:
    trends = GpuTrends()
    for second in range(0, 600, 60):
        sample(trends, held(None), second * S, power_watts=400.0, memory_used_bytes=second)
    assert trends.memory("GPU-a", 2000) is None and trends.median_watts("GPU-a") is None


def test_a_gpu_that_idles_while_a_checkpoint_is_written_does_not_idle_in_compute(tmp_path: Path) -> None:
    """A GPU 95% busy in its steps, and a checkpoint of 16 s: "idled between kernels for at least 100% of compute".

    The states are those of a minute, the driver's utilisation was that of its last quarter.
    """
    hook, run, node, trends = FakeHook(1000 * S), Run("run-a", 0, BOOT), RecentSamples(), GpuTrends()
    account = held(run)
    run.apply(replace(hook.hello(), timeline="device", device="cuda"), hook.at_ns, wall_s(hook.at_ns))
    for second in range(76):
        state = "startup" if second < 15 else "compute" if second < 60 else "checkpoint"
        for _ in range(10):
            if state == "compute":
                hook.step(0, 100 * MS)
            else:
                hook.spend(state, 100 * MS)
        message = hook.message()
        measured = replace(message.totals, device_steps=hook.steps, kept_up_steps=hook.steps)
        run.apply(replace(message, totals=measured), hook.at_ns, wall_s(hook.at_ns))
        run.remember(hook.at_ns)
        used = Sample("gpuwatch_gpu_utilization_ratio", 0.95 if state == "compute" else 0.0, ("0", "GPU-a"))
        node.remember([used], hook.at_ns)
        trends.sample([account], node, hook.at_ns)
        if second in (40, 75):  # of which the first 15 were start-up, which no share counts
            facts = gpu_facts(account, node, hook.at_ns, trends)
            window = run_window(run, HostFacts(), (facts,), WorkerWatch(ProcessTable(tmp_path)), hook.at_ns, ())
            assert window.share("compute") == pytest.approx(1.0 if second == 40 else 44 / 60, abs=0.02)
            assert host_bound(window) is None
    assert facts.utilization_ratio == 0.0, "of a run that hangs the last seconds count"
