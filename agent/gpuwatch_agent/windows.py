"""Turn what the agent knows of a run and its node into the `Window` that a diagnosis looks at."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpuwatch.metrics import HistogramSample, Sample
from gpuwatch.recorder import BETWEEN, DATA_WAIT, IN_STEP
from gpuwatch.timeline import STALL_FLOOR_NS
from gpuwatch.window import GpuFacts, HostFacts, RankFacts, StepColumns, Window
from gpuwatch_agent.gpu_ledger import GpuAccount
from gpuwatch_agent.gpu_trends import GpuTrends
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.workers import WorkerWatch

_KEPT = 16
_WATCHED = {
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
_IDLE_MODES = {"idle", "iowait"}


class NodeMemory:
    """The node's samples of the last quarter of a minute, as far as a diagnosis needs them."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, dict[tuple[str, tuple[str, ...]], float]]] = deque(maxlen=_KEPT)

    def remember(self, samples: Iterable[Sample | HistogramSample], now_ns: int) -> None:
        kept = {(s.metric, s.labels): s.value for s in samples if isinstance(s, Sample) and s.metric in _WATCHED}
        self._seen.append((now_ns, kept))

    def latest(self, metric: str, *labels: str) -> float | None:
        return self._seen[-1][1].get((metric, labels)) if self._seen else None

    def rate(self, metric: str, *labels: str) -> float | None:
        """Return a counter's growth per second over the kept samples; None where it was not measured throughout."""
        if len(self._seen) < 2:
            return None
        (begin_ns, first), (end_ns, last) = self._seen[0], self._seen[-1]
        key = (metric, labels)
        if key not in first or key not in last or end_ns <= begin_ns:
            return None
        return max(0.0, last[key] - first[key]) / ((end_ns - begin_ns) / 1e9)

    def rates(self, metric: str) -> list[float]:
        """Return the rate of each of a counter's series; [] where none was measured."""
        found = (self.rate(*series_of) for series_of in self._series(metric))
        return [rate for rate in found if rate is not None]

    def throttled(self, gpu: str, uuid: str) -> dict[str, float] | None:
        """Return the share of time in which a GPU's clocks were held down, by reason; None where it is not told."""
        shares = {
            series_of[3]: self.mean(*series_of) or 0.0
            for series_of in self._series("gpuwatch_gpu_throttled")
            if series_of[1:3] == (gpu, uuid)
        }
        return shares or None

    def _series(self, metric: str) -> list[tuple[str, ...]]:
        """Return (metric, labels …) of each of a metric's series now."""
        return [(name, *labels) for name, labels in (self._seen[-1][1] if self._seen else {}) if name == metric]

    def mean(self, metric: str, *labels: str) -> float | None:
        values = [seen[metric, labels] for _, seen in self._seen if (metric, labels) in seen]
        return sum(values) / len(values) if values else None

    def cpu_busy_ratio(self) -> float | None:
        """Return the busy share of all cores, waiting for I/O counted as idle."""
        modes = {
            labels[0]
            for metric, labels in (self._seen[-1][1] if self._seen else {})
            if metric == "gpuwatch_cpu_seconds_total"
        }
        rates = {mode: self.rate("gpuwatch_cpu_seconds_total", mode) for mode in modes}
        known = {mode: rate for mode, rate in rates.items() if rate is not None}
        whole = sum(known.values())
        return sum(rate for mode, rate in known.items() if mode not in _IDLE_MODES) / whole if whole > 0 else None


def run_window(
    run: Run,
    node: NodeMemory,
    workers: WorkerWatch,
    table: ProcessTable,
    gpus: Sequence[GpuAccount],
    now_ns: int,
    ranks: Sequence[RankFacts] = (),
    trends: GpuTrends | None = None,
) -> Window:
    """Return the run's last minute; `ranks` are the ranks on this node that train."""
    duration_ns, states_ns = run.recent_ns()
    hello = run.hello
    pid = table.host_pid(hello) if hello is not None else None
    steps = list(run.steps)
    loader = hello.loader if hello is not None else None
    ends = run.recent_step_ends()
    return Window(
        duration_s=duration_ns / 1e9,
        states_s={state: ns / 1e9 for state, ns in states_ns.items()},
        timeline=hello.timeline if hello is not None else "host",
        device=hello.device if hello is not None else "cpu",
        steps=StepColumns(
            data_wait_s=tuple(step.data_wait_ns / 1e9 for step in steps),
            transfer_s=tuple(step.transfer_ns / 1e9 for step in steps),
            compute_s=tuple(step.compute_ns / 1e9 for step in steps),
            epoch_start=tuple(step.epoch_start for step in steps),
            hidden_wait_s=tuple(step.hidden_ns / 1e9 for step in steps),
        ),
        drained_ratio=ends[0],
        read_back_ratio=ends[1],
        fetch_cpu_ratio=run.fetch_cpu_ratio,
        loader=loader,
        worker_cpu_ratios=workers.ratios(run),
        worker_busy_ratios=workers.busy_ratios(run),
        worker_waits=workers.waits(run),
        host=replace(_host_facts(node, table, pid), network_receive_bytes_per_s=workers.receive_rate(run)),
        gpus=tuple(_gpu_facts(account, node, now_ns, trends=trends) for account in gpus if account.run is run),
        local_world_size=max(1, len(ranks)),
        rank=run.rank,
        world_size=hello.world_size if hello is not None else 1,
        ranks=tuple(ranks),
        worker_deaths=hello.worker_deaths if hello is not None else (),
        activity=run.activity,
        stalled_s=_stalled_s(run, now_ns),
    )


