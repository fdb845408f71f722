"""Far more loader workers than cores: they push each other, and the training thread, off the CPU."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.prediction import free_cores, prefetch_of
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent, size


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="GpuStarved")
def too_many_workers(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when there are twice as many workers as cores, enough to fill them alone, and tasks queue for the cores."""
    loader, host, ranks = window.loader, window.host, window.local_world_size
    if loader is None or not loader.num_workers or host is None or len(window.steps) < thresholds.min_steps:
        return None
    if host.cpu_cores is None or host.cpu_busy_ratio is None or host.cpu_pressure_ratio is None:
        return None
    if sum(window.busy_ratios) * ranks < thresholds.cores_exhausted * host.cpu_cores:
        return None  # others fill the cores: fewer workers that sleep would change nothing
    workers = loader.num_workers * ranks
    if workers < thresholds.workers_per_core * host.cpu_cores:
        return None
    if host.cpu_busy_ratio < thresholds.cores_exhausted or host.cpu_pressure_ratio < thresholds.cpu_pressure:
        return None
    fewer, freed = free_cores(window) or 1, ""
    if loader.batch_bytes is not None:
        freed = (
            f"; frees up to {size((workers - fewer * ranks) * prefetch_of(loader) * loader.batch_bytes)} of /dev/shm"
        )
    return Finding(
        cause="too_many_workers",
        severity="warning",
        title="more loader workers than the cores can run",
        ratio=min(1.0, host.cpu_pressure_ratio),
        evidence=(
            Evidence("workers", workers, "", f"{workers} loader workers on {host.cpu_cores} cores"),
            Evidence("CPU pressure", host.cpu_pressure_ratio, "ratio", f"some task waited for a CPU {percent(host.cpu_pressure_ratio)} of the time"),
            Evidence("CPU busy", host.cpu_busy_ratio, "ratio", f"the node's cores are {percent(host.cpu_busy_ratio)} busy"),
        ),
        advice=f"num_workers {loader.num_workers} → {fewer}: as many batches with fewer context switches and less memory{freed}",
    )  # fmt: skip
