"""A loader worker was killed by a signal: a bus error is a full /dev/shm, SIGKILL mostly the kernel's answer to a lack of memory."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGBUS, SIGKILL, Signals

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.memory_advice import fewer_workers, more_memory
from gpuwatch.diagnosis.shm_need import larger_shm, prefetch_of, queues_bytes
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import size
from gpuwatch.wire import WorkerDeath

LARGER_SHM = (
    "give the container a larger /dev/shm (docker run --shm-size=8g, or an emptyDir with medium: Memory; no batch came, so that its "
    "size is not known), or take fewer workers or prefetch_factor=1"
)
_ROOMY = 0.5
"""Share of /dev/shm below which full queues cannot have filled it."""
_FULL = 0.1
"""Share of /dev/shm that is free at most, right after, where it was full: what the dead worker held has been freed."""


def worker_killed(window: Window) -> Finding | None:
    """Found when a worker has died by a signal; how is told by its exit code, not guessed."""
    if not window.worker_deaths:
        return None
    first = window.worker_deaths[0]
    title, advice = _bus(window, first) if first.signal == SIGBUS else _killed(window, first)
    return Finding(
        cause="worker_killed",
        severity="critical",
        title=title,
        ratio=1.0,
        evidence=(*_signals(window), *_kills(first), *_room(window, first)),
        advice=advice,
    )


def _bus(window: Window, death: WorkerDeath) -> tuple[str, str]:
    loader = window.loader
    title = "a loader worker was killed by a bus error: /dev/shm was full"
    if loader is None or loader.batch_bytes is None or not loader.num_workers:
        return title, LARGER_SHM
    room, used, free = _shm(window, death)
    full = bool(room and free is not None and free < _FULL * room)
    ranks = window.local_world_size
    ahead = queues_bytes(loader, loader.batch_bytes, ranks) + loader.batch_bytes * ranks  # and one in hand
    needed = max(ahead, used or 0)
    if room and full and ahead < _ROOMY * room:
        return title, (
            f"docker run --shm-size={room * 2 // 2**20}m, twice what it is: the loader's batches alone do not fill it; look for what else does "
            "(ls -lS /dev/shm, shared memory that the data set makes)"
        )
    if room and not full and needed < _ROOMY * room:
        return "a loader worker was killed by a bus error, and not for lack of room in /dev/shm", (
            "a file that it maps into memory was shortened, or its disk is full or failing: look at memory-mapped data sets and dmesg"
        )
    batches = f"{loader.num_workers} workers × {prefetch_of(loader)} batches of {size(loader.batch_bytes)}"
    return title, larger_shm(needed, f" ({batches})")


def _shm(window: Window, death: WorkerDeath) -> tuple[int | None, int | None, int | None]:
    """Return (size, most that was seen used, free right after) of the run's own /dev/shm, each None where not known.

    The node's is another one where the run had its own, which is gone when the run is.
    """
    host = window.host
    room, used = (None, None) if host is None else (host.shm_size_bytes, host.shm_used_bytes)
    if death.shm_size_bytes is not None and death.shm_size_bytes != room:
        return death.shm_size_bytes, None, death.shm_free_bytes
    return room, used, death.shm_free_bytes


def _killed(window: Window, death: WorkerDeath) -> tuple[str, str]:
    fewer = fewer_workers(window)
    if death.signal != SIGKILL:
        return f"a loader worker crashed with {_name(death)}", (
            "a library that the worker calls has crashed: run the dataset alone, with num_workers=0 and python -X faulthandler"
        )
    if death.out_of_memory:
        return "a loader worker was killed for lack of memory", (
            f"{fewer}, prefetch_factor=1 or smaller batches; or {more_memory(death.memory_limit_bytes)}"
        )
    if death.out_of_memory is None:
        return "a loader worker was killed with SIGKILL, mostly for lack of memory", (
            f"look for it (dmesg | grep -i oom), then {fewer} or more memory for the job"
        )
    return "a loader worker was killed with SIGKILL, and not for lack of memory", (
        "no process was killed for lack of memory here meanwhile: look for who ends processes (the scheduler, a "
        "time limit, systemd-oomd, a colleague)"
    )


def _signals(window: Window) -> Iterator[Evidence]:
    for each in window.worker_deaths[:4]:
        yield Evidence("exit signal", each.signal, "", f"worker pid {each.pid} ended with {_name(each)}")


def _kills(death: WorkerDeath) -> tuple[Evidence, ...]:
    if not death.oom_kills:
        return ()
    count = f"{death.oom_kills} process{'es' if death.oom_kills > 1 else ''}"
    limit = "" if death.memory_limit_bytes is None else f"; its control group may have {size(death.memory_limit_bytes)}"
    text = f"the kernel has killed {count} for lack of memory meanwhile (oom_kill){limit}"
    return (Evidence("oom kills", death.oom_kills, "", text),)


def _room(window: Window, death: WorkerDeath) -> tuple[Evidence, ...]:
    room, used, free = _shm(window, death)
    if death.signal != SIGBUS or not room:
        return ()
    text = f"/dev/shm is {size(room)}"
    if free is not None:
        text += f", {size(free)} of it free right after"
    elif used is not None:
        text += f", at most {size(used)} of it seen used"
    return (Evidence("shm size", room, "bytes", text),)


def _name(death: WorkerDeath) -> str:
    try:
        return Signals(death.signal).name
    except ValueError:
        return f"signal {death.signal}"
