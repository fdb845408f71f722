"""A mean since a moment: what a GPU did before its run began says nothing of the run."""

from __future__ import annotations

import pynvml

from gpuwatch.diagnosis.rules.device import throttled
from gpuwatch.diagnosis.window import GpuFacts
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.nvml import throttle_values
from gpuwatch_agent.runs.window import RecentSamples
from tests.unit.rules.windows import HEALTHY, replace

SECOND = 1_000_000_000


def test_a_mean_counts_from_a_moment() -> None:
    node = RecentSamples()
    for second, used in enumerate((0.0, 0.0, 0.0, 0.8, 1.0)):
        node.remember([Sample("gpuwatch_gpu_utilization_ratio", used, ("0", "GPU-a"))], second * SECOND)
    assert node.mean("gpuwatch_gpu_utilization_ratio", "0", "GPU-a") == 0.36
    assert node.mean("gpuwatch_gpu_utilization_ratio", "0", "GPU-a", since_ns=3 * SECOND) == 0.9
    assert node.mean("gpuwatch_gpu_utilization_ratio", "0", "GPU-a", since_ns=9 * SECOND) is None


def test_a_gpu_at_its_power_limit_or_with_clocks_that_somebody_set_is_no_fault() -> None:
    """The driver's own reasons were among the causes.

    Each GPU at full load, or with `nvidia-smi -ac`, got a warning (GpuThrottled).
    """
    found = {}
    for name in ("SwPowerCap", "ApplicationsClocksSetting", "SwThermalSlowdown"):
        node = RecentSamples()
        for second in range(10):
            values = throttle_values(getattr(pynvml, f"nvmlClocksEventReason{name}"))
            node.remember([Sample(each, value, ("0", "GPU-a", *more)) for each, value, more in values], second * SECOND)
        finding = throttled(replace(HEALTHY, gpus=(GpuFacts("0", "GPU-a", throttled=node.throttled("0", "GPU-a")),)))
        found[name] = None if finding is None else (finding.severity, finding.title)
    assert found == {
        "SwPowerCap": ("info", "the clocks of GPU 0 are throttled (power)"),
        "ApplicationsClocksSetting": None,
        "SwThermalSlowdown": ("warning", "the clocks of GPU 0 are throttled (thermal)"),
    }
    assert RecentSamples().throttled("0", "GPU-a") is None, "not measured"
