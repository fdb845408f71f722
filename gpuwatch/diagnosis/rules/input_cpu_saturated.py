"""Loader workers that are busy on the CPU with no core left: more workers will not help."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.input_wait import input_wait
from gpuwatch.diagnosis.prediction import free_cores
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent

_CHEAPER = "make a batch cheaper (decode once and cache, lighter or vectorised transforms, transforms on the GPU)"


@rule(
    explains=("burst_every_n", "too_many_workers", "input_unexplained"),
    explained_by=("stalled",),
    stacks="workers",
    alert="GpuStarved",
    runbook="GpuStarved",
    delays_rank="input",
)
def input_cpu_saturated(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for busy workers, and the cores are fully used, all given to workers, or limited by a quota."""
    wait, ratios, host = input_wait(window, thresholds), window.busy_ratios, window.host
    if wait is None or not ratios or not window.workers or host is None or host.cpu_busy_ratio is None:
        return None
    cores = free_cores(window)
    exhausted = host.cpu_busy_ratio >= thresholds.cores_exhausted
    throttled = (host.cpu_throttled_ratio or 0.0) >= thresholds.quota_used_up
    all_given = cores is not None and window.workers >= cores and max(ratios) >= thresholds.worker_busy
    # Where the time in the run queue is known, workers that compute are busy nearly always, however full the cores are.
    working = sum(ratios) / len(ratios) > (thresholds.worker_sleeping if window.worker_busy_ratios else 0.1)
    if not working or not (exhausted or all_given or throttled):
        return None
    evidence = [wait.evidence]
    title = "the CPUs cannot make batches fast enough"
    advice = f"{_CHEAPER}, or give the job more cores per GPU; more workers will not help"
    if throttled and host.cpu_throttled_ratio is not None:
        title = "the job's CPU quota limits the loader workers"
        advice = f"raise the job's CPU limit (docker run --cpus, resources.limits.cpu), or {_CHEAPER}; more workers will not help"
        text = f"the CPU quota of {host.cpu_quota_cores:g} cores was used up in {percent(host.cpu_throttled_ratio)} of its periods of 100 ms"
        evidence.append(Evidence("CPU throttled", host.cpu_throttled_ratio, "ratio", text))
    text = f"the node's cores are {percent(host.cpu_busy_ratio)} busy"
    evidence.append(Evidence("CPU busy", host.cpu_busy_ratio, "ratio", text))
    if host.cpu_pressure_ratio is not None:
        text = f"some task waited for a CPU {percent(host.cpu_pressure_ratio)} of the time"
        evidence.append(Evidence("CPU pressure", host.cpu_pressure_ratio, "ratio", text))
    return Finding(
        cause="input_cpu_saturated",
        severity=wait.severity,
        title=title,
        ratio=wait.share,
        evidence=tuple(evidence),
        advice=advice,
        predicted_speedup=wait.speedup_bound,
    )
