"""Turn what the agent knows of a run and its node into the `Window` that a diagnosis looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuwatch.entries import BETWEEN, DATA_WAIT, IN_STEP
from gpuwatch.timeline import STALL_FLOOR_NS
from gpuwatch.window import GpuFacts, HostFacts, RankFacts, StepColumns, Window
from gpuwatch_agent.gpus import GpuAccount
from gpuwatch_agent.gpus.trends import GpuTrends
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.runs.node_memory import KEPT, NodeMemory


def run_window(
    run: Run,
    host: HostFacts,
    gpus: tuple[GpuFacts, ...],
    workers: WorkerWatch,
    table: ProcessTable,
    now_ns: int,
    ranks: Sequence[RankFacts] = (),
) -> Window:
    """Return the run's last minute. `host` is the node, `gpus` are those that the run alone holds; `ranks` are the ranks on this node that train."""
    duration_ns, states_ns = run.recent_ns()
    hello = run.hello
    pid = table.host_pid(hello) if hello is not None else None
    steps = run.steps.columns()
    loader = hello.loader if hello is not None else None
    then, now = run.minute.counts()
    ratios = run.minute.device_ratios()
    by_device = now.device_steps - then.device_steps
    fetches, new_steps = now.worker_fetches - then.worker_fetches, now.steps - then.steps
    return Window(
        duration_s=duration_ns / 1e9,
        states_s={state: ns / 1e9 for state, ns in states_ns.items()},
        timeline=hello.timeline if hello is not None else "host",
        device=hello.device if hello is not None else "cpu",
        steps=StepColumns(
            data_wait_s=steps.data_wait_s,
            transfer_s=steps.transfer_s,
            compute_s=steps.compute_s,
            epoch_start=steps.epoch_start,
            hidden_wait_s=steps.hidden_s,
        ),
        drained_ratio=ratios.drained,
        kept_up_ratio=ratios.kept_up,
        read_back_ratio=ratios.read_back,
        coverage=by_device / new_steps if new_steps > 0 else 0.0,
        unverified_ratio=(now.unverified_steps - then.unverified_steps) / new_steps if new_steps > 0 else 0.0,
        fetch_cpu_ratio=run.fetch_cpu_ratio,
        ready_batches=(now.ready_batches - then.ready_batches) / fetches if fetches > 0 else None,
        empty_fetch_ratio=(now.empty_fetches - then.empty_fetches) / fetches if fetches > 0 else None,
        loader=loader,
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
    """Return the node without any run: for findings about GPUs that nobody's hook explains. Both are by UUID."""
    nobodys = (
        replace(facts, owner=owners.get(uuid), power_usual_watts=None, memory_trend=None)
        for uuid, facts in gpus.items()
    )
    return Window(duration_s=float(KEPT), gpus=tuple(nobodys))


def _stalled_s(run: Run, now_ns: int) -> float | None:
    """Return for how long the run has had no step, when its hook books that as stalled."""
    if run.status != RUNNING or run.ledger is None or run.activity not in (DATA_WAIT, IN_STEP, BETWEEN):
        return None
    last_ns = run.steps.last_end_ns
    if last_ns is None and run.last_step_s is not None:
        last_ns = now_ns - int((run.last_message_s - run.last_step_s) * 1e9)
    if last_ns is None or now_ns - last_ns < STALL_FLOOR_NS:
        return None
    stalled_ns = run.recent_ns()[1].get("stalled", 0)
    return (now_ns - last_ns) / 1e9 if stalled_ns > 0 else None


def host_facts(node: NodeMemory) -> HostFacts:
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
    """Return the node as one process sees it: its own /dev/shm, the cores and the memory it may use, its network namespace."""
    size, used = host.shm_size_bytes, host.shm_used_bytes
    cores, memory = host.cpu_cores, host.memory_available_bytes
    if pid is not None:
        size, used = table.shm_bytes(pid) or (size, used)
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


def look_at_gpus(trends: GpuTrends, gpus: Sequence[GpuAccount], node: NodeMemory, now_ns: int) -> None:
    """Take this second's readings of all GPUs into their trends."""
    trends.keep_only([account.uuid for account in gpus])
    for account in gpus:
        memory = node.latest("gpuwatch_gpu_memory_used_bytes", account.gpu, account.uuid)
        power = node.latest("gpuwatch_gpu_power_watts", account.gpu, account.uuid)
        trends.look(account, power, None if memory is None else int(memory), now_ns)


def _begin_ns(run: Run | None) -> int:
    """Return when a run began that holds a GPU: what the GPU did before says nothing of it."""
    return 0 if run is None or run.ledger is None else run.ledger.start_ns


def gpu_facts(account: GpuAccount, node: NodeMemory, now_ns: int, trends: GpuTrends) -> GpuFacts:
    """Return one GPU as it was over the last quarter of a minute."""
    total = node.latest("gpuwatch_gpu_memory_total_bytes", account.gpu, account.uuid)
    memory = node.latest("gpuwatch_gpu_memory_used_bytes", account.gpu, account.uuid)
    return GpuFacts(
        gpu=account.gpu,
        uuid=account.uuid,
        utilization_ratio=node.mean(
            "gpuwatch_gpu_utilization_ratio", account.gpu, account.uuid, since_ns=_begin_ns(account.run)
        ),
        memory_used_bytes=None if memory is None else int(memory),
        process_count=len(account.pids),
        idle_s=None if account.idle_since_ns is None else (now_ns - account.idle_since_ns) / 1e9,
        throttled=node.throttled(account.gpu, account.uuid),
        power_watts=node.mean("gpuwatch_gpu_power_watts", account.gpu, account.uuid),
        power_usual_watts=trends.usual_watts(account.uuid),
        memory_trend=trends.memory(account.uuid, None if total is None else int(total)),
    )
