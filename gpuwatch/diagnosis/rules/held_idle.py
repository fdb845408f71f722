"""A GPU that a process holds without using it."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent


@rule(explains=(), explained_by=(), stacks=None, alert="GpuHeldIdle", runbook="GpuHeldIdle")
def held_idle(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found for the GPU that has been held idle the longest, if that is long enough."""
    idle = [(gpu.idle_s, gpu) for gpu in window.gpus if gpu.idle_s is not None and gpu.idle_s >= thresholds.gpu_idle_s]
    if not idle:
        return None
    idle_s, gpu = max(idle, key=lambda pair: pair[0])
    evidence = [Evidence("idle", idle_s, "s", f"GPU {gpu.gpu} has been held without work for {duration(idle_s)}")]
    if gpu.owner:
        evidence.append(Evidence("owner", 1, "", f"held by {gpu.owner}"))
    if gpu.utilization_ratio is not None:
        text = f"its utilisation is {percent(gpu.utilization_ratio)}"
        evidence.append(Evidence("utilization", gpu.utilization_ratio, "ratio", text))
    return Finding(
        cause="held_idle",
        severity="warning",
        title=f"GPU {gpu.gpu} is held but idle",
        ratio=1.0,
        evidence=tuple(evidence),
        advice="end the process that holds it, or release the GPU to the scheduler",
        gpu=gpu.uuid,
    )
