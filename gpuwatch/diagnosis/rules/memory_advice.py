"""What the rules about a lack of memory share: the words for taking less of it, and for giving more."""

from __future__ import annotations

from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import size


def fewer_workers(window: Window) -> str:
    """Return e.g. "num_workers 8 → 4"."""
    workers = window.loader.num_workers if window.loader is not None else None
    return f"num_workers {workers} → {workers // 2}" if workers is not None and workers > 1 else "fewer workers"


def more_memory(limit_bytes: int | None) -> str:
    """Return how a job is given more memory than the limit it has; None: it has none that is known."""
    more = "more memory" if limit_bytes is None else f"more than its {size(limit_bytes)}"
    return f"give the job {more} (docker run --memory=…, resources.limits.memory, sbatch --mem)"
