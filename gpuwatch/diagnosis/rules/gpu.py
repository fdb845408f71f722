"""What the driver shows of a GPU: throttled clocks, a holder that does not use it, memory that grows."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, measured, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent, size
from gpuwatch.ledger.states import COMPUTE

_ADVICE = {
    "thermal": "check fans, air flow and neighbouring GPUs: it is too hot, and no change to the program helps",
    "hardware": "have the power supply and the cabling checked: the driver reports a hardware slowdown or power brake",
    "power": "raise the power limit (nvidia-smi -pl) if one was set: at full load a GPU normally runs at its limit",
}


@rule(
    explains=("gpu_saturated",),
    explained_by=(),
    stacks=None,
    alert="GpuThrottled",
    runbook="GpuThrottled",
    delays_rank="host",
)
def throttled(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found for the run's GPU that was throttled the most, if that is half of the time and the GPU has work."""
    if window.share(COMPUTE) < 0.5:
        return None
    found = [
        (share, gpu.gpu, reason)
        for gpu in window.gpus
        for reason, share in (gpu.throttled or {}).items()
        if share >= thresholds.throttled_share
    ]
    if not found:
        return None
    order = list(_ADVICE)
    share, gpu, reason = min(found, key=lambda each: (order.index(each[2]) if each[2] in order else 0, -each[0]))
    text = f"GPU {gpu} was throttled {{}} of the time, reason {reason}"
    return Finding(
        cause="throttled",
        severity="info" if reason == "power" else "warning",
        title=f"the clocks of GPU {gpu} are throttled ({reason})",
        ratio=min(1.0, share),
        evidence=tuple(measured(f"throttled by {reason}", share, text)),
        advice=_ADVICE.get(reason, "see nvidia-smi -q -d PERFORMANCE"),
    )


@rule(explains=(), explained_by=(), stacks=None, alert="GpuHeldIdle", runbook="GpuHeldIdle")
def held_idle(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found for the GPU that has been held idle the longest, if that is long enough."""
    idle = [(gpu.idle_s, gpu) for gpu in window.gpus if gpu.idle_s is not None and gpu.idle_s >= thresholds.gpu_idle_s]
    if not idle:
        return None
    idle_s, gpu = max(idle, key=lambda pair: pair[0])
    return Finding(
        cause="held_idle",
        severity="warning",
        title=f"GPU {gpu.gpu} is held but idle",
        ratio=1.0,
        evidence=(
            Evidence("idle", idle_s, "s", f"GPU {gpu.gpu} has been held without work for {duration(idle_s)}"),
            *([Evidence("owner", 1, "", f"held by {gpu.owner}")] if gpu.owner else []),
            *measured("utilization", gpu.utilization_ratio, "its utilisation is {}"),
        ),
        advice="end the process that holds it, or release the GPU to the scheduler",
        gpu=gpu.uuid,
    )


@rule(explains=(), explained_by=(), stacks=None, alert="RunInefficient", runbook="RunInefficient")
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
