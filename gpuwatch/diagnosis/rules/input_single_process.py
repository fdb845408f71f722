"""`num_workers=0`: batches are made in the training process, while the device waits."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.input_wait import input_wait
from gpuwatch.diagnosis.prediction import plan_for
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent


@rule(
    explains=("burst_every_n", "input_unexplained"),
    explained_by=("stalled",),
    stacks="workers",
    alert="GpuStarved",
    runbook="GpuStarved",
    delays_rank="input",
)
def input_single_process(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for a loader that is known to have no workers."""
    wait, on_cpu = input_wait(window, thresholds), window.fetch_cpu_ratio
    if wait is None or window.workers != 0:
        return None
    evidence = [wait.evidence, Evidence("loader workers", 0, "", "num_workers=0")]
    computes = on_cpu is None or on_cpu >= thresholds.fetch_on_cpu
    if on_cpu is not None:
        text = f"{percent(min(1.0, on_cpu))} of a fetch is CPU work (decoding, augmentation)"
        if not computes:
            text = f"only {percent(on_cpu)} of a fetch is CPU work: it waits for the disk, the network or a lock"
        evidence.append(Evidence("fetch on CPU", on_cpu, "ratio", text))
    plan = plan_for(window, wait, on_cpu=computes)
    return Finding(
        cause="input_single_process",
        severity=wait.severity,
        title="batches are made in the training process",
        ratio=wait.share,
        evidence=tuple(evidence),
        advice=f"DataLoader(num_workers={plan.workers}, persistent_workers=True){plan.note}",
        predicted_speedup=plan.gain[1],
        predicted_range=plan.gain,
    )
