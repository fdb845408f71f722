"""The training process itself was killed by the kernel for lack of memory, and could not report it."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.prediction import fewer_workers, more_memory
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import MemoryKills, Window
from gpuwatch.formatting import percent, size

_WHERE = {"group": "in its control group", "around": "in a parent of its control group", "node": "on this node"}
_MOST = 0.5
"""Share of the used memory from which the training process itself is to use less, and share of the limit from which that is known."""


@rule(
    explains=(),
    explained_by=(),
    stacks=None,
    alert=None,
    runbook="GpuwatchTelemetryLost",
    ends_run=True,
)
def training_killed(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a run is lost and the kernel has killed for lack of memory since its last message. A killed worker has its own cause."""
    oom = window.oom
    if oom is None or window.worker_deaths:
        return None
    title = "the training process was killed for lack of memory"
    if oom.where != "group" or window.world_size > 1:  # the kernel may have killed another rank, or another program
        title = f"the training process is gone, and the kernel has killed for lack of memory {_WHERE[oom.where]}"
    return Finding(
        cause="training_killed",
        severity="critical",
        title=title,
        ratio=1.0,
        evidence=tuple(_evidence(oom)),
        advice=f"{_less(window, oom)}; or {more_memory(oom.limit_bytes)}",
    )


def _evidence(oom: MemoryKills) -> Iterator[Evidence]:
    count = f"{oom.kills} process{'es' if oom.kills > 1 else ''}"
    text = f"since its last message the kernel has killed {count} {_WHERE[oom.where]} for lack of memory (oom_kill)"
    yield Evidence("oom kills", oom.kills, "", text)
    if oom.limit_bytes is not None:
        text = f"its control group is limited to {size(oom.limit_bytes)}"
        yield Evidence("memory limit", oom.limit_bytes, "bytes", text)
    if oom.used_bytes is not None:
        share = f", {percent(oom.used_bytes / oom.limit_bytes)} of the limit" if oom.limit_bytes else ""
        text = f"{size(oom.used_bytes)} were in use at the last sample{share}"
        yield Evidence("memory used", oom.used_bytes, "bytes", text)
    if oom.peak_bytes is not None:
        yield Evidence("memory peak", oom.peak_bytes, "bytes", f"the peak was {size(oom.peak_bytes)}")
    if oom.resident_bytes is not None:
        text = f"the training process alone used {size(oom.resident_bytes)} at the last sample"
        yield Evidence("resident memory", oom.resident_bytes, "bytes", text)


def _less(window: Window, oom: MemoryKills) -> str:
    own, used = oom.resident_bytes, oom.used_bytes
    # A sample from long before the limit was reached does not show what has grown since.
    near = used is not None and (oom.limit_bytes is None or used >= _MOST * oom.limit_bytes)
    if own is not None and used is not None and near and own >= _MOST * used:
        return "keep less in the training process (caches of the data set, results kept over steps), or take smaller batches"
    return f"{fewer_workers(window)}, prefetch_factor=1 or smaller batches"
