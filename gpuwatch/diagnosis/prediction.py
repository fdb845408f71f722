"""What more loader workers would gain, what they need, and where a lack of room shows. Pure arithmetic.

Times in seconds a step, sizes in bytes. A batch costs one worker `fetch_s`; W workers deliver one every `fetch_s / W`. The step cannot
be shorter than that, nor than its own transfer and compute: `ceil(fetch_s / (transfer + compute))` workers feed it. What stays of the
wait is the handover: the training thread takes a ready batch out of a worker's queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, size
from gpuwatch.ledger.states import INPUT_WAIT
from gpuwatch.wire import Loader

HANDOVER_S = (0.0003, 0.003)
"""Duration of a handover where it cannot be measured: without workers, or while none of them ever has a batch ready."""
CONTENTION = 1.10
"""Workers slow down the host that launches for a device, and with it the rest of the step, by at most this factor: 6.5–8% on recorded GPUs."""
MOST_A_CORE = 4
"""Workers for each core at most, even where they only wait: each is a process that also unpickles, collates and hands over."""
SHM_USABLE = 0.8  # the share of /dev/shm that queues may fill
PREFETCH = 2  # batches that each worker prefetches where the loader does not set it: torch's default
_NEARLY_A_CORE = 0.25  # A core that is busy for no more than this share is a core for a worker
_LEAST_OF_A_CORE = 0.1
_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """A number of workers and what to expect of it."""

    workers: int
    needed: int  # how many would feed the step, if nothing limited them
    limit: str | None  # what limits them: "cores", "memory" or "/dev/shm"; None: `workers` are enough
    step_s: tuple[float, float]
    """Shortest and longest step to expect. The note leaves it out where the run is too short for a prediction."""
    speedup: tuple[float, float]  # lowest and highest gain in throughput that goes with it
    queue_bytes: int | None
    """What full queues take of /dev/shm and of memory, for all of the run's ranks on this node; None: the batch size is not known."""
    memory_bytes: int | None = None
    """The same with the workers' own memory; None: that, or the batch size, is not known."""
    promises: bool = True  # whether a step can be predicted: False for a short run

    @property
    def gain(self) -> tuple[float, float]:
        """The lowest and highest gain, as a finding states them."""
        return round(self.speedup[0], 2), round(self.speedup[1], 2)

    @property
    def note(self) -> str:
        """What goes with the advice, e.g. "; expect a step of 40 ms to 52 ms; takes up to 96 MiB of /dev/shm"."""
        low, high = self.step_s
        text = f" ({self.needed} would feed the step, limited by {self.limit})" if self.limit is not None else ""
        if self.promises:
            text += f"; expect a step of {duration(low)}" + (f" to {duration(high)}" if high > 1.05 * low else "")
        if self.queue_bytes is not None:
            text += f"; takes up to {size(self.queue_bytes)} of /dev/shm"
        if self.memory_bytes is not None:
            text += f" and {size(self.memory_bytes)} of memory in total"
        return text


def fetch_seconds(workers: int, wait_s: float, rest_s: float, hidden_s: float = 0.0) -> float:
    """Return what a batch costs one worker.

    Without workers that is the training thread's own wait. W workers that are the limit deliver a batch a step, each one in W steps.
    """
    return wait_s + hidden_s if workers == 0 else workers * (wait_s + rest_s)


def workers_needed(fetch_s: float, rest_s: float) -> int:
    """Return how many workers deliver a batch as often as the step takes one."""
    return max(1, ceil(fetch_s / rest_s)) if rest_s > 0 else 1


