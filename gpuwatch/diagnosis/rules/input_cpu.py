"""Loader workers that are busy on the CPU while cores are free: too few of them."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.input_wait import input_wait, queue_evidence
from gpuwatch.diagnosis.prediction import free_cores, plan_for
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window


@rule(
    explains=("burst_every_n", "input_unexplained"),
    explained_by=("stalled",),
    stacks="workers",
    alert="GpuStarved",
    runbook="GpuStarved",
    delays_rank="input",
)
def input_cpu(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits, the workers are on the CPU all the time, and the node has idle cores."""
    wait, ratios, host = input_wait(window, thresholds), window.busy_ratios, window.host
    if wait is None or not ratios or not window.workers:
        return None
    if host is None or host.cpu_busy_ratio is None or host.cpu_busy_ratio >= thresholds.cores_exhausted:
        return None
    if (host.cpu_throttled_ratio or 0.0) >= thresholds.quota_used_up:
        return None  # the quota limits the workers that there are
    busy, cores = sum(ratio >= thresholds.worker_busy for ratio in ratios), free_cores(window)
    if busy < len(ratios) / 2 or cores is None or cores <= window.workers:
        return None
    plan = plan_for(window, wait, on_cpu=True)
    if plan.workers <= window.workers:
        return None  # there are cores, but no room for their queues: /dev/shm has its own cause
    idle = round((1 - host.cpu_busy_ratio) * (host.cpu_cores or 0))
    mean = sum(ratios) / len(ratios)
    return Finding(
        cause="input_cpu",
        severity=wait.severity,
        title="too few loader workers for the CPU time that a batch takes",
        ratio=wait.share,
        evidence=(
            wait.evidence,
            Evidence("worker CPU", mean, "ratio", f"{busy} of {len(ratios)} loader workers are busy on the CPU ({mean:.0%} of a core on average)"),
            Evidence("idle cores", idle, "cores", f"about {idle} of {host.cpu_cores} cores are idle"),
            *queue_evidence(window),
        ),
        advice=f"num_workers {window.workers} → {plan.workers}{plan.note}",
        predicted_speedup=plan.gain[1],
        predicted_range=plan.gain,
    )  # fmt: skip
