"""The training's own GPU as the driver sees it, read by the hook with real pynvml on a library of recorded machines."""

from __future__ import annotations

from typing import Any

import pytest

from gpuwatch.hook.evidence import OwnGpu
from tests.nvml.fake import FakeGpu, FakeNvml, recorded
from tests.unit.hook.torch.test_hook_device import Rig


def test_the_mean_of_the_readings_is_given_once_there_are_enough(nvml: FakeNvml) -> None:
    gpu = FakeGpu(utilization_percent=40)
    nvml.write([gpu])
    own = OwnGpu(gpu.uuid)
    own.sample()
    own.sample()
    assert own.facts() == ()
    nvml.write([FakeGpu(uuid=gpu.uuid, utilization_percent=100)])
    own.sample()
    (facts,) = own.facts()
    assert facts.utilization_ratio == pytest.approx(0.6)
    assert facts.uuid == gpu.uuid


@pytest.mark.parametrize("machine", ["h100-mig", "no such GPU"])
def test_a_gpu_without_a_utilization_gives_nothing(nvml: FakeNvml, machine: str) -> None:
    gpu = recorded("h100-mig", "load") if machine == "h100-mig" else FakeGpu()
    nvml.write([gpu])
    own = OwnGpu(gpu.uuid if machine == "h100-mig" else "GPU-00000000-0000-0000-0000-000000000000")
    for _ in range(5):
        own.sample()
    assert own.facts() == ()


def test_a_launch_bound_run_knows_how_much_its_gpu_idles_without_an_agent(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(utilization_percent=42)
    nvml.write([gpu])
    rig = Rig(monkeypatch)
    rig.watch._recorder.timeline.uuid = gpu.uuid  # type: ignore[union-attr]
    accounts = rig.watch._publisher.accounts
    for _ in rig.watch.steps(rig.batches([0.0] * 260)):
        rig.train(host_ms=20, launch_ms=20)
        rig.watch._publisher.report(closed=False)
        accounts.sample_host()
    rig.states()
    report: Any = rig.watch.report()
    assert report.verdict.state == "host"
    (finding,) = report.findings
    assert finding.cause == "host_bound"
    assert "the device idled between kernels for at least 58% of compute" in finding.evidence[-1].text
    assert finding.predicted_speedup == pytest.approx(1 / 0.42, abs=0.02)
