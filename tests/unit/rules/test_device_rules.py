"""Rules about the device: each fires on its cause, stays quiet without it, abstains without its signal."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.rules.device import (
    host_bound,
    memory_creep,
    mfu_mismatch,
    phase_bound,
    sync_every_step,
    throttled,
    transfer_pcie,
)
from gpuwatch.diagnosis.rules.progress import hung
from gpuwatch.diagnosis.window import GpuFacts, MemoryTrend, Window
from gpuwatch.wire import Flops, Loader
from tests.unit.rules.windows import HEALTHY, STARVED, states, steps, window


def gpu(**facts: Any) -> GpuFacts:
    return GpuFacts("0", "GPU-a", **facts)


def on_device(
    host_wait_s: float = 0.0,
    drained: float | None = None,
    busy: float | None = None,
    read_back: float | None = None,
    kept_up: float | None = None,
) -> Window:
    """Return a run on the device's clock: 100 steps of 100 ms, and so much host wait in all of the time."""
    columns = steps(100, 0.001, 0.099)
    booked = states(columns, host_wait=host_wait_s)
    gpus = () if busy is None else (gpu(utilization_ratio=busy),)
    ends = {"drained_ratio": drained, "read_back_ratio": read_back, "kept_up_ratio": kept_up}
    return window(columns, states_s=booked, timeline="device", device="cuda", gpus=gpus, **ends)


def test_pinned_copies_at_the_bus_s_rate() -> None:
    loader = Loader(pin_memory=True, batch_bytes=600_000_000)
    copying = window(steps(50, 0.001, 0.060, transfer_s=0.039), loader=loader, device="cuda")
    finding = transfer_pcie(copying)
    assert finding is not None
    assert finding.ratio == pytest.approx(0.39)
    assert finding.evidence[1].value == pytest.approx(600e6 / 0.039)
    assert finding.predicted_speedup == pytest.approx(1.64)


def test_the_bus_is_quiet_for_slow_copies_and_abstains_where_the_batch_is_not_known() -> None:
    loader = Loader(pin_memory=True, batch_bytes=6 << 20)
    copying = window(steps(50, 0.001, 0.060, transfer_s=0.039), loader=loader, device="cuda")
    assert transfer_pcie(copying) is None
    assert transfer_pcie(replace(copying, loader=Loader(pin_memory=True))) is None
    assert transfer_pcie(replace(copying, loader=Loader(pin_memory=False, batch_bytes=600_000_000))) is None
    assert transfer_pcie(replace(HEALTHY, loader=Loader(pin_memory=True, batch_bytes=600_000_000))) is None


def test_a_device_that_idles_between_steps_waits_for_the_host() -> None:
    finding = host_bound(on_device(host_wait_s=2.5))
    assert finding is not None
    assert finding.ratio == pytest.approx(0.2)
    assert finding.predicted_speedup == pytest.approx(1.25)


def test_bubbles_within_compute_are_the_host_s_where_the_device_has_no_work_queued() -> None:
    finding = host_bound(on_device(kept_up=1.0, busy=0.4))
    assert finding is not None
    assert finding.ratio == pytest.approx(0.99 - 0.4)
    assert finding.predicted_speedup == pytest.approx(2.44)
    assert [evidence.what for evidence in finding.evidence] == ["kept up", "bubbles"]
    assert "the device idled between kernels for at least 60% of compute" in finding.evidence[1].text


def test_a_device_that_keeps_up_with_every_launch_is_never_called_healthy_without_a_driver_too() -> None:
    launch_bound = on_device(kept_up=0.98)
    found = diagnose(launch_bound)
    assert [(finding.cause, finding.predicted_speedup) for finding in found] == [("host_bound", None)]
    assert found[0].ratio == pytest.approx(0.23 * 0.99)
    verdict = give_verdict(launch_bound, found)
    assert (verdict.state, verdict.ratio) == ("host", pytest.approx(0.99 * 0.98))
    assert verdict.sentence.startswith(
        "host-bound: 99% of the time is compute, but the device runs each kernel as soon as it is launched"
    )


def test_the_host_is_quiet_when_it_runs_ahead_and_abstains_on_the_host_s_clock() -> None:
    assert host_bound(on_device(host_wait_s=0.5, kept_up=0.1, busy=0.4)) is None
    assert host_bound(on_device(kept_up=1.0, busy=0.95)) is None  # the driver sees kernels all the time
    assert host_bound(on_device(busy=0.4)) is None  # not measured
    assert host_bound(replace(on_device(host_wait_s=2.5), timeline="host")) is None


def test_a_device_that_is_busy_and_then_idles_at_every_step_is_waited_for() -> None:
    found = diagnose(on_device(host_wait_s=2.5, drained=1.0, busy=0.78, read_back=1.0))
    assert [(finding.cause, finding.root) for finding in found] == [
        ("sync_every_step", None),
        ("host_bound", "sync_every_step"),
    ]
    assert found[0].ratio == pytest.approx(0.2)


def test_syncs_are_quiet_with_run_ahead_or_bubbles_and_abstain_unless_looked_for() -> None:
    assert (
        sync_every_step(on_device(host_wait_s=2.5, drained=1.0, read_back=1.0)) is not None
    )  # no driver is needed for it
    assert sync_every_step(on_device(host_wait_s=2.5, drained=0.5, busy=0.78, read_back=1.0)) is None
    assert sync_every_step(on_device(host_wait_s=2.5, drained=1.0, busy=0.3, read_back=1.0)) is None
    assert sync_every_step(on_device(drained=1.0, busy=0.99, read_back=1.0)) is None
    assert (
        sync_every_step(on_device(host_wait_s=2.5, drained=1.0, busy=0.78, read_back=0.02)) is None
    )  # it logs, no more
    assert sync_every_step(on_device(host_wait_s=2.5, busy=0.78)) is None
    assert sync_every_step(on_device(host_wait_s=2.5, drained=1.0)) is None


