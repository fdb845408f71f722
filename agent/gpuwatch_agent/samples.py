"""Turn the agent's books into samples of the catalogue: runs, GPU ledgers, findings, the agent itself."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwatch import api, wire
from gpuwatch.ledger import GPU_STATES, RUN_STATES
from gpuwatch.metrics import HistogramSample, Sample
from gpuwatch.rules.straggler import STRAGGLER
from gpuwatch_agent.findings import FindingBook
from gpuwatch_agent.gpu_ledger import GpuAccount
from gpuwatch_agent.owners import together
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.workers import WorkerWatch

AnySample = Sample | HistogramSample


def run_samples(run: Run, workers: WorkerWatch, wall_offset_ns: int) -> Iterator[AnySample]:
    """Yield all series of one run. `wall_offset_ns` turns the agent's monotonic clock into Unix time."""
    if run.ledger is None:
        return
    key = (run.run, str(run.rank))
    for state in RUN_STATES:
        yield Sample("gpuwatch_run_seconds_total", run.ledger.totals_ns[state] / 1e9, (*key, state))
    watermark_s = (run.ledger.watermark_ns + wall_offset_ns) / 1e9
    yield Sample("gpuwatch_ledger_watermark_timestamp_seconds", watermark_s, key)
    counts = run.counts
    for phase in ("data_wait", "transfer", "compute"):
        yield Sample("gpuwatch_step_phase_seconds_total", counts.phases_ns.get(phase, 0) / 1e9, (*key, phase))
    yield Sample("gpuwatch_steps_total", counts.steps, key)
    if counts.samples >= 0:
        yield Sample("gpuwatch_samples_total", counts.samples, key)
    if counts.tokens >= 0:
        yield Sample("gpuwatch_tokens_total", counts.tokens, key)
    total_s = sum(counts.phases_ns.values()) / 1e9
    yield HistogramSample("gpuwatch_step_seconds", wire.STEP_BUCKETS_S, tuple(counts.histogram), total_s, key)
    if run.last_step_s is not None:
        yield Sample("gpuwatch_last_step_timestamp_seconds", run.last_step_s, key)
    yield Sample("gpuwatch_run_up", float(run.status == RUNNING and run.activity != "silent"), key)
    yield Sample("gpuwatch_step_records_lost_total", run.lost, key)
    yield Sample("gpuwatch_hook_overhead_seconds_total", counts.overhead_ns / 1e9, key)
    if counts.device_steps:
        yield Sample("gpuwatch_hidden_input_wait_seconds_total", counts.hidden_ns / 1e9, key)
        yield Sample("gpuwatch_device_steps_total", counts.device_steps, key)
    if counts.unverified_steps:
        yield Sample("gpuwatch_unverified_steps_total", counts.unverified_steps, key)
    if counts.fetches_sampled:
        yield Sample("gpuwatch_fetches_sampled_total", counts.fetches_sampled, key)
    if counts.worker_fetches:
        yield Sample("gpuwatch_loader_fetches_total", counts.worker_fetches, key)
        yield Sample("gpuwatch_loader_empty_fetches_total", counts.empty_fetches, key)
        yield Sample("gpuwatch_loader_ready_batches_total", counts.ready_batches, key)
    if counts.comm_steps:
        yield Sample("gpuwatch_comm_steps_total", counts.comm_steps, key)
    if run.worker_cpu_s or workers.count(run):
        yield Sample("gpuwatch_loader_worker_cpu_seconds_total", run.worker_cpu_s, key)
        yield Sample("gpuwatch_loader_workers", workers.count(run), key)
    hello = run.hello
    if hello is None:
        return
    loader_workers = hello.loader.num_workers if hello.loader is not None else None
    info = (
        hello.name,
        run.owner.job or hello.job,
        run.owner.step,
        run.user,
        run.owner.container_id,
        run.owner.pod_uid,
        run.owner.namespace,
        run.owner.pod,
        run.owner.container,
        hello.timeline,
        hello.device,
        str(hello.world_size),
        "" if loader_workers is None else str(loader_workers),
        hello.versions.get("gpuwatch", ""),
    )
    yield Sample("gpuwatch_run_info", 1, (*key, *info))


def percentile_samples(view: api.Run) -> Iterator[Sample]:
    """Yield the percentiles of the last minute's steps of a run."""
    recent = view.recent
    if recent is None or view.status != RUNNING:
        return
    for percentile, value in (("p50", recent.step_s_p50), ("p95", recent.step_s_p95)):
        if value is not None:
            yield Sample("gpuwatch_step_percentile_seconds", value, (view.run, str(view.rank), percentile))


def shm_samples(run: Run, table: ProcessTable, shares_host: bool) -> Iterator[Sample]:
    """Yield /dev/shm as a run in a mount namespace of its own sees it."""
    pid = table.host_pid(run.hello) if run.hello is not None and run.status == RUNNING else None
    if pid is None or shares_host:
        return
    shm = table.shm_bytes(pid)
    if shm is not None:
        yield Sample("gpuwatch_shm_size_bytes", shm[0], (run.run,))
        yield Sample("gpuwatch_shm_used_bytes", shm[1], (run.run,))


def gpu_samples(account: GpuAccount, table: ProcessTable, wall_offset_ns: int) -> Iterator[Sample]:
    """Yield a GPU's ledger and its owner."""
    key = (account.gpu, account.uuid)
    for state in GPU_STATES:
        yield Sample("gpuwatch_gpu_seconds_total", account.ledger.totals_ns[state] / 1e9, (*key, state))
    watermark_s = (account.ledger.watermark_ns + wall_offset_ns) / 1e9
    yield Sample("gpuwatch_gpu_ledger_watermark_timestamp_seconds", watermark_s, key)
    run = account.run
    rank = str(run.rank) if run is not None else ""
    owner = together(table.owner(pid) for pid in account.pids)
    job = owner.job or (run.hello.job if run is not None and run.hello is not None else "")
    workload = (owner.namespace, owner.pod, owner.container)
    yield Sample("gpuwatch_gpu_owner_info", 1, (*key, account.owner, rank, owner.user, job, *workload))


def finding_samples(book: FindingBook, runs: list[Run]) -> Iterator[Sample]:
    """Yield a 0 or 1 for each cause that a run has had, over all of its ranks, the evidence of the active ones, and who is late."""
    ratios: dict[tuple[str, str], float | None] = {}
    for run in runs:
        active = {entry.finding.cause: entry.finding.ratio for entry in book.active(run.run, run.rank)}
        for cause in book.causes_seen.get((run.run, run.rank), ()):
            known, ratio = ratios.get((run.run, cause)), active.get(cause)
            ratios[run.run, cause] = max((r for r in (known, ratio) if r is not None), default=None)
        if STRAGGLER in active:
            yield Sample("gpuwatch_straggler_excess_ratio", active[STRAGGLER], (run.run, str(run.rank)))
    for (name, cause), ratio in ratios.items():
        yield Sample("gpuwatch_finding_active", float(ratio is not None), (name, cause))
        if ratio is not None:
            yield Sample("gpuwatch_finding_evidence_ratio", ratio, (name, cause))
