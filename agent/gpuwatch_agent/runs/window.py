"""Windows for the diagnosis: what the agent knows of a run, its node and the other ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from msgspec.structs import replace

from gpuwatch.diagnosis.window import GpuFacts, HostFacts, RankFacts, StepColumns, Window, make_window
from gpuwatch.ledger.events import BETWEEN, DATA_WAIT, IN_STEP
from gpuwatch.ledger.timeline import STALL_FLOOR_NS
from gpuwatch.metrics import HistogramSample, Sample
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.runs.timeline import RecentColumns

KEPT = 16
"""Samples, one a second."""
_WATCHED = frozenset(
    {
        "gpuwatch_cpu_seconds_total",
        "gpuwatch_cpu_cores",
        "gpuwatch_pressure_cpu_waiting_seconds_total",
        "gpuwatch_pressure_io_waiting_seconds_total",
        "gpuwatch_memory_available_bytes",
        "gpuwatch_shm_size_bytes",
        "gpuwatch_shm_used_bytes",
        "gpuwatch_gpu_utilization_ratio",
        "gpuwatch_gpu_memory_used_bytes",
        "gpuwatch_gpu_memory_total_bytes",
        "gpuwatch_gpu_power_watts",
        "gpuwatch_gpu_throttled",
        "gpuwatch_disk_io_time_seconds_total",
        "gpuwatch_disk_read_bytes_total",
    }
)
_IDLE_MODES = {"idle", "iowait"}
_Labels = tuple[str, ...]


class RecentSamples:
    """Samples by metric and labels, oldest first."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, dict[str, dict[_Labels, float]]]] = deque(maxlen=KEPT)

    def remember(self, samples: Iterable[Sample | HistogramSample], now_ns: int) -> None:
        """Keep this second's samples."""
        kept: dict[str, dict[_Labels, float]] = {}
        for sample in samples:
            if sample.metric in _WATCHED and isinstance(sample, Sample):
                kept.setdefault(sample.metric, {})[sample.labels] = sample.value
        self._seen.append((now_ns, kept))

    def latest(self, metric: str, *labels: str) -> float | None:
        """Return a series' last value; None where it was not measured."""
        return self._now(metric).get(labels)

    def rate(self, metric: str, *labels: str) -> float | None:
        """Return a counter's growth per second over the kept samples; None where it was not measured throughout."""
        if len(self._seen) < 2:
            return None
        (begin_ns, first), (end_ns, last) = self._seen[0], self._seen[-1]
        before, after = first.get(metric, {}).get(labels), last.get(metric, {}).get(labels)
        if before is None or after is None or end_ns <= begin_ns:
            return None
        return max(0.0, after - before) / ((end_ns - begin_ns) / 1e9)

    def rates(self, metric: str) -> list[float]:
        """Return the rate of each of a counter's series; [] where none was measured."""
        found = (self.rate(metric, *labels) for labels in self._now(metric))
        return [rate for rate in found if rate is not None]

    def mean(self, metric: str, *labels: str, since_ns: int = 0) -> float | None:
        """Return a series' mean since a moment; None where it was not measured."""
        kept = [seen for at_ns, seen in self._seen if at_ns >= since_ns]
        values = [value for seen in kept if (value := seen.get(metric, {}).get(labels)) is not None]
        return sum(values) / len(values) if values else None

    def throttled(self, gpu: str, uuid: str) -> dict[str, float] | None:
        """Return the share of time in which a GPU's clocks were held down, by reason; None where it is not measured."""
        reasons = [labels[2] for labels in self._now("gpuwatch_gpu_throttled") if labels[:2] == (gpu, uuid)]
        return {reason: self.mean("gpuwatch_gpu_throttled", gpu, uuid, reason) or 0.0 for reason in reasons} or None

    def cpu_busy_ratio(self) -> float | None:
        """Return the busy share of all cores, waiting for I/O counted as idle."""
        rates = {
            labels[0]: self.rate("gpuwatch_cpu_seconds_total", *labels)
            for labels in self._now("gpuwatch_cpu_seconds_total")
        }
        known = {mode: rate for mode, rate in rates.items() if rate is not None}
        whole = sum(known.values())
        return sum(rate for mode, rate in known.items() if mode not in _IDLE_MODES) / whole if whole > 0 else None

    def _now(self, metric: str) -> dict[_Labels, float]:
        return self._seen[-1][1].get(metric, {}) if self._seen else {}


def run_window(
    run: Run,
    host: HostFacts,
    gpus: tuple[GpuFacts, ...],
    workers: WorkerWatch,
    table: ProcessTable,
    now_ns: int,
    ranks: Sequence[RankFacts] = (),
) -> Window:
    """Return the run's last minute. `host` is the node, `gpus` are held by the run alone, `ranks` train on this node."""
    hello, steps, (then, now) = run.hello, run.steps.columns(), run.minute.counts()
    pid = table.host_pid(hello) if hello is not None else None
    return make_window(
        *run.recent_ns(),
        now,
        then,
        timeline=hello.timeline if hello is not None else "host",
        device=hello.device if hello is not None else "cpu",
        steps=StepColumns(steps.data_wait_s, steps.transfer_s, steps.compute_s, steps.epoch_start, steps.hidden_s),
        fetch_cpu_ratio=run.fetch_cpu_ratio,
        loader=hello.loader if hello is not None else None,
        worker_cpu_ratios=workers.ratios(run),
        worker_busy_ratios=workers.busy_ratios(run),
        worker_waits=workers.waits(run),
        worker_private_bytes=workers.private_bytes(run),
        host=_as_seen_by(host, pid, table, workers.receive_rate(run), workers.quota(run)),
        gpus=gpus,
        local_world_size=max(1, len(ranks)),
        rank=run.rank,
        world_size=hello.world_size if hello is not None else 1,
        ranks=tuple(ranks),
        worker_deaths=hello.worker_deaths if hello is not None else (),
        oom=run.oom,
        activity=run.activity,
        stalled_s=_stalled_s(run, now_ns),
    )