def test_heat_is_a_warning_and_the_power_limit_is_not() -> None:
    hot = replace(HEALTHY, gpus=(gpu(throttled={"power": 1.0, "thermal": 0.8, "hardware": 0.0}),))
    finding = throttled(hot)
    assert finding is not None
    assert (finding.severity, finding.ratio) == ("warning", 0.8)
    assert "thermal" in finding.title
    capped = throttled(replace(HEALTHY, gpus=(gpu(throttled={"power": 1.0, "thermal": 0.0}),)))
    assert capped is not None and capped.severity == "info"


def test_throttling_is_quiet_when_rare_or_idle_and_abstains_when_not_reported() -> None:
    assert throttled(replace(HEALTHY, gpus=(gpu(throttled={"thermal": 0.2}),))) is None
    assert throttled(replace(STARVED, gpus=(gpu(throttled={"thermal": 1.0}),))) is None
    assert throttled(replace(HEALTHY, gpus=(gpu(),))) is None


def test_a_stalled_run_whose_gpu_spins_hangs() -> None:
    spinning = replace(
        HEALTHY, stalled_s=90.0, gpus=(gpu(utilization_ratio=1.0, power_watts=130.0, power_usual_watts=400.0),)
    )
    found = diagnose(spinning)
    assert [(finding.cause, finding.root) for finding in found][:2] == [("hung", None), ("stalled", "hung")]
    assert found[0].evidence[2].value == pytest.approx(130 / 400)


def test_hung_is_quiet_at_usual_power_and_abstains_without_a_baseline() -> None:
    busy = gpu(utilization_ratio=1.0, power_watts=390.0, power_usual_watts=400.0)
    assert hung(replace(HEALTHY, stalled_s=90.0, gpus=(busy,))) is None
    assert hung(replace(HEALTHY, gpus=(replace(busy, power_watts=130.0),))) is None  # it makes steps
    assert (
        hung(replace(HEALTHY, stalled_s=90.0, gpus=(replace(busy, power_watts=130.0, utilization_ratio=0.1),))) is None
    )
    assert hung(replace(HEALTHY, stalled_s=90.0, gpus=(replace(busy, power_usual_watts=None),))) is None


def creeping(**changes: Any) -> Window:
    trend = MemoryTrend(span_s=1200.0, rises=15, falls=0, growth_bytes=10 << 30, total_bytes=80 << 30)
    return replace(HEALTHY, gpus=(gpu(memory_used_bytes=40 << 30, memory_trend=replace(trend, **changes)),))


def test_memory_that_only_ever_rises() -> None:
    finding = memory_creep(creeping())
    assert finding is not None
    assert finding.ratio == pytest.approx(1 / 8)
    assert finding.evidence[2].value == pytest.approx(40 / 10 * 1200)  # seconds until it is full


def test_memory_is_quiet_when_it_falls_again_or_settles_and_abstains_without_a_trend() -> None:
    assert memory_creep(creeping(falls=1)) is None
    assert memory_creep(creeping(rises=3)) is None
    assert memory_creep(creeping(span_s=300.0)) is None
    assert memory_creep(creeping(growth_bytes=1 << 30)) is None
    assert memory_creep(replace(HEALTHY, gpus=(gpu(),))) is None


def test_mfu_mismatch_fires_both_ways_stays_quiet_and_abstains() -> None:
    busy = gpu(mfu_ratio=0.38, peak_flops=989.5e12)
    sparse = replace(HEALTHY, gpus=(busy,), flops=Flops(per_token=1e12, peak=1979e12), mfu_ratio=0.19)
    low = mfu_mismatch(sparse)
    assert low is not None and low.severity == "info" and low.ratio == pytest.approx(0.19)
    assert low.title == "the declared MFU of 19% contradicts the tensor cores' activity, which suggests about 38%"
    assert low.advice.startswith("set peak_flops to the dense peak")
    assert low.evidence[2].text == "peak_flops=1.979e+15; the dense 16-bit peak of this GPU's model is 9.895e+14"
    high = mfu_mismatch(replace(sparse, mfu_ratio=1.4))
    assert high is not None and high.advice.startswith("count the operations of one rank") and high.ratio == 1.0
    for quiet in (
        replace(sparse, mfu_ratio=0.24),
        replace(sparse, mfu_ratio=0.52),
        replace(sparse, mfu_ratio=None),
        replace(sparse, gpus=(replace(busy, mfu_ratio=None),)),
        replace(sparse, gpus=(replace(busy, peak_flops=None),)),
        replace(sparse, gpus=(busy, busy)),  # what is declared is of one device
        replace(sparse, gpus=()),
        replace(sparse, flops=None),
        replace(sparse, flops=Flops(per_token=1e12, peak=67e12)),  # 32-bit arithmetic without tensor cores
    ):
        assert mfu_mismatch(quiet) is None


def test_phase_bound_fires_stays_quiet_and_abstains() -> None:
    states = {"compute": 70.0, "other": 30.0}
    finding = phase_bound(Window(100.0, states, {"reward_model": 25.0}))
    assert finding is not None and (finding.ratio, finding.predicted_speedup) == (0.25, None)
    assert finding.advice.startswith("score whole batches")
    unknown = phase_bound(Window(100.0, states, {"curriculum": 25.0}))
    assert unknown is not None and "gpuwatch stacks" in unknown.advice
    assert phase_bound(Window(100.0, states, {"rollout": 19.0})) is None
    assert phase_bound(Window(100.0, states)) is None
    assert phase_bound(Window(0.0)) is None
