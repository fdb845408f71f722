"""Loader workers that are blocked on disk I/O."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.input_wait import blocked_evidence, input_wait
from gpuwatch.diagnosis.prediction import plan_for
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import HostFacts, Window
from gpuwatch.formatting import percent, size
from gpuwatch.host.blocked import DISK


@rule(
    explains=("burst_every_n", "input_unexplained"),
    explained_by=("stalled",),
    stacks="workers",
    alert="GpuStarved",
    runbook="GpuStarved",
    delays_rank="input",
)
def input_disk(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for workers in uninterruptible sleep, which is that of a disk or of a network file system."""
    wait, host = input_wait(window, thresholds), window.host or HostFacts()
    blocked = blocked_evidence(window, thresholds, DISK, "workers at the disk", "disk I/O")
    if wait is None or blocked is None or not window.workers:
        return None
    evidence = [wait.evidence, blocked]
    if host.io_pressure_ratio is not None:
        text = f"some task waited for I/O {percent(host.io_pressure_ratio)} of the time"
        evidence.append(Evidence("I/O pressure", host.io_pressure_ratio, "ratio", text))
    if host.disk_busy_ratio is not None:
        read = "" if host.disk_read_bytes_per_s is None else f" and {size(host.disk_read_bytes_per_s)}/s were read"
        text = f"the busiest disk was busy {percent(host.disk_busy_ratio)} of the time{read}"
        evidence.append(Evidence("disk busy", host.disk_busy_ratio, "ratio", text))
    plan, more = plan_for(window, wait, on_cpu=False), ""
    if (host.disk_busy_ratio or 0.0) < thresholds.disk_busy and plan.workers > window.workers:
        more = f"; the disk is not fully busy: num_workers {window.workers} → {plan.workers}{plan.note}"
    return Finding(
        cause="input_disk",
        severity=wait.severity,
        title="loader workers wait for the disk",
        ratio=wait.share,
        evidence=tuple(evidence),
        advice="read fewer bytes in larger pieces (large sequential record files, only the columns needed), or keep the data on a "
        f"faster or local disk or in the page cache{more}",
        predicted_speedup=wait.speedup_bound,
        predicted_range=(1.0, plan.gain[1]) if more else None,
    )
