"""The GPU is busy all the time: good."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="Findings")
def gpu_saturated(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when compute is nearly all of the time, and the driver reports the run's GPUs busy as well."""
    share, utilization = window.share(COMPUTE), window.utilization
    if share < thresholds.saturated_share or utilization is None or utilization < thresholds.gpu_busy:
        return None
    return Finding(
        cause="gpu_saturated",
        severity="info",
        title="the GPU is busy: the input keeps up",
        ratio=share,
        evidence=(
            Evidence("compute", share, "ratio", f"compute takes {percent(share)} of the time"),
            Evidence("utilization", utilization, "ratio", f"the driver reports a utilisation of {percent(utilization)}"),
        ),
        advice="stop tuning the loader: mixed precision, channels_last, torch.compile or a faster GPU shorten the step",
    )  # fmt: skip
