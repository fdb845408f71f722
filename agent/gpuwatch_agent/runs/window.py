"""Windows for the diagnosis: what the agent knows of a run, its node and the other ranks."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec.structs import replace

from gpuwatch.diagnosis.window import GpuFacts, HostFacts, RankFacts, Window, make_window
from gpuwatch.host.cgroup import within_limit, within_quota
from gpuwatch.ledger.events import BETWEEN, DATA_WAIT, IN_STEP
from gpuwatch.ledger.timeline import STALL_FLOOR_NS
from gpuwatch.metrics import Sample
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import RUNNING, Run

KEPT = 16  # samples, one a second
_IDLE_MODES = {"idle", "iowait"}
_Series = tuple[str, ...]  # its labels' values
_THROTTLED = "gpuwatch_gpu_throttled"
THROTTLED = ("power", "thermal", "hardware")
"""The reasons that are causes. A driver's own, which it has too, are parts of these, or a setting of a user."""


class RecentSamples:
    """Samples of the node; a series is given by its metric and its labels' values."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, dict[str, dict[_Series, float]]]] = deque(maxlen=KEPT)

    def remember(self, samples: Iterable[Sample], now_ns: int) -> None:
        """Keep this second's samples."""
        kept: dict[str, dict[_Series, float]] = {}
        for each in samples:
            kept.setdefault(each.metric, {})[each.labels] = each.value
        self._seen.append((now_ns, kept))

    def latest(self, metric: str, *labels: str) -> float | None:
        """Return a series' last value; None where it was not measured."""
        return self._seen[-1][1].get(metric, {}).get(labels) if self._seen else None

    def rates(self, metric: str) -> dict[_Series, float]:
        """Return a counter's growth per second over the kept samples, by labels, of series measured throughout."""
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return {}
        (begin_ns, before), (end_ns, now) = self._seen[0], self._seen[-1]
        first, last = before.get(metric, {}), now.get(metric, {})
        grown = {labels: value - first[labels] for labels, value in last.items() if labels in first}
        return {labels: max(0.0, growth) / ((end_ns - begin_ns) / 1e9) for labels, growth in grown.items()}

    def mean(self, metric: str, *labels: str, since_ns: int = 0) -> float | None:
        """Return a series' mean since a moment; None where it was not measured."""
        kept = [seen[metric].get(labels) for at_ns, seen in self._seen if at_ns >= since_ns and metric in seen]
        values = [value for value in kept if value is not None]
        return sum(values) / len(values) if values else None

    def throttled(self, gpu: str, uuid: str) -> dict[str, float] | None:
        """Return the share of time in which a GPU's clocks were held down, by reason; None where it is not measured."""
        known = [each for each in THROTTLED if self.latest(_THROTTLED, gpu, uuid, each) is not None]
        return {each: self.mean(_THROTTLED, gpu, uuid, each) or 0.0 for each in known} or None

    def cpu_busy_ratio(self) -> float | None:
        """Return the busy share of all cores, waiting for I/O counted as idle."""
        rates = self.rates("gpuwatch_cpu_seconds_total")
        whole = sum(rates.values())
        return sum(rate for (mode,), rate in rates.items() if mode not in _IDLE_MODES) / whole if whole > 0 else None


def run_window(
    run: Run, host: HostFacts, gpus: tuple[GpuFacts, ...], workers: WorkerWatch, now_ns: int, ranks: Sequence[RankFacts]
) -> Window:
    """Return the run's last minute. `host` is the node, this run alone holds `gpus`, `ranks` train on this node."""
    hello, seen = run.hello, workers.of(run).workers
    about = {} if hello is None else {name: getattr(hello, name) for name in _OF_HELLO}
    groups = {each.rank: each.group for each in ranks}  # a pod's cores and memory are those of its own ranks
    return make_window(
        *run.recent(),
        steps=run.steps,
        fetch_cpu_ratio=run.fetch_cpu_ratio,
        worker_cpu_ratios=seen.ratios(),
        worker_busy_ratios=seen.ratios(busy=True),
        worker_waits=seen.waits(),
        worker_private_bytes=seen.private_bytes,
        host=_as_seen_by(run, host, workers, ranks),
        gpus=gpus,
        local_world_size=max(1, [*groups.values()].count(groups.get(run.rank, ""))),
        rank=run.rank,
        ranks=tuple(ranks),
        oom=run.oom,
        job=run.job,
        activity=run.activity,
        stalled_s=_stalled_s(run, now_ns),
        standstill=run.standstill,
        **about,
    )


