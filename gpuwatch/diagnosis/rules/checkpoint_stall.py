"""Checkpoints that training waits for."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule, speedup_without
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import CHECKPOINT


@rule(explains=(), explained_by=(), stacks="training", alert=None, runbook="Findings")
def checkpoint_stall(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when checkpoints take a large share of the time."""
    share = window.share(CHECKPOINT)
    if share < thresholds.phase_share:
        return None
    return Finding(
        cause="checkpoint_stall",
        severity="warning",
        title="training stops while checkpoints are written",
        ratio=share,
        evidence=(Evidence("checkpoint", share, "ratio", f"checkpoints take {percent(share)} of the time"),),
        advice="save asynchronously (torch.distributed.checkpoint.async_save, or a copy written by a thread), or less often",
        predicted_speedup=speedup_without(share),
    )
