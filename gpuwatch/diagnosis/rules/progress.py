"""No training step for far longer than one takes."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
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


@rule(explains=("stalled",), explained_by=(), stacks="all ranks", alert="RunHung", runbook="RunHung")
def hung(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the GPU of a stalled run reads busy at a power far below that of the run's own steps."""
    if window.stalled_s is None:
        return None
    for gpu in window.gpus:
        if gpu.utilization_ratio is None or gpu.power_watts is None or not gpu.power_usual_watts:
            continue
        fallen = gpu.power_watts / gpu.power_usual_watts
        if gpu.utilization_ratio < thresholds.gpu_busy or fallen > thresholds.power_fallen:
            continue
        return Finding(
            cause="hung",
            severity="critical",
            title="training hangs: the GPU is busy but does no work",
            ratio=1.0,
            evidence=(
                Evidence("no step", window.stalled_s, "s", f"no step for {duration(window.stalled_s)}"),
                Evidence("utilization", gpu.utilization_ratio, "ratio", f"GPU {gpu.gpu} reads {percent(gpu.utilization_ratio)} busy"),
                Evidence("power", fallen, "ratio", f"it draws {gpu.power_watts:.0f} W, {percent(fallen)} of the {gpu.power_usual_watts:.0f} W of a normal step"),
            ),
            advice="take the stacks of all ranks before you end any of them (gpuwatch stacks): a collective waits for a rank that does not arrive",
        )  # fmt: skip
    return None
