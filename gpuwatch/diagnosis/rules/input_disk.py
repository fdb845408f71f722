"""Loader workers that stand at the disk."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.input_wait import (
    expectation,
    limited,
    make_plan,
    rounded,
    wait_evidence,
    waits_at,
)
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent, size
from gpuwatch.host.blocked import DISK


def input_disk(window: Window) -> Finding | None:
    """Found when training waits for workers that are in uninterruptible sleep, which is a disk's or a network file system's."""
    wait, at_disk = window.input_wait, waits_at(window, DISK)
    loader, host = window.loader, window.host
    if wait is None or at_disk is None or at_disk < THRESHOLDS.worker_waiting:
        return None
    if loader is None or not loader.num_workers:
        return None
    evidence = [
        wait_evidence(window, wait),
        Evidence(
            "workers at the disk", at_disk, "ratio", f"in {percent(at_disk)} of the looks a worker stood at the disk"
        ),
    ]
    full = False
    if host is not None and host.io_pressure_ratio is not None:
        text = f"some task waited for I/O {percent(host.io_pressure_ratio)} of the time"
        evidence.append(Evidence("I/O pressure", host.io_pressure_ratio, "ratio", text))
    if host is not None and host.disk_busy_ratio is not None:
        full = host.disk_busy_ratio >= THRESHOLDS.disk_busy
        read = "" if host.disk_read_bytes_per_s is None else f", {size(host.disk_read_bytes_per_s)}/s were read"
        text = f"the busiest disk had work {percent(host.disk_busy_ratio)} of the time{read}"
        evidence.append(Evidence("disk busy", host.disk_busy_ratio, "ratio", text))
    plan = make_plan(window, wait, on_cpu=False)
    more = ""
    if not full and plan.workers > loader.num_workers:
        more = f"; the disk has time left: num_workers {loader.num_workers} → {plan.workers}{limited(plan)}{expectation(plan)}"
    return Finding(
        cause="input_disk",
        severity=wait.severity,
        title="loader workers wait for the disk",
        ratio=wait.share,
        evidence=tuple(evidence),
        advice=(
            "read fewer bytes in larger pieces (records packed in large sequential files, only the columns used), keep the data "
            f"on a local or faster disk or in the page cache{more}"
        ),
        predicted_speedup=round(wait.speedup_bound, 2) if wait.rest_s else None,
        predicted_range=(1.0, rounded(plan)[1]) if more else None,
    )
