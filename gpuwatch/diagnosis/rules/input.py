"""Training waits for data: what the wait costs, and its reasons. Workers, or none of them, that compute too slowly;
workers that wait for a disk, the network or a lock; and a wait whose reason is not proven. Times in seconds a step."""

from dataclasses import dataclass
from functools import partial
from statistics import median

from gpuwatch.diagnosis.finding import Evidence, Finding, found, lone, measured, place_evidence, speedup_without
from gpuwatch.diagnosis.prediction import START_S, WORTH, Plan, free_cores, plan, prefetch_of
from gpuwatch.diagnosis.rules.input_rhythm import round_correlation
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import MeanStep, Window
from gpuwatch.formatting import duration, percent, size
from gpuwatch.host.blocked import DISK, LOCK, NETWORK, QUEUE, SLEEP
from gpuwatch.host.frames import ELSEWHERE, RECEIVING
from gpuwatch.ledger.states import COMPILE, COMPUTE, INPUT_WAIT, OTHER

_EXPLAINED = ("burst_every_n", "input_unexplained")
input_rule = partial(
    lone, explains=_EXPLAINED, explained_by=("stalled",), stacks="workers", alert="GpuStarved", delays_rank="input"
)
"""Makes a rule about a slow loader, which has these facts in common with all of them."""


Gain = tuple[float, float] | None
_SHORT_PASS = 0.1  # a pass of which the start of its workers would take so much is short
_DIFFERS = 0.05  # a share of the time that differs so much from that of the mean step is that of other steps too
_MOST_BOUND = 10.0  # a step without any wait that is so much shorter is out of reach
_MOSTLY_CALLS_S = 0.001  # so short a step calls torch from Python most of the time
_UNCERTAIN = "the benefit of workers on these cores is uncertain: measure it (gpuwatch tune)"
_AHEAD = "let workers wait instead of the training thread (DataLoader(num_workers=…)), or read from closer storage (a local disk, a cache)"
_CHEAPER = "make a batch cheaper (decode once and cache, lighter or vectorised transforms, transforms on the GPU)"


@dataclass(frozen=True)
class InputWait:
    """The wait for input, first batches left out: `epoch_start_pause` is about those."""

    window: Window
    step: MeanStep
    share: float  # of the window's time, 0–1
    thresholds: Thresholds

    @property
    def mean(self) -> str:
        wait_s, whole_s = self.step.wait_s, self.step.whole_s
        text = f"on average {duration(wait_s)} of a {duration(whole_s)} step"
        return text + ", without start-up and first batches" * (abs(wait_s / whole_s - self.share) > _DIFFERS)

    @property
    def others_s(self) -> float:
        """The wait for other loaders than the one that is diagnosed, in seconds a step."""
        return (1 - (self.window.loader.wait_ratio or 1.0)) * self.step.wait_s

    def finding(
        self, title: str, *evidence: Evidence, advice: str, gain: Gain = None, plan: Plan | None = None
    ) -> Finding:
        """Return the finding of a reason for this wait. `gain`: of the advice; None: at most a step without any wait.
        `plan`: workers to advise, if certain."""
        text = f"training waited for data {percent(self.share)} of the time ({self.mean})"
        loader, rest_s = self.window.loader, self.step.rest_s + self.others_s
        bound = round(self.step.whole_s / rest_s, 2) if rest_s else _MOST_BOUND
        if plan is not None and plan.speedup[0] >= WORTH:
            advice, gain = advice + plan.note, plan.gain
        elif plan is not None:
            advice, bound = f"{_CHEAPER if plan.on_cpu else _AHEAD}; {_UNCERTAIN}", _MOST_BOUND
        if loader.wait_ratio is not None:
            advice = f"for the loader over {loader.dataset} (num_workers={loader.num_workers}), one of several that feed a step: {advice}"
            text += f", {percent(loader.wait_ratio)} of that for the loader over {loader.dataset}"
        return found(
            title,
            self.share,
            Evidence("input wait", self.share, "ratio", text),
            *evidence,
            *place_evidence(self.window.worker_place if self.window.workers else None, "a worker's fetch"),
            severity=self.thresholds.severity(self.share),
            advice=advice,
            predicted_speedup=gain[1] if gain else bound if bound < _MOST_BOUND else None,
            predicted_range=gain,
        )

    def plan(self, on_cpu: bool) -> Plan:
        """Return the workers that feed the step. They do not run what is around the loader's own fetch."""
        around = self.window.around_place if on_cpu and self.window.workers == 0 else None
        wait_s = (self.step.wait_s - self.others_s) * (1 - (around.ratio if around else 0.0))
        rest_s = self.step.rest_s + self.step.wait_s - wait_s
        return plan(self.window, wait_s, rest_s, on_cpu=on_cpu, hidden_s=self.step.hidden_s)

    def more_workers(self, reason: str) -> tuple[str, Gain]:
        """Return the advice to use more workers, as these mostly wait, and its gain; empty and None if they suffice."""
        plan, have = self.plan(on_cpu=False), self.window.workers
        if not have or plan.workers <= have:
            return "", None
        return f"; {reason} num_workers {have} → {plan.workers}{plan.note}", (1.0, plan.gain[1])


