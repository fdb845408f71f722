"""Compute takes nearly all of the time, on a device whose use no driver confirms (a CPU): good."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import COMPUTE


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="Findings")
def compute_bound(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when compute is nearly all of the time of a training on the CPU."""
    share, on_cpu = window.share(COMPUTE), window.device == "cpu" and not window.gpus
    if share < thresholds.saturated_share or not on_cpu or len(window.steps) < thresholds.min_steps:
        return None
    return Finding(
        cause="compute_bound",
        severity="info",
        title="compute takes the time: the input keeps up",
        ratio=share,
        evidence=(Evidence("compute", share, "ratio", f"compute takes {percent(share)} of the time"),),
        advice="stop tuning the loader: a faster device, torch.compile or lower precision shorten the step",
    )
