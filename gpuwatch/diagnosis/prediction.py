"""What more loader workers would gain, what they need, and where a lack of room shows. Pure arithmetic.

Times in seconds a step, sizes in bytes. A batch costs one worker `fetch_s`; W workers deliver one every `fetch_s / W`.
The step cannot be shorter than that, nor than its own transfer and compute, nor than the CPU time of a batch and of the
step itself on the cores that there are. `ceil(fetch_s / (transfer + compute))` workers feed it. What stays of the wait
is the handover of a ready batch to the training thread. An uncertain gain is not predicted, nor are workers advised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import fmean, stdev

from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, size
from gpuwatch.ledger.states import INPUT_WAIT
from gpuwatch.wire import Loader

HANDOVER_S = (0.0003, 0.004)  # duration of a handover where it cannot be measured: no workers, or never a batch ready
HANDOVER_BYTES_PER_S = (10e9, 1e9)
"""Rates at which a batch is then taken over, its pages first touched; at the lower a worker writes it to shared memory.
Measured: 33 MB cost the training thread 4 ms, and its step 21 ms more than without workers; 10 kB 1 ms."""
CROWDED = (1.2, 1.35)
"""By how much more at most a step on the CPU and its batch take, than their CPU time shows, where workers and step fill
the cores; the second where threads of the step wait for each other. Measured: 1.14 to 1.19 with one thread."""
FAIR = 0.25
"""The least share of its cores that a training gets, whatever else runs; its share now plus what is idle, if more."""
SPREAD = 0.9  # what workers deliver is known to a tenth: two runs of the same loader differ by that much
WORTH = 1.1  # the lowest gain to expect from which workers are advised
CONTENTION = 1.10
"""Workers slow the host that launches for a device, and with it the step, by at most this: 6.5–8% on recorded GPUs."""
START_S = 0.03
"""By how much a pass is longer for each worker that it starts by fork. Measured: 33 ms for one, 62 ms for three."""
MOST_A_CORE = 4  # workers for each core at most, even where they only wait: each also collates and hands over
SHM_USABLE = 0.8  # the share of /dev/shm that queues may fill
PREFETCH = 2  # batches that each worker prefetches where the loader does not set it: torch's default
_NEARLY_A_CORE = 0.25  # A core that is busy for no more than this share is a core for a worker
_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """A number of workers and what to expect of it."""

    workers: int
    needed: int  # how many would feed the step, if nothing limited them
    limit: str | None  # what limits them: "cores", "memory" or "/dev/shm"; None: `workers` are enough
    step_s: tuple[float, float]  # shortest and longest step to expect; not in the note of a run that is too short
    speedup: tuple[float, float]  # lowest and highest gain in throughput that goes with it
    queue_bytes: int | None
    """What full queues take of /dev/shm and memory, for all the run's ranks on this node; None: unknown batch size."""
    memory_bytes: int | None = None  # the same with the workers' own memory; None: that or the batch size is unknown
    on_cpu: bool = True  # whether the fetches compute, rather than wait
    promises: bool = True  # whether a step can be predicted: False for a short run
    larger_shm: str = ""  # how to enlarge /dev/shm, which is too small for `queue_bytes`; empty: it is not

    @property
    def gain(self) -> tuple[float, float]:
        """The lowest and highest gain, as a finding states them."""
        return round(self.speedup[0], 2), round(self.speedup[1], 2)

    @property
    def note(self) -> str:
        """What goes with the advice, e.g. "; expect a step of 40 ms to 52 ms; takes up to 96 MiB of /dev/shm"."""
        low, high = self.step_s
        text = f" (the step needs {self.needed}; limited by {self.limit})" if self.limit is not None else ""
        if self.promises:
            text += f"; expect a step of {duration(low)}" + (f" to {duration(high)}" if high > 1.05 * low else "")
        if self.queue_bytes:
            text += f"; takes up to {size(self.queue_bytes)} of /dev/shm"
        if self.queue_bytes and self.memory_bytes is not None:
            text += f" and {size(self.memory_bytes)} of memory in total"
        return text + (f"; /dev/shm is too small for that: {self.larger_shm}" if self.larger_shm else "")


