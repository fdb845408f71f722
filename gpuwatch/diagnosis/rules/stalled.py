"""No training step for far longer than one takes."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration
from gpuwatch.ledger.states import STALLED

_WHERE = {
    "data_wait": "waits for the loader",
    "step": "is inside a step",
    "between_steps": "is between steps, in no declared phase",
}


@rule(explains=(), explained_by=(), stacks="all ranks", alert="RunStalled", runbook="RunStalled")
def stalled(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found while the run is stalled now."""
    if window.stalled_s is None:
        return None
    evidence = [Evidence("no step", window.stalled_s, "s", f"no step for {duration(window.stalled_s)}")]
    where = _WHERE.get(window.activity or "")
    if where is not None:
        evidence.append(Evidence("activity", 1, "", f"the training thread {where}"))
    return Finding(
        cause="stalled",
        severity="critical",
        title="training makes no progress",
        ratio=max(window.share(STALLED), 0.01),
        evidence=tuple(evidence),
        advice="take the stacks (gpuwatch stacks) to see where it is blocked; if this is an evaluation or a checkpoint, declare it: "
        'with w.phase("eval")',
    )
