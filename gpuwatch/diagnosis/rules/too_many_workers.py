"""Far more loader workers than cores: they push each other, and the training thread, off the CPU."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.prediction import free_cores
from gpuwatch.diagnosis.shm_need import prefetch_of
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent, size


def too_many_workers(window: Window) -> Finding | None:
    """Found when there are twice as many workers as cores, which alone would fill them, and tasks queue for the cores."""
    loader, host = window.loader, window.host
    if loader is None or not loader.num_workers or host is None or len(window.steps) < THRESHOLDS.min_steps:
        return None
    if host.cpu_cores is None or host.cpu_busy_ratio is None or host.cpu_pressure_ratio is None:
        return None
    ratios = window.worker_busy_ratios or window.worker_cpu_ratios
    if ratios is None or sum(ratios) * window.local_world_size < THRESHOLDS.cores_exhausted * host.cpu_cores:
        return None  # others fill the cores: fewer workers that sleep would change nothing
    workers = loader.num_workers * window.local_world_size
    if workers < THRESHOLDS.workers_per_core * host.cpu_cores:
        return None
    if host.cpu_busy_ratio < THRESHOLDS.cores_exhausted or host.cpu_pressure_ratio < THRESHOLDS.cpu_pressure:
        return None
    fewer = free_cores(window) or 1
    kept = ""
    if loader.batch_bytes is not None:
        spared = (workers - fewer * window.local_world_size) * prefetch_of(loader) * loader.batch_bytes
        kept = f"; gives back up to {size(spared)} of /dev/shm"
    return Finding(
        cause="too_many_workers",
        severity="warning",
        title="more loader workers than the cores can carry",
        ratio=min(1.0, host.cpu_pressure_ratio),
        evidence=(
            Evidence("workers", workers, "", f"{workers} loader workers on {host.cpu_cores} cores"),
            Evidence("CPU pressure", host.cpu_pressure_ratio, "ratio", f"some task waited for a CPU {percent(host.cpu_pressure_ratio)} of the time"),
            Evidence("CPU busy", host.cpu_busy_ratio, "ratio", f"{percent(host.cpu_busy_ratio)} of all cores is in use"),
        ),
        advice=f"num_workers {loader.num_workers} → {fewer}: the same batches with less switching and memory{kept}",
    )  # fmt: skip
