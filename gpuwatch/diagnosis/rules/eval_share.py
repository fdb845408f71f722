"""Evaluation that takes a large part of the run."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import EVAL


def eval_share(window: Window) -> Finding | None:
    """Found when evaluation takes more than its share of the ledger."""
    share = window.share(EVAL)
    if share < THRESHOLDS.phase_share:
        return None
    return Finding(
        cause="eval_share",
        severity="warning",
        title="evaluation takes a large part of the run",
        ratio=share,
        evidence=(Evidence("eval", share, "ratio", f"evaluation takes {percent(share)} of the time"),),
        advice="evaluate half as often, or on a fixed part of the validation set; a larger batch fits without gradients",
        predicted_speedup=round(1 / (1 - share / 2), 2),
    )
