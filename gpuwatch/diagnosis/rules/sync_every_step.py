"""The host waits for the device at every step: `.item()`, `print(loss)`, `.cpu()`."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule, speedup_without
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE, HOST_WAIT


@rule(explains=("host_bound",), explained_by=(), stacks="training", alert=None, runbook="Findings")
def sync_every_step(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when nearly every step reads a result back from the device, ends with the device idle, and leaves it idle afterwards.

    A host that is merely slow leaves gaps within compute; one that only goes on working after its last launch reads nothing back.
    """
    drained, read, idle = window.drained_ratio, window.read_back_ratio, window.share(HOST_WAIT)
    if drained is None or read is None or len(window.steps) < thresholds.min_steps or window.timeline != "device":
        return None
    if min(drained, read) < thresholds.drained_share or idle < thresholds.host_wait_share:
        return None
    compute, utilization = window.share(COMPUTE), window.utilization
    if utilization is not None and compute - utilization >= thresholds.device_bubbles * max(compute, 1e-9):
        return None
    return Finding(
        cause="sync_every_step",
        severity="warning",
        title="the host waits for a result of the device at every step, and so cannot run ahead",
        ratio=idle,
        evidence=(
            Evidence("read back", read, "ratio", f"{percent(read)} of the steps read a result back from the device (.item(), .cpu(), print)"),
            Evidence("drained", drained, "ratio", f"{percent(drained)} of the steps ended with the device idle"),
            Evidence("host wait", idle, "ratio", f"the device then idled {percent(idle)} of the time"),
        ),
        advice="read results every N steps instead of at every step (.item(), print(loss), .cpu()), and keep running means on the device",
        predicted_speedup=speedup_without(idle),
    )  # fmt: skip
