"""A mean since a moment: what a GPU did before its run began says nothing of the run."""

from __future__ import annotations

from gpuwatch.metrics import Sample
from gpuwatch_agent.runs.window import RecentSamples

SECOND = 1_000_000_000


def test_a_mean_counts_from_a_moment() -> None:
    node = RecentSamples()
    for second, used in enumerate((0.0, 0.0, 0.0, 0.8, 1.0)):
        node.remember([Sample("gpuwatch_gpu_utilization_ratio", used, ("0", "GPU-a"))], second * SECOND)
    assert node.mean("gpuwatch_gpu_utilization_ratio", "0", "GPU-a") == 0.36
    assert node.mean("gpuwatch_gpu_utilization_ratio", "0", "GPU-a", since_ns=3 * SECOND) == 0.9
    assert node.mean("gpuwatch_gpu_utilization_ratio", "0", "GPU-a", since_ns=9 * SECOND) is None
