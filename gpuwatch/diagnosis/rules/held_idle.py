"""A GPU that a process holds without using it."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration


def held_idle(window: Window) -> Finding | None:
    """Found for the GPU that has been held idle for longest, when that is long enough."""
    idle = [gpu for gpu in window.gpus if gpu.idle_s is not None and gpu.idle_s >= THRESHOLDS.gpu_idle_s]
    if not idle:
        return None
    gpu = max(idle, key=lambda each: each.idle_s or 0.0)
    assert gpu.idle_s is not None
    evidence = [
        Evidence("idle", gpu.idle_s, "s", f"GPU {gpu.gpu} has been held without work for {duration(gpu.idle_s)}")
    ]
    if gpu.owner:
        evidence.append(Evidence("owner", 1, "", f"held by {gpu.owner}"))
    if gpu.utilization_ratio is not None:
        evidence.append(
            Evidence("utilization", gpu.utilization_ratio, "ratio", f"utilisation {gpu.utilization_ratio:.0%}")
        )
    return Finding(
        cause="held_idle",
        severity="warning",
        title=f"GPU {gpu.gpu} is held but idle",
        ratio=1.0,
        evidence=tuple(evidence),
        advice="end the process that holds it, or give the GPU back to the scheduler",
        gpu=gpu.uuid,
    )
