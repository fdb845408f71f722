"""Checkpoints that training waits for."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import CHECKPOINT


def checkpoint_stall(window: Window) -> Finding | None:
    """Found when checkpoints take more than their share of the ledger."""
    share = window.share(CHECKPOINT)
    if share < THRESHOLDS.phase_share:
        return None
    return Finding(
        cause="checkpoint_stall",
        severity="warning",
        title="training stands still while checkpoints are written",
        ratio=share,
        evidence=(Evidence("checkpoint", share, "ratio", f"checkpoints take {percent(share)} of the time"),),
        advice="save asynchronously (torch.distributed.checkpoint.async_save, or a copy handed to a thread), or less often",
        predicted_speedup=round(1 / (1 - share), 2) if share < 0.99 else None,
    )
