"""Workers, or their absence, that make batches too slowly: the CPU is the limit."""

from __future__ import annotations

from statistics import median

from gpuwatch.diagnosis.finding import Evidence, Finding, measured, rule
from gpuwatch.diagnosis.input_wait import cpu_evidence, input_rule, input_wait, place_evidence, queue_evidence
from gpuwatch.diagnosis.prediction import free_cores, plan_for, prefetch_of
from gpuwatch.diagnosis.rules.input_rhythm import round_correlation
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent, size


@input_rule(explains=("burst_every_n", "input_unexplained"))
def input_single_process(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for a loader that is known to have no workers."""
    wait, on_cpu = input_wait(window, thresholds), window.fetch_cpu_ratio
    if wait is None or window.workers != 0:
        return None
    computes = on_cpu is None or on_cpu >= thresholds.fetch_on_cpu
    text = "{} of a fetch is CPU work (decoding, augmentation)"
    if not computes:
        text = "only {} of a fetch is CPU work: it waits for the disk, the network or a lock"
    plan = plan_for(window, wait, on_cpu=computes)
    return wait.finding(
        "input_single_process",
        "batches are made in the training process",
        Evidence("loader workers", 0, "", "num_workers=0"),
        *measured("fetch on CPU", on_cpu if on_cpu is None else min(1.0, on_cpu), text),
        *place_evidence(window),
        advice=f"DataLoader(num_workers={plan.workers}, persistent_workers=True){plan.note}",
        gain=plan.gain,
    )


@input_rule(explains=("burst_every_n", "input_cpu", "input_unexplained"))
def slow_worker(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits once in every round of the workers, and one of them alone is busy on the CPU.

    Batches are delivered in the order of the requests, so that the queues of the faster workers fill up and they wait.
    """
    wait, ratios = input_wait(window, thresholds), window.busy_ratios
    if wait is None or len(ratios) < 3 or window.workers != len(ratios):
        return None
    if (round_correlation(window, thresholds, len(ratios)) or 0.0) < thresholds.burst_correlation:
        return None
    busiest, *others = sorted(ratios, reverse=True)
    usual = median(others)
    if busiest < thresholds.worker_busy or usual > thresholds.worker_uneven * busiest:
        return None
    text = f"one worker is busy {percent(busiest)} of the time, the other {len(others)} {percent(usual)} (median)"
    return wait.finding(
        "slow_worker",
        "one loader worker is slow, and the others wait for it",
        Evidence("slowest worker", busiest, "ratio", text),
        advice="spread expensive items and large shards over the workers, or bound the work of one item: this worker's part of the data costs more",
    )


@input_rule(explains=("burst_every_n", "input_unexplained"))
def input_cpu(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits, the workers are on the CPU all the time, and the node has idle cores."""
    wait, ratios, host = input_wait(window, thresholds), window.busy_ratios, window.host
    if wait is None or not ratios or not window.workers:
        return None
    if host is None or host.cpu_busy_ratio is None or host.cpu_busy_ratio >= thresholds.cores_exhausted:
        return None
    if (host.cpu_throttled_ratio or 0.0) >= thresholds.quota_used_up:
        return None  # the quota limits the workers that there are
    busy, cores = sum(ratio >= thresholds.worker_busy for ratio in ratios), free_cores(window)
    if busy < len(ratios) / 2 or cores is None or cores <= window.workers:
        return None
    plan = plan_for(window, wait, on_cpu=True)
    if plan.workers <= window.workers:
        return None  # there are cores, but no room for their queues: /dev/shm has its own cause
    idle = round((1 - host.cpu_busy_ratio) * (host.cpu_cores or 0))
    mean = sum(ratios) / len(ratios)
    return wait.finding(
        "input_cpu",
        "too few loader workers for the CPU time that a batch takes",
        Evidence("worker CPU", mean, "ratio", f"{busy} of {len(ratios)} loader workers are busy on the CPU ({mean:.0%} of a core on average)"),
        Evidence("idle cores", idle, "cores", f"about {idle} of {host.cpu_cores} cores are idle"),
        *queue_evidence(window),
        advice=f"num_workers {window.workers} → {plan.workers}{plan.note}",
        gain=plan.gain,
    )  # fmt: skip


_CHEAPER = "make a batch cheaper (decode once and cache, lighter or vectorised transforms, transforms on the GPU)"


@input_rule(explains=("burst_every_n", "too_many_workers", "input_unexplained"))
def input_cpu_saturated(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for busy workers, and the cores are fully used, all given to workers, or limited by a quota."""
    wait, ratios, host = input_wait(window, thresholds), window.busy_ratios, window.host
    if wait is None or not ratios or not window.workers or host is None or host.cpu_busy_ratio is None:
        return None
    cores = free_cores(window)
    exhausted = host.cpu_busy_ratio >= thresholds.cores_exhausted
    throttled = (host.cpu_throttled_ratio or 0.0) >= thresholds.quota_used_up
    all_given = cores is not None and window.workers >= cores and max(ratios) >= thresholds.worker_busy
    # Where the time in the run queue is known, workers that compute are busy nearly always, however full the cores are.
    working = sum(ratios) / len(ratios) > (thresholds.worker_sleeping if window.worker_busy_ratios else 0.1)
    if not working or not (exhausted or all_given or throttled):
        return None
    title, quota = "the CPUs cannot make batches fast enough", []
    advice = f"{_CHEAPER}, or give the job more cores per GPU; more workers will not help"
    if throttled:
        title = "the job's CPU quota limits the loader workers"
        advice = f"raise the job's CPU limit (docker run --cpus, resources.limits.cpu), or {_CHEAPER}; more workers will not help"
        text = f"the CPU quota of {host.cpu_quota_cores:g} cores was used up in {{}} of its periods of 100 ms"
        quota = measured("CPU throttled", host.cpu_throttled_ratio, text)
    return wait.finding("input_cpu_saturated", title, *quota, *cpu_evidence(host), advice=advice)


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="GpuStarved")
def too_many_workers(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when there are twice as many workers as cores, enough to fill them alone, and tasks queue for the cores."""
    loader, host, ranks = window.loader, window.host, window.local_world_size
    if loader is None or not loader.num_workers or host is None or len(window.steps) < thresholds.min_steps:
        return None
    if host.cpu_cores is None or host.cpu_busy_ratio is None or host.cpu_pressure_ratio is None:
        return None
    if sum(window.busy_ratios) * ranks < thresholds.cores_exhausted * host.cpu_cores:
        return None  # others fill the cores: fewer workers that sleep would change nothing
    workers = loader.num_workers * ranks
    if workers < thresholds.workers_per_core * host.cpu_cores:
        return None
    if host.cpu_busy_ratio < thresholds.cores_exhausted or host.cpu_pressure_ratio < thresholds.cpu_pressure:
        return None
    fewer, freed = free_cores(window) or 1, ""
    if loader.batch_bytes is not None:
        freed = (
            f"; frees up to {size((workers - fewer * ranks) * prefetch_of(loader) * loader.batch_bytes)} of /dev/shm"
        )
    return Finding(
        cause="too_many_workers",
        severity="warning",
        title="more loader workers than the cores can run",
        ratio=min(1.0, host.cpu_pressure_ratio),
        evidence=(
            Evidence("workers", workers, "", f"{workers} loader workers on {host.cpu_cores} cores"),
            *cpu_evidence(host),
        ),
        advice=f"num_workers {loader.num_workers} → {fewer}: as many batches with fewer context switches and less memory{freed}",
    )
