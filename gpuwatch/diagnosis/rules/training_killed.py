"""The training process itself was killed by the kernel for lack of memory: nothing of it was left to say so."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.memory_advice import fewer_workers, more_memory
from gpuwatch.diagnosis.window import MemoryKills, Window
from gpuwatch.formatting import percent, size

_WHERE = {"group": "in its control group", "around": "in a control group around its own", "node": "on this node"}
_MOST = 0.5
"""Share of the memory used from which the training process itself is where there is something to save, and of the limit from which that is said."""


def training_killed(window: Window) -> Finding | None:
    """Found when a run is lost and the kernel has killed for lack of memory meanwhile. A worker that was killed is told as that."""
    oom = window.oom
    if oom is None or window.worker_deaths:
        return None
    title = "the training process was killed for lack of memory"
    if oom.where != "group" or window.world_size > 1:  # it may have been another rank, or what else is there
        title = f"the training process is gone, and the kernel has killed for lack of memory {_WHERE[oom.where]}"
    return Finding(
        cause="training_killed",
        severity="critical",
        title=title,
        ratio=1.0,
        evidence=(_kills(oom), *_memory(oom)),
        advice=f"{_less(window, oom)}; or {more_memory(oom.limit_bytes)}",
    )


def _kills(oom: MemoryKills) -> Evidence:
    count = f"{oom.kills} process{'es' if oom.kills > 1 else ''}"
    text = (
        f"since its last sign of life the kernel has killed {count} {_WHERE[oom.where]} for lack of memory (oom_kill)"
    )
    return Evidence("oom kills", oom.kills, "", text)


def _memory(oom: MemoryKills) -> Iterator[Evidence]:
    if oom.limit_bytes is not None:
        yield Evidence("memory limit", oom.limit_bytes, "bytes", f"its control group may have {size(oom.limit_bytes)}")
    if oom.used_bytes is not None:
        share = f", {percent(oom.used_bytes / oom.limit_bytes)} of it" if oom.limit_bytes else ""
        text = f"{size(oom.used_bytes)} were used when that was seen last{share}"
        yield Evidence("memory used", oom.used_bytes, "bytes", text)
    if oom.peak_bytes is not None:
        yield Evidence("memory peak", oom.peak_bytes, "bytes", f"the most that was ever used is {size(oom.peak_bytes)}")
    if oom.resident_bytes is not None:
        text = f"the training process alone had {size(oom.resident_bytes)} when it was seen last"
        yield Evidence("resident memory", oom.resident_bytes, "bytes", text)


def _less(window: Window, oom: MemoryKills) -> str:
    own, used = oom.resident_bytes, oom.used_bytes
    # What was seen long before the limit was reached does not tell what has grown since.
    near = used is not None and (oom.limit_bytes is None or used >= _MOST * oom.limit_bytes)
    if own is not None and used is not None and near and own >= _MOST * used:
        return "keep less in the training process (what the data set caches, results kept over the steps), or smaller batches"
    return f"{fewer_workers(window)}, prefetch_factor=1 or smaller batches"
