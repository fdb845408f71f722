"""A GPU whose clocks are held down."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE

_ADVICE = {
    "thermal": "it is too hot: look at fans, air flow and neighbours; nothing in the program will help",
    "hardware": "a hardware slowdown or power brake: have the power supply and the cabling looked at",
    "power": "it runs at its power limit, which is usual at full load: raise the cap (nvidia-smi -pl) where one was set",
}


def throttled(window: Window) -> Finding | None:
    """Found for the run's GPU that was held down for longest, when that is half of the time and the GPU has work."""
    if window.share(COMPUTE) < 0.5:
        return None
    found = [
        (share, gpu.gpu, reason)
        for gpu in window.gpus
        for reason, share in (gpu.throttled or {}).items()
        if share >= THRESHOLDS.throttled_share
    ]
    if not found:
        return None
    order = list(_ADVICE)
    share, gpu, reason = min(found, key=lambda each: (order.index(each[2]) if each[2] in order else 0, -each[0]))
    return Finding(
        cause="throttled",
        severity="info" if reason == "power" else "warning",
        title=f"GPU {gpu}'s clocks are held down ({reason})",
        ratio=min(1.0, share),
        evidence=(Evidence(f"throttled by {reason}", share, "ratio", f"GPU {gpu}: {percent(share)} of the time, reason {reason}"),),
        advice=_ADVICE.get(reason, "see nvidia-smi -q -d PERFORMANCE"),
    )  # fmt: skip