def free_cores(window: Window) -> int | None:
    """Return the cores for the loader workers of one rank; at least 1, None when not known.

    One core is set aside for each rank, unless measured to be idle: a thread that waits for its device needs little.
    """
    cores, ranks, measured = window.host.cpu_cores, window.local_world_size, _available_cores(window)
    if cores is None:
        return None
    idle = 0 if measured is None else min(cores // ranks, int(measured + _NEARLY_A_CORE))
    return max(1, (cores - ranks) // ranks, idle)


def plan(window: Window, wait_s: float, rest_s: float, *, on_cpu: bool, hidden_s: float = 0.0) -> Plan:
    """Return the number of workers that feeds the step, within cores (for fetches that compute), memory and /dev/shm.

    The range: where cores are busy with other work, workers may get no more than what is idle now and what they have.
    """
    have = window.workers or 0
    now_s = wait_s + rest_s
    # What a batch costs one worker: W workers that are the limit deliver a batch a step, each one in W steps.
    fetch_s = have * now_s or wait_s + hidden_s + (window.loader.batch_bytes or 0) / HANDOVER_BYTES_PER_S[1]
    handover_s = _handover(window, have)
    needed = max(1, ceil(fetch_s / max(rest_s, handover_s[1])))  # no workers hand batches over faster than that
    caps = _caps(window, have, on_cpu)
    in_shm = None if have else caps.pop("/dev/shm", None)  # which can be enlarged before there are workers
    limit = min(caps, key=caps.__getitem__, default=None)
    workers = needed if limit is None else max(1, min(needed, caps[limit]))
    paced_s = fetch_s / workers if have else max(fetch_s / workers, paced(window, workers, rest_s))
    error = 0.0 if have else _standard_error(window.steps.data_wait_s)
    best_s = max(rest_s + handover_s[0], (SPREAD - error) * paced_s)
    sent_s = handover_s[1] if on_cpu and not have else 0.0  # for a worker to send it: now in its fetches
    slowed_s = rest_s * (CONTENTION if window.timeline == "device" else 1.0)
    worst_s = max(slowed_s + handover_s[1], (1 + error) * paced_s + sent_s / workers)
    if window.host.cpu_cores is not None:
        cores, available = window.host.cpu_cores / window.local_world_size, _available_cores(window)
        # Seconds on a core a step: those of its batch, and of the step itself by as many threads as it has at work.
        ratio = float(on_cpu) if window.fetch_cpu_ratio is None else min(1.0, window.fetch_cpu_ratio)
        on_core_s = sum(window.worker_cpu_ratios or ()) * now_s if have else fetch_s * ratio
        own = None if window.timeline == "device" else window.process_cores
        threads = 1.0 if own is None else max(0.0, own - (0.0 if have else ratio * wait_s / max(rest_s, 1e-9)))
        room = min(cores, max(FAIR * cores, (cores if available is None else available) + threads * rest_s / now_s))
        best_s = max(best_s, (min(threads, 1.0) * rest_s + on_core_s) / cores)
        fills = threads + workers * on_core_s / fetch_s > room
        crowded = CROWDED[threads > 1] if fills and (threads > 1 or sent_s) else 1.0
        worst_s = max(worst_s, (crowded * (threads * rest_s + on_core_s) + max(sent_s, handover_s[0])) / room)
    each, own = _queue_bytes_a_worker(window), window.worker_private_bytes
    needed_bytes = workers * (each or 0) + (window.host.shm_used_bytes or 0)
    return Plan(
        workers=workers,
        needed=needed,
        limit=limit if workers < needed else None,
        step_s=(best_s, worst_s),
        speedup=(now_s / worst_s, now_s / best_s) if best_s > 0 else (1.0, 1.0),
        queue_bytes=None if each is None else workers * each,
        memory_bytes=None if each is None or own is None else workers * (each + own * window.local_world_size),
        on_cpu=on_cpu,
        promises=not window.is_short,
        larger_shm=larger_shm(needed_bytes) if in_shm is not None and workers > in_shm else "",
    )


def paced(window: Window, workers: int, rest_s: float) -> float:
    """Return the mean step if workers made the fetches, in order: once queues are full, all wait for a slow one."""
    ahead = workers * prefetch_of(window.loader)
    free_s, taken_s = [0.0] * workers, [0.0] * ahead
    for number, wait_s in enumerate(window.steps.data_wait_s):
        fetch_s = wait_s * (window.loader.wait_ratio or 1.0)
        free_s[number % workers] = max(free_s[number % workers], taken_s[number]) + fetch_s
        taken_s.append(max(taken_s[-1] + rest_s, free_s[number % workers]))
    settled_s = taken_s[min(2 * ahead, len(taken_s) - len(window.steps) // 2) :]  # their start is left out
    return (settled_s[-1] - settled_s[0]) / max(1, len(settled_s) - 1) if settled_s else 0.0


def _standard_error(times_s: Sequence[float]) -> float:
    """Return that of the mean, relative to it, at most 0.5: other batches have more or fewer of the few slow items."""
    mean_s = fmean(times_s) if len(times_s) > 1 else 0.0
    return min(0.5, stdev(times_s) / mean_s / sqrt(len(times_s))) if mean_s > 0 else 0.0


def _handover(window: Window, workers: int) -> tuple[float, float]:
    """Return the shortest and longest time that taking a ready batch may cost a step.

    Where batches are sometimes ready, the shortest waits are that time. What the device's queue hides costs nothing.
    """
    waits = sorted(window.steps.later(window.steps.data_wait_s)) if window.steps.epoch_start else []
    size_bytes = window.loader.batch_bytes or 0
    low, high = (least + size_bytes / rate for least, rate in zip(HANDOVER_S, HANDOVER_BYTES_PER_S, strict=True))
    if workers and waits and waits[len(waits) // 10] <= high:
        low = high = waits[len(waits) // 10]
    return (0.0 if window.timeline == "device" else low), high


def _available_cores(window: Window) -> float | None:
    """Return the cores that are idle now plus those that already make batches, for one rank; None if not measured."""
    host, fetching = window.host, sum(window.worker_cpu_ratios or ())
    if not window.workers:
        on_cpu = 1.0 if window.fetch_cpu_ratio is None else min(1.0, window.fetch_cpu_ratio)
        fetching = window.share(INPUT_WAIT) * on_cpu
    if host.cpu_cores is None or host.cpu_busy_ratio is None:
        return None
    return (1 - host.cpu_busy_ratio) * host.cpu_cores / window.local_world_size + fetching


def _queue_bytes_a_worker(window: Window) -> int | None:
    each = window.loader.queued_bytes
    return None if each is None else prefetch_of(window.loader) * each * window.local_world_size


def _caps(window: Window, have: int, on_cpu: bool) -> dict[str, int]:
    """Return how many workers /dev/shm, the memory and the cores have room for, as far as that is known."""
    host, ranks, queue, caps = window.host, window.local_world_size, _queue_bytes_a_worker(window), {}
    if queue and host.shm_size_bytes is not None and host.shm_used_bytes is not None:
        others = max(0, host.shm_used_bytes - have * queue)  # what others keep there
        caps["/dev/shm"] = max(0, int(SHM_USABLE * (host.shm_size_bytes - others))) // queue
    each = (queue or 0) + (window.worker_private_bytes or 0) * ranks
    if queue is not None and each and host.memory_available_bytes is not None:
        caps["memory"] = have + host.memory_available_bytes // each
    if host.cpu_cores is not None and (cores := free_cores(window)) is not None:
        caps["cores"] = cores if on_cpu else max(have, MOST_A_CORE * host.cpu_cores // ranks, 1)
    return caps


def prefetch_of(loader: Loader) -> int:
    """Return the number of batches that each worker prefetches."""
    return loader.prefetch_factor or PREFETCH


def queues_bytes(window: Window) -> int:
    """Return the bytes in the full queues of all ranks on the node; 0 without workers or a known batch size."""
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
    more = "give the job more memory" if limit_bytes is None else f"raise the job's memory limit of {size(limit_bytes)}"
    return f"{more} (docker run --memory=…, resources.limits.memory, sbatch --mem)"
