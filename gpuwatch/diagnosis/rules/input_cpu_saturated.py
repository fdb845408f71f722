"""Loader workers that are busy on the CPU with no core left: more workers will not help."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.prediction import free_cores
from gpuwatch.diagnosis.rules.input_wait import wait_evidence
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent


def input_cpu_saturated(window: Window) -> Finding | None:
    """Found when training waits for busy workers and the cores are exhausted, or all given to workers already, or held back by a quota."""
    wait = window.input_wait
    ratios, loader, host = (window.worker_busy_ratios or window.worker_cpu_ratios), window.loader, window.host
    if wait is None or not ratios or loader is None or not loader.num_workers:
        return None
    if host is None or host.cpu_busy_ratio is None:
        return None
    cores = free_cores(window)
    exhausted = host.cpu_busy_ratio >= THRESHOLDS.cores_exhausted
    throttled = (host.cpu_throttled_ratio or 0.0) >= THRESHOLDS.quota_used_up
    all_given = cores is not None and loader.num_workers >= cores and max(ratios) >= THRESHOLDS.worker_busy
    # Where the time in the queue for a core is known, workers that compute are at it nearly always, however full the cores are.
    working = sum(ratios) / len(ratios) > (THRESHOLDS.worker_sleeping if window.worker_busy_ratios else 0.1)
    if not working or not (exhausted or all_given or throttled):
        return None
    evidence = [wait_evidence(window, wait)]
    if throttled and host.cpu_throttled_ratio is not None:
        text = f"its CPU quota of {host.cpu_quota_cores:g} cores is used up in {percent(host.cpu_throttled_ratio)} of all 100 ms"
        evidence.append(Evidence("CPU throttled", host.cpu_throttled_ratio, "ratio", text))
    text = f"{percent(host.cpu_busy_ratio)} of the node's cores is in use"
    evidence.append(Evidence("CPU busy", host.cpu_busy_ratio, "ratio", text))
    if host.cpu_pressure_ratio is not None:
        text = f"some task waited for a CPU {percent(host.cpu_pressure_ratio)} of the time"
        evidence.append(Evidence("CPU pressure", host.cpu_pressure_ratio, "ratio", text))
    return Finding(
        cause="input_cpu_saturated",
        severity=wait.severity,
        title="the job's CPU quota holds the loader's workers back"
        if throttled
        else "the CPUs cannot make batches fast enough",
        ratio=wait.share,
        evidence=tuple(evidence),
        advice=(
            "raise the job's CPU limit (docker run --cpus, resources.limits.cpu), or make a batch cheaper (decode once and cache, lighter or "
            "vectorised transforms, transforms on the GPU); more workers will not help"
            if throttled
            else "more workers will not help: make a batch cheaper (decode once and cache, lighter or vectorised transforms, "
            "transforms on the GPU), or give the job more cores per GPU"
        ),
        predicted_speedup=round(wait.speedup_bound, 2) if wait.rest_s else None,
    )
