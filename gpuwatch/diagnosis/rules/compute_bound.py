"""The step itself takes nearly all of the time, on a device whose use no driver confirms (a CPU)."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE


def compute_bound(window: Window) -> Finding | None:
    """Found when compute is nearly all of the ledger of a training on the CPU."""
    share = window.share(COMPUTE)
    if (
        share < THRESHOLDS.saturated_share
        or window.device != "cpu"
        or window.gpus
        or len(window.steps) < THRESHOLDS.min_steps
    ):
        return None
    return Finding(
        cause="compute_bound",
        severity="info",
        title="the step itself takes the time: the input keeps up",
        ratio=share,
        evidence=(Evidence("compute", share, "ratio", f"compute takes {percent(share)} of the time"),),
        advice="stop tuning the loader: a faster device, torch.compile or lower precision make the step faster",
    )
