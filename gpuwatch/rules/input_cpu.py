"""Loader workers that are busy on the CPU while cores are free: too few of them."""

from __future__ import annotations

from gpuwatch.diagnosis import Evidence, Finding
from gpuwatch.rules.input_wait import free_cores, shm_cost, steady_input_wait, wait_evidence, workers_needed
from gpuwatch.thresholds import THRESHOLDS
from gpuwatch.window import Window


def input_cpu(window: Window) -> Finding | None:
    """Found when training waits, the workers are on the CPU all the time, and the node has cores to spare."""
    wait = steady_input_wait(window)
    ratios, loader, host = window.worker_cpu_ratios, window.loader, window.host
    if wait is None or not ratios or loader is None or not loader.num_workers:
        return None
    if host is None or host.cpu_busy_ratio is None or host.cpu_busy_ratio >= THRESHOLDS.cores_exhausted:
        return None
    busy = sum(ratio >= THRESHOLDS.worker_busy for ratio in ratios)
    cores = free_cores(window)
    if busy < len(ratios) / 2 or cores is None or cores <= loader.num_workers:
        return None
    # W workers that are the limit deliver a batch every step: one batch costs a worker W × step time.
    step_s = wait.wait_s + wait.rest_s
    needed = workers_needed(loader.num_workers * step_s, wait.rest_s)
    workers = min(needed, cores)
    new_step_s = max(wait.rest_s, loader.num_workers * step_s / workers)
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
        ),
        advice=f"num_workers {loader.num_workers} → {workers}{shm_cost(window, workers)}",
        predicted_speedup=round(step_s / new_step_s, 2),
    )  # fmt: skip
