"""The host waits for the device at every step: `.item()`, `print(loss)`, `.cpu()`."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE, HOST_WAIT


def sync_every_step(window: Window) -> Finding | None:
    """Found when at nearly every step a result is read back from the device, which has drained by the step's end and idles after it.

    A host that is merely slow leaves bubbles within compute; one that only works on after its last launch reads nothing back.
    """
    share, read, idle = window.drained_ratio, window.read_back_ratio, window.share(HOST_WAIT)
    if share is None or read is None or len(window.steps) < THRESHOLDS.min_steps or window.timeline != "device":
        return None
    if min(share, read) < THRESHOLDS.drained_share or idle < THRESHOLDS.host_wait_share:
        return None
    compute = window.share(COMPUTE)
    readings = [gpu.utilization_ratio for gpu in window.gpus if gpu.utilization_ratio is not None]
    if readings and compute - min(readings) >= THRESHOLDS.device_bubbles * max(compute, 1e-9):
        return None
    return Finding(
        cause="sync_every_step",
        severity="warning",
        title="the host waits for the device at every step, and so cannot run ahead",
        ratio=idle,
        evidence=(
            Evidence("read back", read, "ratio", f"in {percent(read)} of the steps a result was read back from the device (.item(), .cpu(), print)"),
            Evidence("drained", share, "ratio", f"at the end of {percent(share)} of the steps the device had nothing left to do"),
            Evidence("host wait", idle, "ratio", f"it then idled: {percent(idle)} of the time"),
        ),
        advice="read results every N steps instead of at each (.item(), print(loss), .cpu()), and keep running means on the device",
        predicted_speedup=round(1 / (1 - idle), 2) if idle < 0.99 else None,
    )  # fmt: skip
