"""The device waits for host code, within the step or after it."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE, HOST_WAIT

LEAST_IDLE = 0.23
"""Lowest idle share of compute, on recorded GPUs, of a device that kept up with every launch: at stake where no driver reports one."""


@rule(
    explains=(),
    explained_by=(),
    stacks="training",
    alert=None,
    runbook="Findings",
    delays_rank="host",
)
def host_bound(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the device idles between steps, or runs each kernel as soon as it is launched, so that no work is queued.

    No event shows how long it then idles between kernels: what the driver sees of it is a lower bound.
    """
    if window.timeline != "device" or len(window.steps) < thresholds.min_device_steps:
        return None
    idle, compute, kept_up = window.share(HOST_WAIT), window.share(COMPUTE), window.kept_up_ratio
    evidence, lost = [], 0.0
    if idle >= thresholds.host_wait_share:
        lost = idle
        text = f"the device idled {percent(idle)} of the time while the host did something other than fetch a batch"
        evidence.append(Evidence("host wait", idle, "ratio", text))
    if compute >= 0.5 and kept_up is not None and kept_up >= thresholds.kept_up_share:
        bubbles = None if window.utilization is None else max(0.0, compute - window.utilization)
        if bubbles is None or bubbles >= thresholds.device_bubbles * compute:
            text = f"in {percent(kept_up)} of the steps the device ran each kernel as soon as it was launched: no work was queued"
            evidence.append(Evidence("kept up", kept_up, "ratio", text))
        if bubbles is not None and bubbles >= thresholds.device_bubbles * compute:
            lost += bubbles
            text = f"by the driver's utilisation the device idled between kernels for at least {percent(bubbles / compute)} of compute"
            evidence.append(Evidence("bubbles", bubbles, "ratio", text))
    if not evidence:
        return None
    lost = min(lost, 0.99)
    return Finding(
        cause="host_bound",
        severity="critical" if lost >= thresholds.input_share_critical else "warning",
        title="the device waits for host code",
        ratio=lost or LEAST_IDLE * compute,
        evidence=tuple(evidence),
        advice="launch more work at a time (torch.compile, CUDA graphs, a fused optimizer, a larger batch), and move work out of the "
        "Python loop (logging, metrics, sleeps)",
        predicted_speedup=round(1 / (1 - lost), 2) if lost else None,
    )  # fmt: skip