def input_wait(window: Window, thresholds: Thresholds) -> InputWait | None:
    """Return the wait for input; None when it is not worth a change, is only that of first batches, or is not known.

    Where only optimizer steps bound the steps, it is not known what the time between them is.
    """
    return None if window.bounded_by_optimizer else waited(window, thresholds)


def waited(window: Window, thresholds: Thresholds) -> InputWait | None:
    """The same, whatever bounds the steps."""
    step, share = window.mean_step, window.share(INPUT_WAIT)
    if sum(window.steps.epoch_start) > 1 and (waits_s := sum(window.steps.data_wait_s)):
        share *= step.wait_s * step.steps / waits_s  # of several first batches, as many are kept as of other steps
    if window.waits_hidden_in is not None or step.steps < thresholds.min_steps or share < thresholds.input_share:
        return None
    if step.wait_s <= 0 or step.wait_s < thresholds.input_share * step.whole_s:
        return None
    return InputWait(window, step, share, thresholds)


def queue_evidence(window: Window) -> list[Evidence]:
    """Return how often no batch was ready when one was requested; nothing without workers."""
    ready = f"({window.ready_batches:.1f} batches ready on average)" if window.ready_batches is not None else ""
    text = f"the next batch was not ready in {{}} of the fetches {ready}"
    return measured("empty queue", window.empty_fetch_ratio, text)


def cpu_evidence(window: Window) -> list[Evidence]:
    """Return how busy the node's cores are, and how often a task waited for one."""
    busy = measured("CPU busy", window.host.cpu_busy_ratio, "the node's cores are {} busy")
    text = "at least one task waited for a CPU {} of the time"
    return busy + measured("CPU pressure", window.host.cpu_pressure_ratio, text)


def blocked_evidence(window: Window, thresholds: Thresholds, kind: str, what: str, on: str) -> list[Evidence]:
    """Return the share of samples with workers blocked on one of `gpuwatch.host.blocked.WAITS`; nothing if too rare.

    Of two workers that share a lock, one holds it: the other one is found at it in fewer than half of the samples.
    """
    share = (window.worker_waits or {}).get(kind, 0.0)
    share_needed = thresholds.worker_waiting * (0.8 if kind == LOCK and window.workers == 2 else 1.0)
    evidence = measured(what, share, f"workers were blocked on {on} in {{}} of the samples")
    return evidence if share >= share_needed else []