def node_window(node: NodeMemory, gpus: Sequence[GpuAccount], owners: dict[str, str], now_ns: int) -> Window:
    """Return the node without any run: for findings about GPUs that nobody's hook explains."""
    facts = tuple(_gpu_facts(account, node, now_ns, owners.get(account.uuid)) for account in gpus)
    return Window(duration_s=float(_KEPT), gpus=facts)


def _stalled_s(run: Run, now_ns: int) -> float | None:
    """Return for how long the run has had no step, when its hook books that as stalled."""
    if run.status != RUNNING or run.ledger is None or run.activity not in (DATA_WAIT, IN_STEP, BETWEEN):
        return None
    ends = [step.end_ns for step in run.steps]
    last_ns = (
        ends[-1]
        if ends
        else (None if run.last_step_s is None else now_ns - int((run.last_message_s - run.last_step_s) * 1e9))
    )
    if last_ns is None or now_ns - last_ns < STALL_FLOOR_NS:
        return None
    stalled_ns = run.recent_ns()[1].get("stalled", 0)
    return (now_ns - last_ns) / 1e9 if stalled_ns > 0 else None


def _host_facts(node: NodeMemory, table: ProcessTable, pid: int | None) -> HostFacts:
    shm = table.shm_bytes(pid) if pid is not None else None
    if shm is None:
        size, used = node.latest("gpuwatch_shm_size_bytes", "host"), node.latest("gpuwatch_shm_used_bytes", "host")
        shm = (int(size), int(used)) if size is not None and used is not None else None
    memory = node.latest("gpuwatch_memory_available_bytes")
    return HostFacts(
        cpu_cores=_cores(node, table, pid),
        cpu_busy_ratio=node.cpu_busy_ratio(),
        cpu_pressure_ratio=node.rate("gpuwatch_pressure_cpu_waiting_seconds_total"),
        io_pressure_ratio=node.rate("gpuwatch_pressure_io_waiting_seconds_total"),
        memory_available_bytes=None if memory is None else int(memory),
        disk_busy_ratio=max(node.rates("gpuwatch_disk_io_time_seconds_total"), default=None),
        disk_read_bytes_per_s=sum(reads) if (reads := node.rates("gpuwatch_disk_read_bytes_total")) else None,
        shm_size_bytes=shm[0] if shm else None,
        shm_used_bytes=shm[1] if shm else None,
    )


def _cores(node: NodeMemory, table: ProcessTable, pid: int | None) -> int | None:
    """Return the cores that the process may run on, else those of the node."""
    allowed = None if pid is None else table.allowed_cores(pid)
    if allowed is not None:
        return allowed
    cores = node.latest("gpuwatch_cpu_cores")
    return None if cores is None else int(cores)


def look_at_gpus(trends: GpuTrends, gpus: Sequence[GpuAccount], node: NodeMemory, now_ns: int) -> None:
    """Take this second's readings of all GPUs into their trends."""
    trends.keep_only([account.uuid for account in gpus])
    for account in gpus:
        memory = node.latest("gpuwatch_gpu_memory_used_bytes", account.gpu, account.uuid)
        power = node.latest("gpuwatch_gpu_power_watts", account.gpu, account.uuid)
        trends.look(account, power, None if memory is None else int(memory), now_ns)


def _gpu_facts(
    account: GpuAccount, node: NodeMemory, now_ns: int, owner: str | None = None, trends: GpuTrends | None = None
) -> GpuFacts:
    total = node.latest("gpuwatch_gpu_memory_total_bytes", account.gpu, account.uuid)
    memory = node.latest("gpuwatch_gpu_memory_used_bytes", account.gpu, account.uuid)
    return GpuFacts(
        gpu=account.gpu,
        uuid=account.uuid,
        utilization_ratio=node.mean("gpuwatch_gpu_utilization_ratio", account.gpu, account.uuid),
        memory_used_bytes=None if memory is None else int(memory),
        process_count=len(account.pids),
        idle_s=None if account.idle_since_ns is None else (now_ns - account.idle_since_ns) / 1e9,
        owner=owner,
        throttled=node.throttled(account.gpu, account.uuid),
        power_watts=node.mean("gpuwatch_gpu_power_watts", account.gpu, account.uuid),
        power_usual_watts=trends.usual_watts(account.uuid) if trends is not None else None,
        memory_trend=None if trends is None else trends.memory(account.uuid, None if total is None else int(total)),
    )
