"""A process was killed, or is about to be: SIGBUS means a full /dev/shm, SIGKILL usually that memory has run out."""

from functools import partial
from signal import SIGBUS, SIGKILL, Signals

from gpuwatch.diagnosis.finding import Evidence, Finding, found, lone, measured
from gpuwatch.diagnosis.prediction import fewer_workers, larger_shm, more_memory, prefetch_of, queues_bytes
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent, size
from gpuwatch.wire import WorkerDeath

LARGER_SHM = (
    "give the container a larger /dev/shm (docker run --shm-size=8g, or an emptyDir with medium: Memory; the batch size is unknown "
    "because no batch arrived), or use fewer workers, or prefetch_factor=1"
)
_ROOMY = 0.5  # share of /dev/shm below which full queues cannot have filled it
_WHERE = {"group": "in its cgroup", "around": "in a parent of its cgroup", "node": "on this node"}
_MOST = 0.5  # the training process uses too much from this share of the used memory, if that is this share of the limit
_FULL = 0.1  # /dev/shm was full with less than this share free right after: what the dead worker held has been freed

killed_rule = partial(lone, alert="RunKilled", ends_run=True)
"""Makes a rule about a process that was killed, which has these facts in common with all of them."""


@killed_rule("give the job a larger /dev/shm (SIGBUS) or more memory (SIGKILL), or use fewer workers")
def worker_killed(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a loader worker was killed by a signal. Its exit code and the kernel's counters show the reason."""
    if not window.worker_deaths:
        return None
    first = window.worker_deaths[0]
    title, advice = _bus_error(window, first) if first.signal == SIGBUS else _killed(window, first)
    ends = [(each.signal, f"worker pid {each.pid} ended with {_name(each)}") for each in window.worker_deaths[:4]]
    evidence = [Evidence("exit signal", signal, "", text) for signal, text in ends]
    if first.oom_kills:
        limit = first.memory_limit_bytes
        limited = "" if limit is None else f"; its cgroup is limited to {size(limit)}"
        text = f"the OOM killer killed {_processes(first.oom_kills)} at that time (oom_kill){limited}"
        evidence.append(Evidence("oom kills", first.oom_kills, "", text))
    room, used = _shm(window, first)
    if first.signal == SIGBUS and room:
        after = "" if used is None else f", at most {size(used)} of it used"
        if first.shm_free_bytes is not None:
            after = f", {size(first.shm_free_bytes)} of it free right afterwards"
        evidence += measured("shm size", room, f"/dev/shm has {{}}{after}", "bytes")
    return found(title, 1.0, *evidence, severity="critical", advice=advice)


def _bus_error(window: Window, death: WorkerDeath) -> tuple[str, str]:
    title, queued = "a loader worker was killed by a bus error: /dev/shm was full", queues_bytes(window)
    if not window.workers or (each := window.loader.queued_bytes) is None:
        return title, LARGER_SHM
    (room, used), free = _shm(window, death), death.shm_free_bytes
    full = bool(room and free is not None and free < _FULL * room)
    queued += each * window.local_world_size  # and one being made
    needed = max(queued, used or 0)
    if room and full and queued < _ROOMY * room:
        return title, (
            f"docker run --shm-size={room * 2 // 2**20}m, twice its size: the loader's batches alone do not fill it; check what else uses it (ls -lS /dev/shm, shared memory of the dataset)"
        )
    if room and not full and needed < _ROOMY * room:
        return "a loader worker was killed by a bus error although /dev/shm was not full", (
            "check memory-mapped datasets and dmesg: a mapped file was truncated, or its disk is full or failing"
        )
    return title, larger_shm(needed, f" ({_queues(window)})") if needed else LARGER_SHM


def _queues(window: Window) -> str:
    loader = window.loader
    return f"{loader.num_workers} workers × {prefetch_of(loader)} batches of {size(loader.queued_bytes or 0)}"


def _shm(window: Window, death: WorkerDeath) -> tuple[int | None, int | None]:
    """Return size and highest use of the run's own /dev/shm, None where not known: it may have gone with the run."""
    is_nodes = death.shm_size_bytes in (None, window.host.shm_size_bytes)
    return (window.host.shm_size_bytes, window.host.shm_used_bytes) if is_nodes else (death.shm_size_bytes, None)


def _killed(window: Window, death: WorkerDeath) -> tuple[str, str]:
    fewer = fewer_workers(window)
    if death.signal != SIGKILL:
        return f"a loader worker crashed with {_name(death)}", (
            "run the dataset alone, with num_workers=0 and python -X faulthandler: a library that the worker calls has crashed"
        )
    if death.out_of_memory:
        return "a loader worker was killed by the OOM killer", (
            f"{fewer}, prefetch_factor=1 or smaller batches; or {more_memory(death.memory_limit_bytes)}"
        )
    if death.out_of_memory is None:
        return "a loader worker was killed with SIGKILL, probably by the OOM killer", (
            f"check for an out-of-memory kill (dmesg | grep -i oom), then {fewer} or more memory for the job"
        )
    return "a loader worker was killed with SIGKILL, but not by the OOM killer", (
        "find out what sent SIGKILL (the scheduler, a time limit, systemd-oomd, another user): the OOM killer was not active at that time"
    )


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _name(death: WorkerDeath) -> str:
    return Signals(death.signal).name if death.signal in set(Signals) else f"signal {death.signal}"


@killed_rule("reduce the memory of the training process, its workers or its batches, or give the job more memory")
def training_killed(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a run is lost and the kernel has counted an out-of-memory kill since the run's last message."""
    oom = window.oom
    if oom is None or window.worker_deaths:
        return None
    where, limit, used, own = _WHERE[oom.where], oom.limit_bytes, oom.used_bytes, oom.resident_bytes
    title = "the training process was killed by the OOM killer"
    if oom.where != "group" or window.world_size > 1:  # the kernel may have killed another rank, or another program
        title = f"the training process is gone, and the OOM killer was active {where}"
    less = f"{fewer_workers(window)}, prefetch_factor=1 or smaller batches"
    # A sample from long before the limit was reached does not show what has grown since.
    has_most = used is not None and own is not None and used >= _MOST * (limit or 0) and own >= _MOST * used
    if has_most or window.workers == 0:
        less = "reduce the memory of the training process (dataset caches, accumulated results), or use smaller batches"
    text = f"the OOM killer killed {_processes(oom.kills)} {where} since the run's last message (oom_kill)"
    share = f", {percent(used / limit)} of the limit" if used is not None and limit else ""
    return found(
        title,
        1.0,
        Evidence("oom kills", oom.kills, "", text),
        *measured("memory limit", limit, "its cgroup is limited to {}", "bytes"),
        *measured("memory used", used, f"{{}} were in use at the last sample{share}", "bytes"),
        *measured("memory peak", oom.peak_bytes, "the peak was {}", "bytes"),
        *measured("resident memory", own, "the training process alone used {} at the last sample", "bytes"),
        severity="critical",
        advice=f"{less}; or {more_memory(limit)}",
    )


@lone("lower num_workers or prefetch_factor, or enlarge /dev/shm", explains=("stalled",), alert="ShmForecast")
def shm_exhaustion(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when /dev/shm is ≥ `shm_used` full, or will be with full queues (workers × prefetch_factor × batch)."""
    used, whole, forecast = window.host.shm_used_bytes, window.host.shm_size_bytes, queues_bytes(window)
    if not whole or used is None:
        return None
    text = f"/dev/shm: {size(used)} of {size(whole)} used ({percent(used / whole)})"
    evidence = [Evidence("shm used", used / whole, "ratio", text)]
    advice = "give the container a larger /dev/shm (docker run --shm-size=…, or an emptyDir with medium: Memory)"
    if forecast:
        text = f"{_queues(window)} need up to {size(forecast)}"
        evidence.append(Evidence("shm forecast", forecast / whole, "ratio", text))
        advice = larger_shm(max(used, forecast))
    ratio = max(used, forecast or 0) / whole
    if ratio < thresholds.shm_used:
        return None
    return found(
        "/dev/shm is nearly full: a loader worker may be killed by a bus error",
        min(1.0, ratio),
        *evidence,
        severity="critical" if ratio >= thresholds.shm_used_critical else "warning",
        advice=advice,
    )
