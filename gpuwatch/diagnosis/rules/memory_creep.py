"""Device memory that grows and grows: out of memory after hours."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent, size


def memory_creep(window: Window) -> Finding | None:
    """Found when a GPU's used memory has only ever risen, again and again, over many minutes.

    torch's allocator keeps what it has, so that use rises in a few steps at first and then stays: it is going on that tells.
    """
    for gpu in window.gpus:
        trend = gpu.memory_trend
        if trend is None or trend.total_bytes <= 0 or trend.falls or trend.rises < THRESHOLDS.memory_creep_rises:
            continue
        share = trend.growth_bytes / trend.total_bytes
        if trend.span_s < THRESHOLDS.memory_creep_s or share < THRESHOLDS.memory_creep_share:
            continue
        left = trend.total_bytes - (gpu.memory_used_bytes or 0)
        evidence = [
            Evidence("growth", trend.growth_bytes, "bytes", f"GPU {gpu.gpu}: {size(trend.growth_bytes)} more in {duration(trend.span_s)}, {trend.rises} rises and no fall"),
            Evidence("share", share, "ratio", f"{percent(share)} of its memory"),
        ]  # fmt: skip
        if gpu.memory_used_bytes is not None:
            until_s = left / (trend.growth_bytes / trend.span_s)
            evidence.append(Evidence("full in", until_s, "s", f"at this rate it is full in {duration(until_s)}"))
        return Finding(
            cause="memory_creep",
            severity="warning",
            title=f"the memory of GPU {gpu.gpu} grows without end",
            ratio=min(1.0, share),
            evidence=tuple(evidence),
            advice="something keeps tensors alive: add up loss.item() instead of loss, detach() what is stored, clear lists of outputs",
        )
    return None
