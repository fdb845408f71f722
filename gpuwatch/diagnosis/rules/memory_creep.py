"""Device memory that keeps growing: out of memory after hours."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent, size


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="Findings")
def memory_creep(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a GPU's used memory has risen again and again over many minutes, without ever falling.

    torch's allocator keeps what it has, so that use rises in a few steps at first and then stays: only growth that goes on counts.
    """
    for gpu in window.gpus:
        trend = gpu.memory_trend
        if trend is None or trend.total_bytes <= 0 or trend.falls or trend.rises < thresholds.memory_creep_rises:
            continue
        share = trend.growth_bytes / trend.total_bytes
        if trend.span_s < thresholds.memory_creep_s or share < thresholds.memory_creep_share:
            continue
        grown = f"GPU {gpu.gpu} uses {size(trend.growth_bytes)} more than {duration(trend.span_s)} ago: {trend.rises} rises, no fall"
        evidence = [
            Evidence("growth", trend.growth_bytes, "bytes", grown),
            Evidence("share", share, "ratio", f"the growth is {percent(share)} of its memory"),
        ]
        if gpu.memory_used_bytes is not None:
            until_s = (trend.total_bytes - gpu.memory_used_bytes) / (trend.growth_bytes / trend.span_s)
            evidence.append(Evidence("full in", until_s, "s", f"at this rate it is full in {duration(until_s)}"))
        return Finding(
            cause="memory_creep",
            severity="warning",
            title=f"the memory use of GPU {gpu.gpu} keeps growing",
            ratio=min(1.0, share),
            evidence=tuple(evidence),
            advice="find what keeps tensors alive: add up loss.item() instead of loss, detach() what is stored, clear lists of outputs",
        )
    return None
