"""The device waits for the host's code, within the step or after it."""

from __future__ import annotations

from gpuwatch.finding import Evidence, Finding
from gpuwatch.ledger import COMPUTE, HOST_WAIT
from gpuwatch.thresholds import THRESHOLDS
from gpuwatch.units import percent
from gpuwatch.window import Window


def host_bound(window: Window) -> Finding | None:
    """Found when the device's own timeline has it idle between steps, or drained while the driver sees few kernels within compute."""
    if window.timeline != "device" or len(window.steps) < THRESHOLDS.min_steps:
        return None
    idle, compute = window.share(HOST_WAIT), window.share(COMPUTE)
    evidence, lost = [], 0.0
    if idle >= THRESHOLDS.host_wait_share:
        lost = idle
        text = f"the device idled {percent(idle)} of the time while the host did something else than fetch"
        evidence.append(Evidence("host wait", idle, "ratio", text))
    readings = [gpu.utilization_ratio for gpu in window.gpus if gpu.utilization_ratio is not None]
    bubbles = compute - min(readings) if readings else 0.0
    share = window.drained_ratio
    full_of_bubbles = compute >= 0.5 and bubbles >= THRESHOLDS.device_bubbles * compute
    if full_of_bubbles and share is not None and share >= THRESHOLDS.drained_share:
        lost += bubbles
        seen = f"the driver sees kernels {percent(min(readings))} of the time, in which compute is {percent(compute)}"
        ends = f"at the end of {percent(share)} of the steps the device had nothing left to do"
        evidence.append(Evidence("bubbles", bubbles, "ratio", seen))
        evidence.append(Evidence("drained", share, "ratio", ends))
    if not evidence:
        return None
    lost = min(lost, 0.99)
    return Finding(
        cause="host_bound",
        severity="critical" if lost >= THRESHOLDS.input_share_critical else "warning",
        title="the device waits for the host's code",
        ratio=lost,
        evidence=tuple(evidence),
        advice=(
            "take work out of the loop's Python between backward and the next batch (logging, metrics, sleeps), then launch more at a time: "
            "larger batch, torch.compile, CUDA graphs, fused optimizer"
        ),
        predicted_speedup=round(1 / (1 - lost), 2),
    )  # fmt: skip
