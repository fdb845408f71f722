"""The device waits for the host's code, within the step or after it."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE, HOST_WAIT

LEAST_IDLE = 0.23
"""Share of compute that a device which kept up with every launch was idle at least, on recorded GPUs: what is at stake where no driver tells."""


def host_bound(window: Window) -> Finding | None:
    """Found when the device idles between steps, or runs each kernel as the host launches it, so that it has no work queued.

    How long it then idles between kernels, no event tells: what the driver sees of it is a lower bound.
    """
    if window.timeline != "device" or len(window.steps) < THRESHOLDS.min_device_steps:
        return None
    idle, compute, kept_up = window.share(HOST_WAIT), window.share(COMPUTE), window.kept_up_ratio
    evidence, lost = [], 0.0
    if idle >= THRESHOLDS.host_wait_share:
        lost = idle
        text = f"the device idled {percent(idle)} of the time while the host did something else than fetch"
        evidence.append(Evidence("host wait", idle, "ratio", text))
    if compute >= 0.5 and kept_up is not None and kept_up >= THRESHOLDS.kept_up_share:
        readings = [gpu.utilization_ratio for gpu in window.gpus if gpu.utilization_ratio is not None]
        bubbles = max(0.0, compute - min(readings)) if readings else None
        if bubbles is None or bubbles >= THRESHOLDS.device_bubbles * compute:
            text = (
                f"in {percent(kept_up)} of the steps the device ran each kernel as it was launched, with no work queued"
            )
            evidence.append(Evidence("kept up", kept_up, "ratio", text))
        if bubbles is not None and bubbles >= THRESHOLDS.device_bubbles * compute:
            lost += bubbles
            text = f"of compute, at least {percent(bubbles / compute)} the device stood idle between kernels, as the driver sees it"
            evidence.append(Evidence("bubbles", bubbles, "ratio", text))
    if not evidence:
        return None
    lost = min(lost, 0.99)
    at_stake = lost or LEAST_IDLE * compute
    return Finding(
        cause="host_bound",
        severity="critical" if lost >= THRESHOLDS.input_share_critical else "warning",
        title="the device waits for the host's code",
        ratio=at_stake,
        evidence=tuple(evidence),
        advice=(
            "launch more at a time: torch.compile, CUDA graphs, a fused optimizer, a larger batch; and take work out of the loop's Python "
            "(logging, metrics, sleeps)"
        ),
        predicted_speedup=round(1 / (1 - lost), 2) if lost else None,
    )  # fmt: skip
