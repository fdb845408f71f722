"""A GPU whose clocks are throttled."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
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
    text = f"GPU {gpu} was throttled {percent(share)} of the time, reason {reason}"
    return Finding(
        cause="throttled",
        severity="info" if reason == "power" else "warning",
        title=f"the clocks of GPU {gpu} are throttled ({reason})",
        ratio=min(1.0, share),
        evidence=(Evidence(f"throttled by {reason}", share, "ratio", text),),
        advice=_ADVICE.get(reason, "see nvidia-smi -q -d PERFORMANCE"),
    )
