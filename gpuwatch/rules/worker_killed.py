"""A loader worker was killed by a signal: a bus error is a full /dev/shm, SIGKILL mostly the kernel's answer to a lack of memory."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGBUS, SIGKILL, Signals

from gpuwatch.finding import Evidence, Finding
from gpuwatch.prediction import PREFETCH
from gpuwatch.units import size
from gpuwatch.window import Window
from gpuwatch.wire import WorkerDeath

LARGER_SHM = (
    "give the container a larger /dev/shm (docker run --shm-size=8g, or an emptyDir with medium: Memory; no batch came, so that its "
    "size is not known), or take fewer workers or prefetch_factor=1"
)
_ROOMY = 0.5
"""Share of /dev/shm below which full queues cannot have filled it."""


def worker_killed(window: Window) -> Finding | None:
    """Found when a worker has died by a signal; how is told by its exit code, not guessed."""
    if not window.worker_deaths:
        return None
    first = window.worker_deaths[0]
    title, advice = _bus(window) if first.signal == SIGBUS else _killed(window, first)
    return Finding(
        cause="worker_killed",
        severity="critical",
        title=title,
        ratio=1.0,
        evidence=(*_signals(window), *_room(window, first)),
        advice=advice,
    )


def _bus(window: Window) -> tuple[str, str]:
    loader, host = window.loader, window.host
    title = "a loader worker was killed by a bus error: /dev/shm was full"
    if loader is None or loader.batch_bytes is None or not loader.num_workers:
        return title, LARGER_SHM
    ahead = loader.num_workers * (loader.prefetch_factor or PREFETCH) + 1
    needed = max(ahead * loader.batch_bytes * window.local_world_size, (host.shm_used_bytes or 0) if host else 0)
    if host is not None and host.shm_size_bytes and needed < _ROOMY * host.shm_size_bytes:
        return "a loader worker was killed by a bus error, and not for lack of room in /dev/shm", (
            "a file that it maps into memory was shortened, or its disk is full or failing: look at memory-mapped data sets and dmesg"
        )
    return title, (
        f"docker run --shm-size={-(-needed * 5 // 4 // 2**20)}m ({loader.num_workers} workers × {loader.prefetch_factor or PREFETCH} batches of "
        f"{size(loader.batch_bytes)}), or fewer workers or prefetch_factor=1"
    )


def _killed(window: Window, death: WorkerDeath) -> tuple[str, str]:
    workers = window.loader.num_workers if window.loader is not None else None
    fewer = f"num_workers {workers} → {workers // 2}" if workers is not None and workers > 1 else "fewer workers"
    if death.signal != SIGKILL:
        return f"a loader worker crashed with {_name(death)}", (
            "a library that the worker calls has crashed: run the dataset alone, with num_workers=0 and python -X faulthandler"
        )
    if death.out_of_memory:
        return "a loader worker was killed for lack of memory", (
            f"{fewer}, prefetch_factor=1 or smaller batches; or give the job more memory (docker run --memory=…, "
            "resources.limits.memory, sbatch --mem)"
        )
    if death.out_of_memory is None:
        return "a loader worker was killed with SIGKILL, mostly for lack of memory", (
            f"look for it (dmesg | grep -i oom), then {fewer} or more memory for the job"
        )
    return "a loader worker was killed with SIGKILL, and not for lack of memory", (
        "no process was killed for lack of memory here meanwhile: look for who ends processes (the scheduler, a time limit, a colleague)"
    )


def _signals(window: Window) -> Iterator[Evidence]:
    for each in window.worker_deaths[:4]:
        yield Evidence("exit signal", each.signal, "", f"worker pid {each.pid} ended with {_name(each)}")


def _room(window: Window, death: WorkerDeath) -> tuple[Evidence, ...]:
    host = window.host
    if host is None or death.signal != SIGBUS or not host.shm_size_bytes:
        return ()
    used = f", at most {size(host.shm_used_bytes)} of it seen used" if host.shm_used_bytes is not None else ""
    text = f"/dev/shm is {size(host.shm_size_bytes)}{used}"
    return (Evidence("shm size", host.shm_size_bytes, "bytes", text),)


def _name(death: WorkerDeath) -> str:
    try:
        return Signals(death.signal).name
    except ValueError:
        return f"signal {death.signal}"
