"""/dev/shm nearly full: the next batch kills a worker with a bus error."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.prediction import larger_shm, prefetch_of, queues_bytes
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent, size


@rule(explains=("stalled",), explained_by=(), stacks=None, alert="ShmForecast", runbook="ShmForecast")
def shm_exhaustion(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when /dev/shm is nearly full, or will be once the workers' queues are full."""
    host, loader = window.host, window.loader
    if host is None or not host.shm_size_bytes or host.shm_used_bytes is None:
        return None
    used, whole, forecast = host.shm_used_bytes, host.shm_size_bytes, 0
    text = f"/dev/shm: {size(used)} of {size(whole)} used ({percent(used / whole)})"
    evidence = [Evidence("shm used", used / whole, "ratio", text)]
    advice = "give the container a larger /dev/shm (docker run --shm-size=…, or an emptyDir with medium: Memory)"
    if loader is not None and loader.num_workers and loader.batch_bytes is not None:
        forecast = queues_bytes(loader, loader.batch_bytes, window.local_world_size)
        batches = f"{loader.num_workers} workers × {prefetch_of(loader)} batches of {size(loader.batch_bytes)}"
        text = f"{batches} need up to {size(forecast)}"
        evidence.append(Evidence("shm forecast", forecast / whole, "ratio", text))
        advice = larger_shm(max(used, forecast))
    ratio = max(used, forecast) / whole
    if ratio < thresholds.shm_used:
        return None
    return Finding(
        cause="shm_exhaustion",
        severity="critical" if ratio >= thresholds.shm_used_critical else "warning",
        title="/dev/shm is nearly full: a loader worker may die of a bus error",
        ratio=min(1.0, ratio),
        evidence=tuple(evidence),
        advice=advice,
    )