def free_cores(window: Window) -> int | None:
    """Return the cores for the loader workers of one rank; at least 1, None when not known.

    One core is set aside for each rank, unless it is measured to be idle: a training thread that waits for its device needs little.
    """
    cores, ranks, measured = window.host.cpu_cores, window.local_world_size, _available_cores(window)
    if cores is None:
        return None
    idle = 0 if measured is None else min(cores // ranks, int(measured + _NEARLY_A_CORE))
    return max(1, (cores - ranks) // ranks, idle)


def plan(window: Window, wait_s: float, rest_s: float, *, on_cpu: bool, hidden_s: float = 0.0) -> Plan:
    """Return the number of workers that feeds the step, within cores (for fetches that compute), memory and /dev/shm.

    The range: where cores are busy with other work, the workers may get no more than what is idle now and what they have.
    """
    have = window.workers or 0
    now_s = wait_s + rest_s
    fetch_s = fetch_seconds(have, wait_s, rest_s, hidden_s)
    handover_s = _handover(window, have)
    needed = workers_needed(fetch_s, max(rest_s, handover_s[1]))  # no workers hand batches over faster than that
    caps = {"/dev/shm": _shm_cap(window, have), "memory": _memory_cap(window, have)}
    if on_cpu:
        caps["cores"] = free_cores(window)
    elif window.host.cpu_cores is not None:
        caps["cores"] = max(have, MOST_A_CORE * window.host.cpu_cores // window.local_world_size, 1)
    known = {name: cap for name, cap in caps.items() if cap is not None}
    limit = min(known, key=lambda name: known[name], default=None)
    workers = needed if limit is None else max(1, min(needed, known[limit]))
    best_s = min(max(rest_s + handover_s[0], fetch_s / workers), now_s)
    at_once = _available_cores(window) if on_cpu else None
    at_work = float(workers) if at_once is None else max(_LEAST_OF_A_CORE, min(float(workers), at_once))
    slowed_s = rest_s * (CONTENTION if window.timeline == "device" else 1.0)
    worst_s = min(max(slowed_s + handover_s[1], fetch_s / at_work), now_s)
    each, own = _queue_bytes_a_worker(window), window.worker_private_bytes
    return Plan(
        workers=workers,
        needed=needed,
        limit=limit if workers < needed else None,
        step_s=(best_s, worst_s),
        speedup=(now_s / worst_s, now_s / best_s) if best_s > 0 else (1.0, 1.0),
        queue_bytes=None if each is None else workers * each,
        memory_bytes=None if each is None or own is None else workers * (each + own * window.local_world_size),
        promises=not window.is_short,
    )


def _handover(window: Window, workers: int) -> tuple[float, float]:
    """Return the shortest and longest time that taking a ready batch may cost a step.

    Where batches are sometimes ready, the shortest waits are that time. What the device's queue hides costs nothing.
    """
    waits = sorted(w for w, first in zip(window.steps.data_wait_s, window.steps.epoch_start, strict=False) if not first)
    low, high = HANDOVER_S
    if workers and waits and waits[len(waits) // 10] <= high:
        low = high = waits[len(waits) // 10]
    return (0.0 if window.steps.hidden_wait_s else low), high


def _available_cores(window: Window) -> float | None:
    """Return the cores that are idle now plus those that already make batches, for one rank; None where not measured."""
    host, fetching = window.host, sum(window.worker_cpu_ratios or ())
    if not window.workers:
        on_cpu = 1.0 if window.fetch_cpu_ratio is None else min(1.0, window.fetch_cpu_ratio)
        fetching = window.share(INPUT_WAIT) * on_cpu
    if host.cpu_cores is None or host.cpu_busy_ratio is None:
        return None
    return (1 - host.cpu_busy_ratio) * host.cpu_cores / window.local_world_size + fetching


def _queue_bytes_a_worker(window: Window) -> int | None:
    loader = window.loader
    return None if loader.batch_bytes is None else prefetch_of(loader) * loader.batch_bytes * window.local_world_size


def _shm_cap(window: Window, workers: int) -> int | None:
    """Return how many workers' queues fit into /dev/shm next to what others keep there."""
    each, room, used = _queue_bytes_a_worker(window), window.host.shm_size_bytes, window.host.shm_used_bytes
    if not each or room is None or used is None:
        return None
    others = max(0, used - workers * each)
    return max(0, int(SHM_USABLE * (room - others))) // each


def _memory_cap(window: Window, workers: int) -> int | None:
    """Return how many workers, with their queues, fit into the memory that is available; the workers' own memory is left out where not known."""
    queue, available = _queue_bytes_a_worker(window), window.host.memory_available_bytes
    each = (queue or 0) + (window.worker_private_bytes or 0) * window.local_world_size
    return None if queue is None or not each or available is None else workers + available // each


def prefetch_of(loader: Loader) -> int:
    """Return the number of batches that each worker prefetches."""
    return loader.prefetch_factor or PREFETCH


def queues_bytes(window: Window) -> int:
    """Return the bytes in the full queues of all ranks on the node; 0 without workers, or where the size of a batch is not known."""
    return (window.workers or 0) * (_queue_bytes_a_worker(window) or 0)


def larger_shm(needed_bytes: int, because: str = "") -> str:
    """Return the advice to give this much and a quarter more; `because` follows the number."""
    mib = -(-needed_bytes * 5 // 4 // _MIB)
    return f"docker run --shm-size={mib}m{because}, or fewer workers, or prefetch_factor=1"


def fewer_workers(window: Window) -> str:
    """Return e.g. "num_workers 8 → 4"."""
    workers = window.workers or 0
    return f"num_workers {workers} → {workers // 2}" if workers > 1 else "fewer workers"


def more_memory(limit_bytes: int | None) -> str:
    """Return how to raise a job's memory limit; None: it has none that is known."""
    more = "more memory" if limit_bytes is None else f"more than its {size(limit_bytes)}"
    return f"give the job {more} (docker run --memory=…, resources.limits.memory, sbatch --mem)"
