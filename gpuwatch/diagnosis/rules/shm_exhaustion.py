"""/dev/shm nearly full: the next batch kills a worker with a bus error."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.shm_need import larger_shm, prefetch_of, queues_bytes
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent, size


def shm_exhaustion(window: Window) -> Finding | None:
    """Found when /dev/shm is nearly full, or when the loader's full buffers will make it so."""
    host = window.host
    if host is None or not host.shm_size_bytes or host.shm_used_bytes is None:
        return None
    used, whole = host.shm_used_bytes, host.shm_size_bytes
    forecast = _forecast_bytes(window)
    ratio = max(used, forecast or 0) / whole
    if ratio < THRESHOLDS.shm_used:
        return None
    evidence = [
        Evidence("shm used", used / whole, "ratio", f"/dev/shm: {size(used)} of {size(whole)} used ({percent(used / whole)})")
    ]  # fmt: skip
    advice = "give the container a larger /dev/shm (docker run --shm-size=…, or an emptyDir with medium: Memory)"
    if forecast is not None and window.loader is not None:
        workers, prefetch = window.loader.num_workers or 0, prefetch_of(window.loader)
        text = f"{workers} workers × {prefetch} batches of {size(window.loader.batch_bytes or 0)} need up to {size(forecast)}"
        evidence.append(Evidence("shm forecast", forecast / whole, "ratio", text))
        advice = larger_shm(max(used, forecast))
    return Finding(
        cause="shm_exhaustion",
        severity="critical" if ratio >= THRESHOLDS.shm_used_critical else "warning",
        title="/dev/shm is nearly full: a worker will die with a bus error",
        ratio=min(1.0, ratio),
        evidence=tuple(evidence),
        advice=advice,
    )


def _forecast_bytes(window: Window) -> int | None:
    """Return the bytes of /dev/shm that the workers' full queues take on this node; None when not known."""
    loader = window.loader
    if loader is None or not loader.num_workers or loader.batch_bytes is None:
        return None
    return queues_bytes(loader, loader.batch_bytes, window.local_world_size)