_OF_HELLO = ("timeline", "device", "loader", "world_size", "worker_deaths", "flops")


def _stalled_s(run: Run, now_ns: int) -> float | None:
    """Return the time since the last step, if the hook books that as stalled; else None."""
    if run.status != RUNNING or run.ledger is None or run.activity not in (DATA_WAIT, IN_STEP, BETWEEN):
        return None
    last_ns = run.steps.last_end_ns
    if last_ns is None and run.last_step_s is not None:
        last_ns = now_ns - int((run.last_message_s - run.last_step_s) * 1e9)
    if last_ns is None or now_ns - last_ns < STALL_FLOOR_NS:
        return None
    return (now_ns - last_ns) / 1e9 if run.recent()[1].get("stalled", 0) > 0 else None


def host_facts(node: RecentSamples) -> HostFacts:
    """Return the node as it was over the last quarter of a minute."""
    size, used = node.latest("gpuwatch_shm_size_bytes", "host"), node.latest("gpuwatch_shm_used_bytes", "host")
    memory, cores = node.latest("gpuwatch_memory_available_bytes"), node.latest("gpuwatch_cpu_cores")
    return HostFacts(
        cpu_cores=None if cores is None else int(cores),
        cpu_busy_ratio=node.cpu_busy_ratio(),
        cpu_pressure_ratio=node.rates("gpuwatch_pressure_cpu_waiting_seconds_total").get(()),
        io_pressure_ratio=node.rates("gpuwatch_pressure_io_waiting_seconds_total").get(()),
        memory_available_bytes=None if memory is None else int(memory),
        disk_busy_ratio=max(node.rates("gpuwatch_disk_io_time_seconds_total").values(), default=None),
        disk_read_bytes_per_s=sum(reads.values()) if (reads := node.rates("gpuwatch_disk_read_bytes_total")) else None,
        shm_size_bytes=None if size is None or used is None else int(size),
        shm_used_bytes=None if size is None or used is None else int(used),
    )


def _as_seen_by(run: Run, host: HostFacts, workers: WorkerWatch, ranks: Sequence[RankFacts]) -> HostFacts:
    """Return the node as one process sees it: its own /dev/shm and memory, all ranks' cores, its network namespace."""
    (cores, throttled), received = workers.quota(run), workers.receive_rate(run)
    host = replace(host, cpu_quota_cores=cores, cpu_throttled_ratio=throttled, network_receive_bytes_per_s=received)
    table = workers.table
    pid = table.host_pid(run.hello)
    if pid is None:
        return host
    shm, usable = table.shm(pid), table.cores(run.hello).union(*(rank.cores for rank in ranks))
    return replace(
        host,
        cpu_cores=within_quota(len(usable), table.quota(pid)) if usable else host.cpu_cores,
        memory_available_bytes=within_limit(host.memory_available_bytes, table.memory_room(pid)),
        shm_size_bytes=host.shm_size_bytes if shm is None or shm.is_hosts else shm.size_bytes,
        shm_used_bytes=host.shm_used_bytes if shm is None or shm.is_hosts else shm.used_bytes,
    )


def ranks_by_run(runs: Sequence[Run], table: ProcessTable) -> dict[str, tuple[RankFacts, ...]]:
    """Return each run's ranks that train now, by rank; runs of a single rank are left out."""
    together: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.rank):
        if run.status == RUNNING and run.activity != "silent":
            together.setdefault(run.run, []).append(run)
    return {name: _compared(ranks, table) for name, ranks in together.items() if len(ranks) > 1}


def _compared(runs: Sequence[Run], table: ProcessTable) -> tuple[RankFacts, ...]:
    """Return the ranks' mean steps over the time in which the steps of all of them are known."""
    begin_ns = max((run.steps.end_ns[0] for run in runs if run.steps), default=0)
    end_ns = min((run.steps.end_ns[-1] for run in runs if run.steps), default=0)
    found = []
    for run in runs:
        steps = run.steps
        part = slice(bisect_left(steps.end_ns, begin_ns), bisect_right(steps.end_ns, end_ns))
        waits_ns = steps.later(steps.comm_wait_ns, part)
        comm_wait_s = fmean(waits_ns) / 1e9 if waits_ns and min(waits_ns) >= 0 else None
        pid = table.host_pid(run.hello)
        limits = None if pid is None or table.memory_room(pid) is None else table.quota(pid)
        group = limits.folder if limits else ""
        found.append(RankFacts(run.rank, steps.mean(part), comm_wait_s, run.standstill, table.cores(run.hello), group))
    return tuple(found)