@input_rule("set num_workers: the training process prepares the batches")
def input_single_process(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for a loader without workers (`num_workers=0`)."""
    wait, on_cpu = input_wait(window, thresholds), window.fetch_cpu_ratio
    if wait is None or window.workers != 0:
        return None
    computes = on_cpu is None or on_cpu >= thresholds.fetch_on_cpu
    text = "{} of a fetch is CPU work (decoding, augmentation)"
    if not computes:
        text = "only {} of a fetch is CPU work: the rest is waiting for the disk, the network or a lock"
    evidence = measured("fetch on CPU", on_cpu if on_cpu is None else min(1.0, on_cpu), text)
    around = window.around_place if computes else None  # else it may wait for a thread that takes the loader's batches
    if around is not None and around.has_most:
        advice = f"make {around.function} cheaper, or call it in the dataset or collate_fn, and use loader workers: they do not run code around the loader"
        title = f"the training thread itself works in a fetch, in {around.function}"
        return wait.finding(title, *evidence, *place_evidence(around), advice=advice)
    plan, pass_s, gain = wait.plan(on_cpu=computes), window.steps.mean_pass_s, None
    advice, start_s = f"DataLoader(num_workers={plan.workers}, persistent_workers=True)", plan.workers * START_S
    advice += f" over {window.loader.dataset}" * (pass_s is not None and window.loader.dataset is not None)
    certain = plan if pass_s is None or start_s < _SHORT_PASS * pass_s or plan.speedup[0] < WORTH else None
    if certain is None and pass_s is not None:
        takes, gain = f"which takes {duration(pass_s)}", (1.0, plan.gain[1])
        advice = f"one {advice} for all passes: a new one starts its workers at each, {takes}"
        if start_s >= pass_s:
            advice, gain = f"{_CHEAPER}, or passes longer: a start of workers takes longer than one, {takes}", None
    return wait.finding(
        "batches are prepared in the training process",
        Evidence("loader workers", 0, "", "num_workers=0"),
        *evidence,
        *place_evidence(window.fetch_place),
        advice=advice,
        gain=gain,
        plan=certain,
    )


@input_rule(
    "return few large tensors from the workers, not many Python objects; more workers will not help",
    explains=(*_EXPLAINED, "slow_worker", "input_cpu", "input_cpu_saturated"),
)
def input_handover(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits although batches are ready (behind a wrapper: while it runs the user's code), and its
    thread is on the CPU for ≥ `fetch_on_cpu` of a fetch, to unpickle or modify the batch. Half of that is enough if
    half of the samples of a fetch are in the code that receives and unpickles a batch."""
    wait, on_cpu, empty = input_wait(window, thresholds), window.fetch_cpu_ratio, window.empty_fetch_ratio
    is_full = (window.host.cpu_busy_ratio or 0.0) >= thresholds.cores_exhausted  # its thread also waits for a core then
    least, place = thresholds.worker_busy if is_full else thresholds.fetch_on_cpu, window.fetch_place
    if wait is None or not window.workers:
        return None
    is_receiving = place is not None and place.function == RECEIVING and place.has_most
    sends_late = on_cpu is not None and on_cpu < thresholds.fetch_on_cpu / 2  # the worker does, busy with its own code
    if not is_receiving or sends_late:
        if on_cpu is None or on_cpu < least:
            return None
        if (empty > 0.5) if empty is not None else (place is None or not place.has_most):
            return None  # a thread that waits for a core after each wake-up looks as if it worked
    text = "the training thread is on the CPU for {} of a fetch: it unpickles or modifies the batch"
    title = "receiving batches from the workers is expensive in the training thread"
    advice = "return few large tensors from the workers (collate and convert there) instead of many Python objects, and do little to a batch between loader and step"
    if place is not None and place.ratio >= 0.25 and place.file:  # a sampler, or a wrapper around the loader
        title = f"the training thread itself works in a fetch, in {place.function}"
        advice = f"make {place.function} cheaper, or let the workers do it (dataset, collate_fn)"
    return wait.finding(
        title,
        *measured("fetch on CPU", on_cpu and min(1.0, on_cpu), text),
        *place_evidence(place),
        *queue_evidence(window),
        advice=f"{advice}; more workers will not help",
    )


@input_rule("distribute expensive items and large shards over the workers", explains=(*_EXPLAINED, "input_cpu"))
def slow_worker(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when other workers have later batches ready in ≥ `worker_ahead` of the waits, or training waits once per
    round of the workers and only one of them is busy.

    Batches are delivered in the order of the requests, so the queues of the faster workers fill up, and these wait.
    """
    wait, ratios = input_wait(window, thresholds), window.busy_ratios
    if wait is None or (window.workers or 0) < 2 or (ratios and min(ratios) >= thresholds.worker_sleeping):
        return None  # where none of them waits for another one, they only take turns on the cores
    empty, text = window.empty_fetch_ratio, "in {} of the waits other workers already had later batches ready"
    is_often = empty is None or empty >= 0.5 / (window.workers or 1)  # it makes one batch of each round
    ratio = window.out_of_order_ratio if is_often else None
    evidence, ahead = measured("out of order", ratio, text), (ratio or 0.0) >= thresholds.worker_ahead
    if len(ratios) >= 3 and window.workers == len(ratios):
        busiest, *others = sorted(ratios, reverse=True)
        normal = median(others)
        text = f"one worker is busy {percent(busiest)} of the time, the other {len(others)}: {percent(normal)} (median)"
        uneven = busiest >= thresholds.worker_busy and normal <= thresholds.worker_uneven * busiest
        evidence += [Evidence("slowest worker", busiest, "ratio", text)] if uneven else []
        ahead |= uneven and (round_correlation(window, thresholds, len(ratios)) or 0.0) >= thresholds.burst_correlation
    if not ahead:
        return None
    return wait.finding(
        "one loader worker is slow, and the others wait for it",
        *evidence,
        advice="distribute expensive items and large shards over the workers, or limit the cost of one item: this worker's share of the data is more expensive",
    )


@input_rule("raise num_workers: CPU cores are idle")
def input_cpu(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits, at least half of the workers are busy on a core, and the node has idle cores."""
    wait, ratios, host = input_wait(window, thresholds), window.busy_ratios, window.host
    if wait is None or not ratios or not window.workers:
        return None
    if host.cpu_busy_ratio is None or host.cpu_busy_ratio >= thresholds.cores_exhausted:
        return None
    if (host.cpu_throttled_ratio or 0.0) >= thresholds.quota_used_up:
        return None  # the quota limits the workers that there are
    busy, cores = sum(ratio >= thresholds.worker_busy for ratio in ratios), free_cores(window)
    if busy < len(ratios) / 2 or cores is None or cores <= window.workers:
        return None
    plan = wait.plan(on_cpu=True)
    if plan.workers <= window.workers:
        return None  # there are cores, but no room for their queues: /dev/shm has its own cause
    mean, own = sum(ratios) / len(ratios), host.cpu_cores or 0
    # The node may have idle cores that a job with a quota cannot use.
    idle = max(0, round(min((1 - host.cpu_busy_ratio) * own, own - sum(ratios) * window.local_world_size)))
    text = f"{busy} of {len(ratios)} loader workers are busy on the CPU ({mean:.0%} of a core on average)"
    return wait.finding(
        "too few loader workers for the CPU time that a batch takes",
        Evidence("worker CPU", mean, "ratio", text),
        Evidence("idle cores", idle, "cores", f"about {idle} of {host.cpu_cores} cores are idle"),
        *queue_evidence(window),
        advice=f"num_workers {window.workers} → {plan.workers}",
        plan=plan,
    )


@input_rule("lighter transforms, cached data, or more cores per GPU", explains=(*_EXPLAINED, "too_many_workers"))
def input_cpu_saturated(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for busy workers, and ≥ `cores_exhausted` of the cores are busy, all cores have a
    worker, or the CPU quota is used up in ≥ `quota_used_up` of its periods."""
    wait, ratios, host = input_wait(window, thresholds), window.busy_ratios, window.host
    if wait is None or not ratios or not window.workers or host.cpu_busy_ratio is None:
        return None
    cores = free_cores(window)
    exhausted = host.cpu_busy_ratio >= thresholds.cores_exhausted
    throttled = (host.cpu_throttled_ratio or 0.0) >= thresholds.quota_used_up
    all_given = cores is not None and window.workers >= cores and max(ratios) >= thresholds.worker_busy
    # Where the time in the run queue is known, workers that compute are busy nearly always, however full the cores are.
    working = sum(ratios) / len(ratios) > (thresholds.worker_sleeping if window.worker_busy_ratios else 0.1)
    if not working or not (exhausted or all_given or throttled):
        return None
    title, quota = "the CPUs cannot prepare batches fast enough", []
    more = "will not help" if exhausted else "than cores hardly help: measure the effect (gpuwatch tune)"
    advice = f"{_CHEAPER}, or give the job more cores per GPU; more workers {more}"
    if throttled:
        title = "the job's CPU quota limits the loader workers"
        advice = f"raise the job's CPU limit (docker run --cpus, resources.limits.cpu), or {_CHEAPER}; more workers will not help"
        text = f"the CPU quota of {host.cpu_quota_cores:g} cores was used up in {{}} of the 100 ms periods"
        quota = measured("CPU throttled", host.cpu_throttled_ratio, text)
    return wait.finding(title, *quota, *cpu_evidence(window), advice=advice)


@lone("reduce num_workers to the number of cores", alert=None, runbook="GpuStarved")
def too_many_workers(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when ≥ `workers_per_core` workers per core fill ≥ `cores_exhausted` of the cores, and tasks wait for a CPU
    ≥ `cpu_pressure` of the time."""
    loader, host, ranks, each = window.loader, window.host, window.local_world_size, window.workers
    if not each or len(window.steps) < thresholds.min_steps or host.cpu_cores is None:
        return None
    busy, waiting = host.cpu_busy_ratio, host.cpu_pressure_ratio
    if busy is None or busy < thresholds.cores_exhausted or waiting is None or waiting < thresholds.cpu_pressure:
        return None
    if sum(window.busy_ratios) * ranks < thresholds.cores_exhausted * host.cpu_cores:
        return None  # others fill the cores: fewer workers that sleep would change nothing
    workers, fewer, freed = each * ranks, free_cores(window) or 1, ""
    if workers < thresholds.workers_per_core * host.cpu_cores:
        return None
    if loader.queued_bytes:
        queues_bytes = (workers - fewer * ranks) * prefetch_of(loader) * loader.queued_bytes
        freed = f"; frees up to {size(queues_bytes)} of /dev/shm"
    return found(
        "there are more loader workers than the cores can run",
        min(1.0, waiting),
        Evidence("workers", workers, "", f"{workers} loader workers on {host.cpu_cores} cores"),
        *cpu_evidence(window),
        advice=f"num_workers {each} → {fewer}: the same throughput with fewer context switches and less memory{freed}",
    )


@input_rule("read fewer bytes in larger pieces, use a faster disk or a local cache")
def input_disk(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for workers in uninterruptible sleep in ≥ `worker_waiting` of the samples."""
    wait, host = input_wait(window, thresholds), window.host
    blocked = blocked_evidence(window, thresholds, DISK, "workers at the disk", "disk I/O")
    if wait is None or not blocked or not window.workers:
        return None
    read = "" if host.disk_read_bytes_per_s is None else f" and {size(host.disk_read_bytes_per_s)}/s were read"
    reason = "if the disk is not fully busy," if host.disk_busy_ratio is None else "the disk is not fully busy:"
    more, gain = wait.more_workers(reason)
    if (host.disk_busy_ratio or 0.0) >= thresholds.disk_busy:
        more, gain = "", None
    return wait.finding(
        "loader workers wait for the disk",
        *blocked,
        *measured("I/O pressure", host.io_pressure_ratio, "at least one task waited for I/O {} of the time"),
        *measured("disk busy", host.disk_busy_ratio, f"the busiest disk was busy {{}} of the time{read}"),
        advice=f"read fewer bytes in larger pieces (large sequential record files, only the columns needed), or keep the data on a faster or local disk or in the page cache{more}",
        gain=gain,
    )


@input_rule("use a local cache, larger ranges per request, or more requests in flight")
def input_network(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for workers blocked on a socket in ≥ `worker_waiting` of the samples, none of which is
    busy on a CPU, while ≥ `network_bytes_per_s` arrive."""
    wait, rate = input_wait(window, thresholds), window.host.network_receive_bytes_per_s
    blocked = blocked_evidence(window, thresholds, NETWORK, "workers at the network", "a socket")
    if wait is None or not blocked or not window.workers:
        return None
    # An idle worker polls like one that waits for a socket. Workers are idle while another one is the slow one.
    another_is_slow = max(window.busy_ratios, default=0.0) >= thresholds.worker_busy
    if rate is None or rate < thresholds.network_bytes_per_s or another_is_slow:
        return None
    more, gain = wait.more_workers("for more requests in flight,")
    return wait.finding(
        "loader workers wait for the network",
        *blocked,
        Evidence("received", rate, "bytes/s", f"{size(rate)}/s arrive over the network"),
        advice=f"cache the data locally, reuse connections and read larger ranges; if the link is saturated, only fewer bytes help{more}",
        gain=gain,
    )


@input_rule("find the lock or the connection pool that the workers contend for")
def artificial_limit(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for workers blocked on a lock in ≥ `worker_waiting` of the samples, no disk is fully
    used, and the cores are not fully used by workers that compute ≥ `worker_sleeping` of the time."""
    wait, cpu, disk = input_wait(window, thresholds), window.host.cpu_busy_ratio, window.host.disk_busy_ratio
    blocked = blocked_evidence(window, thresholds, LOCK, "workers at a lock", "a lock")
    if wait is None or not blocked or cpu is None:
        return None
    if cpu >= thresholds.cores_exhausted and median(window.busy_ratios or (1.0,)) >= thresholds.worker_sleeping:
        return None
    if disk is not None and disk >= thresholds.disk_busy:
        return None
    busiest = "" if disk is None else f", the busiest disk {percent(disk)}"
    return wait.finding(
        "loader workers wait for a lock, not for a CPU or a disk",
        *blocked,
        *measured("CPU busy", cpu, f"the CPUs are {{}} busy{busiest}"),
        advice="find what the workers contend for (gpuwatch stacks): a lock, a shared file, a connection pool; give each worker its own. More workers will not help",
    )


@input_rule("see what the workers wait for (gpuwatch stacks)", explains=("burst_every_n",), fallback=True)
def input_unexplained(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for data, and no other cause is proven."""
    wait = input_wait(window, thresholds)
    if wait is None:
        return None
    evidence, gain, title = queue_evidence(window), None, "the loader is too slow; no cause is proven"
    advice = "capture the loader's stacks while training waits, to see what a fetch does (gpuwatch stacks)"
    ratios, fetch, place = window.worker_cpu_ratios, window.fetch_cpu_ratio, window.fetch_place
    if ratios:
        mean = sum(ratios) / len(ratios)
        text = f"a loader worker is on the CPU {{}} of the time (mean of {len(ratios)})"
        evidence += measured("worker CPU", mean, text)
        if window.worker_waits is not None:
            kind, share = max(window.worker_waits.items(), key=lambda item: item[1])
            text = f"the most frequent state of workers: {kind} ({{}} of the samples)"
            evidence += measured("workers blocked on", share, text)
            if kind == SLEEP and share >= thresholds.worker_waiting:
                title = "loader workers sleep: they wait on a timer (a retry, a rate limit, polling)"
        if window.worker_place is not None and window.worker_place.has_most and title.endswith("proven"):
            title = f"loader workers are slow: most of a fetch is in {window.worker_place.function}"
        if blocked_evidence(window, thresholds, QUEUE, "workers idle", "their queue"):
            advice = "send fewer and larger tensors, collate in the worker, and leave one core to the training thread: batches are ready, but receiving them is slow"
        elif mean < thresholds.worker_sleeping:
            more, gain = wait.more_workers("if the waits are independent of each other,")
            advice = f"find out what the workers wait for, storage, the network or a lock (gpuwatch stacks): they mostly sleep, so the CPU is not the limit{more}"
    elif window.workers is None and (fetch is not None or place is not None):
        computes = (fetch or 0.0) >= thresholds.fetch_on_cpu
        text = "{} of a fetch is CPU work" if computes else "only {} of a fetch is CPU work: the rest is waiting"
        evidence += measured("fetch on CPU", fetch and min(1.0, fetch), text) + place_evidence(window.fetch_place)
        if place is not None and place.has_most:
            title = f"training waits for data: most of a fetch is in {place.function}"
            title += ", in the training thread" * (not place.function.endswith(ELSEWHERE))
        inside = window.loader.dataset and f" (no DataLoader was found inside {window.loader.dataset})"
        advice = f"prepare batches in the background: a DataLoader with num_workers{inside or ''}, or a prefetch thread"
        if not computes:
            advice += "; if a thread already fills a queue, it is too slow: see what it waits for (gpuwatch stacks), or use more threads"
    return wait.finding(title, *evidence, advice=advice, gain=gain)


def between_passes(window: Window, thresholds: Thresholds) -> float:
    """Return the share of time between forward passes without gradients; 0 if small or below the wait between steps."""
    wait = waited(window, thresholds) if window.bounded_by_optimizer else None
    return window.gap_share if window.gap_share >= max(thresholds.input_share, wait.share if wait else 0.0) else 0.0


def passes_where(window: Window) -> str:
    place = window.gap_place
    most = f", most of it in {place}" if place is not None and place.has_most else ""
    return f"is spent between forward passes{most}"


def python_in_steps(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when, on a CPU, one function of the user's that is not torch's takes much of the steps."""
    place, on_cpu = window.python_place, window.device == "cpu" and not window.gpus
    if place is None or not on_cpu or len(window.steps) < thresholds.min_steps or input_wait(window, thresholds):
        return None  # a loader that starves the training comes first
    lost, is_tiny = place.ratio * window.share(COMPUTE), window.mean_step.rest_s < _MOSTLY_CALLS_S
    wait, before = waited(window, thresholds), window.fetch_place
    if wait is not None and before is not None and before[:2] == place[:2]:  # of the step's first batch, of several
        lost += before.ratio * wait.share
    least = thresholds.phase_share * (1 - window.share(COMPILE))  # which passes
    if is_tiny or place.ratio < thresholds.step_idle or lost < least:
        return None
    return found(
        f"much of a training step is Python code outside of torch, most of it in {place}",
        lost,
        *measured("Python in the step", place.ratio, f"{{}} of the step is Python code in {place}"),
        severity=thresholds.severity(lost),
        advice="make it cheaper, do it less often, or move it out of the training thread: into the loader's workers (augmentation), or into separate processes (an environment)",
        predicted_speedup=speedup_without(lost),
    )


@lone(
    "run environments in parallel, or move the code into the workers",
    stacks="training", alert="RunInefficient", delays_rank="host",
)  # fmt: skip
def outside_torch(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when no loader is watched, and ≥ `input_share` of the time passes between an optimizer step and the next
    forward pass, or between forward passes without gradients (an environment). Also found when ≥ `phase_share` of the
    time passes outside of steps and phases, half of it in one function, or, on a CPU, in one Python function that is
    not torch's."""
    place, outside = window.between_place, window.share(OTHER) - sum(window.declared.values())
    trains = len(window.steps) >= thresholds.min_steps
    if trains and place is not None and place.has_most and outside >= thresholds.phase_share:
        return found(
            f"much of the time is spent outside of training steps, most of it in {place}",
            outside,
            *measured("outside steps", outside, "{} of the time was outside of training steps and declared phases"),
            *place_evidence(place, "it"),
            advice="make it cheaper or run it less often; for a rollout, run several environments in parallel; wrap it in "
            '`with w.phase("..."):` (w = gpuwatch.Watch()) to report it by name',
        )
    if share := between_passes(window, thresholds):
        return found(
            f"much of the time {passes_where(window)}",
            share,
            *measured("between passes", share, "{} of the time was spent between forward passes without gradients"),
            *place_evidence(window.gap_place, "it"),
            severity=thresholds.severity(share),
            advice="if that is an environment's step, run several environments in parallel, each in its own process, with one forward "
            "pass for all of them; otherwise make it cheaper, run it less often, or move it to other processes",
        )
    if finding := python_in_steps(window, thresholds):
        return finding
    wait = waited(window, thresholds)
    if wait is None or not window.bounded_by_optimizer:
        return None
    place, around, workers = window.fetch_place, window.around_place, window.workers
    ahead = "prefetch batches (a DataLoader with num_workers, a thread), and log every N steps"
    if workers is not None:
        ahead = f"a thread reads batches from a DataLoader over {window.loader.dataset} with num_workers={workers}: use more workers"
    batch = "the code that gets the batch" + ("" if place is None else f" (most of the time is in {place})")
    advice = f"to measure how much of it is data wait, wrap {batch} in `with w.data():` (w = gpuwatch.Watch()); {ahead}"
    if around is not None and around.has_most:  # the training thread waits for no queue and no loader there
        advice = f"make the code in {around} cheaper, run it every N steps, or in another thread"
        if workers is None:
            advice += "; if it gets the batch, prefetch (a DataLoader with num_workers, a thread), and declare it: `with w.data():` (w = gpuwatch.Watch())"
    text = f"{{}} of the time was spent between an optimizer step and the next forward pass ({wait.mean})"
    return found(
        "no DataLoader is watched, and much of the time is spent before the forward passes",
        wait.share,
        *measured("outside torch", wait.share, text),
        *place_evidence(place, "it"),
        severity=thresholds.severity(wait.share),
        advice=advice,
    )
