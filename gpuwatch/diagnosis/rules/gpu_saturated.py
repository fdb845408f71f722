"""The GPU is busy all the time: good."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE


def gpu_saturated(window: Window) -> Finding | None:
    """Found when compute is nearly all of the ledger and the driver calls the run's GPUs busy as well."""
    share = window.share(COMPUTE)
    readings = [gpu.utilization_ratio for gpu in window.gpus if gpu.utilization_ratio is not None]
    if share < THRESHOLDS.saturated_share or not readings or min(readings) < THRESHOLDS.gpu_busy:
        return None
    return Finding(
        cause="gpu_saturated",
        severity="info",
        title="the GPU is busy: the input keeps up",
        ratio=share,
        evidence=(
            Evidence("compute", share, "ratio", f"compute takes {percent(share)} of the time"),
            Evidence("utilization", min(readings), "ratio", f"the driver sees the GPU busy {percent(min(readings))} of the time"),
        ),
        advice="stop tuning the loader: mixed precision, channels_last, torch.compile or a larger GPU make the step faster",
    )  # fmt: skip
