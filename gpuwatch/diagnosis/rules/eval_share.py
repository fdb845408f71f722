"""Evaluation that takes a large part of the run."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule, speedup_without
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import EVAL


@rule(explains=(), explained_by=(), stacks="training", alert=None, runbook="Findings")
def eval_share(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when evaluation takes a large share of the time."""
    share = window.share(EVAL)
    if share < thresholds.phase_share:
        return None
    return Finding(
        cause="eval_share",
        severity="warning",
        title="evaluation takes a large part of the run",
        ratio=share,
        evidence=(Evidence("eval", share, "ratio", f"evaluation takes {percent(share)} of the time"),),
        advice="evaluate half as often, or on a fixed subset of the validation set; without gradients a larger batch fits",
        predicted_speedup=speedup_without(share / 2),
    )