def node_window(gpus: Mapping[str, GpuFacts], owners: Mapping[str, str]) -> Window:
    """Return the node without its runs, for findings about GPUs without a hook. Both arguments are by UUID."""
    unowned = (
        replace(facts, owner=owners.get(uuid), power_usual_watts=None, memory_trend=None)
        for uuid, facts in gpus.items()
    )
    return Window(duration_s=float(KEPT), gpus=tuple(unowned))


def _stalled_s(run: Run, now_ns: int) -> float | None:
    """Return the time since the last step, if the hook books that as stalled; else None."""
    if run.status != RUNNING or run.ledger is None or run.activity not in (DATA_WAIT, IN_STEP, BETWEEN):
        return None
    last_ns = run.steps.last_end_ns
    if last_ns is None and run.last_step_s is not None:
        last_ns = now_ns - int((run.last_message_s - run.last_step_s) * 1e9)
    if last_ns is None or now_ns - last_ns < STALL_FLOOR_NS:
        return None
    stalled_ns = run.recent_ns()[1].get("stalled", 0)
    return (now_ns - last_ns) / 1e9 if stalled_ns > 0 else None


def host_facts(node: RecentSamples) -> HostFacts:
    """Return the node as it was over the last quarter of a minute."""
    size, used = node.latest("gpuwatch_shm_size_bytes", "host"), node.latest("gpuwatch_shm_used_bytes", "host")
    memory, cores = node.latest("gpuwatch_memory_available_bytes"), node.latest("gpuwatch_cpu_cores")
    return HostFacts(
        cpu_cores=None if cores is None else int(cores),
        cpu_busy_ratio=node.cpu_busy_ratio(),
        cpu_pressure_ratio=node.rate("gpuwatch_pressure_cpu_waiting_seconds_total"),
        io_pressure_ratio=node.rate("gpuwatch_pressure_io_waiting_seconds_total"),
        memory_available_bytes=None if memory is None else int(memory),
        disk_busy_ratio=max(node.rates("gpuwatch_disk_io_time_seconds_total"), default=None),
        disk_read_bytes_per_s=sum(reads) if (reads := node.rates("gpuwatch_disk_read_bytes_total")) else None,
        shm_size_bytes=None if size is None or used is None else int(size),
        shm_used_bytes=None if size is None or used is None else int(used),
    )


def _as_seen_by(
    host: HostFacts,
    pid: int | None,
    table: ProcessTable,
    receive_bytes_per_s: float | None,
    quota: tuple[float | None, float | None],
) -> HostFacts:
    """Return the node as one process sees it: its own /dev/shm, its cores and memory, its network namespace."""
    size, used = host.shm_size_bytes, host.shm_used_bytes
    cores, memory = host.cpu_cores, host.memory_available_bytes
    if pid is not None:
        shm = table.shm(pid)
        size, used = (shm.size_bytes, shm.used_bytes) if shm is not None else (size, used)
        allowed = table.allowed_cores(pid)
        cores = cores if allowed is None else allowed
        memory = table.memory_available_bytes(pid, memory)
    return replace(
        host,
        cpu_cores=cores,
        cpu_quota_cores=quota[0],
        cpu_throttled_ratio=quota[1],
        memory_available_bytes=memory,
        shm_size_bytes=size,
        shm_used_bytes=used,
        network_receive_bytes_per_s=receive_bytes_per_s,
    )


def ranks_by_run(runs: Sequence[Run]) -> dict[str, tuple[RankFacts, ...]]:
    """Return each run's ranks that train now, by rank; runs of a single rank are left out."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        if run.status == RUNNING and run.activity != "silent":
            together.setdefault(run.run, []).append(run)
    return {name: _compared(ranks) for name, ranks in together.items() if len(ranks) > 1}


def _compared(runs: Sequence[Run]) -> tuple[RankFacts, ...]:
    """Return the ranks' mean steps, first batches left out, over the time in which the steps of all of them are known."""
    known = [(run.rank, run.steps.columns()) for run in sorted(runs, key=lambda run: run.rank)]
    begin_ns = max((steps.end_ns[0] for _, steps in known if steps), default=0)
    end_ns = min((steps.end_ns[-1] for _, steps in known if steps), default=0)
    return tuple(_mean(rank, steps, begin_ns, end_ns) for rank, steps in known)


def _mean(rank: int, steps: RecentColumns, begin_ns: int, end_ns: int) -> RankFacts:
    part = slice(bisect_left(steps.end_ns, begin_ns), bisect_right(steps.end_ns, end_ns))
    later = [not first for first in steps.epoch_start[part]]
    waits_ns = list(compress(steps.comm_wait_ns[part], later))
    count = len(waits_ns) or 1
    return RankFacts(
        rank=rank,
        steps=len(waits_ns),
        data_wait_s=sum(compress(steps.data_wait_s[part], later)) / count,
        transfer_s=sum(compress(steps.transfer_s[part], later)) / count,
        compute_s=sum(compress(steps.compute_s[part], later)) / count,
        comm_wait_s=sum(waits_ns) / count / 1e9 if waits_ns and min(waits_ns) >= 0 else None,
    )
