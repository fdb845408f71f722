"""Nothing is fully used, and yet training waits: the workers are blocked on a lock."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.input_wait import blocked_evidence, input_wait
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.host.blocked import LOCK


@rule(
    explains=("burst_every_n", "input_unexplained"),
    explained_by=("stalled",),
    stacks="workers",
    alert="GpuStarved",
    runbook="GpuStarved",
    delays_rank="input",
)
def artificial_limit(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for workers that wait for a lock, while neither the CPUs nor a disk are fully used."""
    wait, host = input_wait(window, thresholds), window.host
    blocked = blocked_evidence(window, thresholds, LOCK, "workers at a lock", "a lock")
    if wait is None or blocked is None:
        return None
    if host is None or host.cpu_busy_ratio is None or host.cpu_busy_ratio >= thresholds.cores_exhausted:
        return None
    if host.disk_busy_ratio is not None and host.disk_busy_ratio >= thresholds.disk_busy:
        return None
    disk = "" if host.disk_busy_ratio is None else f", the busiest disk {percent(host.disk_busy_ratio)}"
    return Finding(
        cause="artificial_limit",
        severity=wait.severity,
        title="loader workers wait for a lock while CPUs and disks have capacity left",
        ratio=wait.share,
        evidence=(
            wait.evidence,
            blocked,
            Evidence("CPU busy", host.cpu_busy_ratio, "ratio", f"the CPUs are {percent(host.cpu_busy_ratio)} busy{disk}"),
        ),
        advice="find what the workers queue for (gpuwatch stacks): a lock, a shared file, a fixed pool of connections; give each worker "
        "one to itself. More workers will not help",
        predicted_speedup=wait.speedup_bound,
    )  # fmt: skip
