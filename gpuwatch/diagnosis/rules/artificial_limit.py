"""Nothing is full, and yet training waits: the workers stand at a lock."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.input_wait import wait_evidence, waits_at
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.host.blocked import LOCK


def artificial_limit(window: Window) -> Finding | None:
    """Found when training waits for workers that wait for a lock, while neither the CPUs nor a disk are full."""
    wait, at_lock, host = window.input_wait, waits_at(window, LOCK), window.host
    if wait is None or at_lock is None or at_lock < THRESHOLDS.worker_waiting:
        return None
    if host is None or host.cpu_busy_ratio is None or host.cpu_busy_ratio >= THRESHOLDS.cores_exhausted:
        return None
    if host.disk_busy_ratio is not None and host.disk_busy_ratio >= THRESHOLDS.disk_busy:
        return None
    disk = "" if host.disk_busy_ratio is None else f", of the busiest disk {percent(host.disk_busy_ratio)}"
    return Finding(
        cause="artificial_limit",
        severity=wait.severity,
        title="loader workers wait for a lock while nothing is full",
        ratio=wait.share,
        evidence=(
            wait_evidence(window, wait),
            Evidence("workers at a lock", at_lock, "ratio", f"in {percent(at_lock)} of the looks a worker waited for a lock"),
            Evidence("CPU busy", host.cpu_busy_ratio, "ratio", f"of all cores {percent(host.cpu_busy_ratio)} is in use{disk}"),
        ),
        advice=(
            "more workers will not help: find the lock, the shared file or the fixed pool that they queue for, and give each worker "
            "its own (gpuwatch stacks)"
        ),
        predicted_speedup=round(wait.speedup_bound, 2) if wait.rest_s else None,
    )  # fmt: skip
