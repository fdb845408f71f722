"""Loader workers that are busy on the CPU while cores are free: too few of them."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.prediction import free_cores
from gpuwatch.diagnosis.rules.input_wait import expectation, limited, make_plan, queue_evidence, rounded, wait_evidence
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window


def input_cpu(window: Window) -> Finding | None:
    """Found when training waits, the workers are on the CPU all the time, and the node has cores to spare."""
    wait = window.input_wait
    ratios, loader, host = (window.worker_busy_ratios or window.worker_cpu_ratios), window.loader, window.host
    if wait is None or not ratios or loader is None or not loader.num_workers:
        return None
    if host is None or host.cpu_busy_ratio is None or host.cpu_busy_ratio >= THRESHOLDS.cores_exhausted:
        return None
    if (host.cpu_throttled_ratio or 0.0) >= THRESHOLDS.quota_used_up:
        return None  # the quota holds back those that there are
    busy = sum(ratio >= THRESHOLDS.worker_busy for ratio in ratios)
    cores = free_cores(window)
    if busy < len(ratios) / 2 or cores is None or cores <= loader.num_workers:
        return None
    plan = make_plan(window, wait, on_cpu=True)
    if plan.workers <= loader.num_workers:
        return None  # there are cores, but no room for their queues: /dev/shm has a cause of its own
    idle = round((1 - host.cpu_busy_ratio) * (host.cpu_cores or 0))
    mean = sum(ratios) / len(ratios)
    return Finding(
        cause="input_cpu",
        severity=wait.severity,
        title="too few loader workers for the CPU work that a batch takes",
        ratio=wait.share,
        evidence=(
            wait_evidence(window, wait),
            Evidence("worker CPU", mean, "ratio", f"{busy} of {len(ratios)} loader workers are busy on the CPU ({mean:.0%} of a core on average)"),
            Evidence("idle cores", idle, "cores", f"about {idle} of {host.cpu_cores} cores are idle"),
            *queue_evidence(window),
        ),
        advice=f"num_workers {loader.num_workers} → {plan.workers}{limited(plan)}{expectation(plan)}",
        predicted_speedup=rounded(plan)[1],
        predicted_range=rounded(plan),
    )  # fmt: skip
