"""/metrics: the agent's state as samples of the catalogue, rendered by prometheus-client; and the served snapshot."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from gpuwatch import api, wire
from gpuwatch.diagnosis.rules.progress import straggler
from gpuwatch.ledger.states import GPU_STATES, HELD_IDLE, RUN_STATES
from gpuwatch.metrics import BY_NAME, HistogramSample, Sample, labels_of
from gpuwatch_agent.evaluator import FindingTracker
from gpuwatch_agent.gpus import GpuAccount
from gpuwatch_agent.gpus.readings import gpu_owner
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import RUNNING, Run

AnySample = Sample | HistogramSample


_COUNTERS = {
    "gpuwatch_steps_total": ("steps", None),
    "gpuwatch_hook_overhead_seconds_total": ("overhead_ns", None),
    "gpuwatch_hidden_input_wait_seconds_total": ("hidden_ns", "device_steps"),
    "gpuwatch_device_steps_total": ("device_steps", "device_steps"),
    "gpuwatch_unverified_steps_total": ("unverified_steps", "unverified_steps"),
    "gpuwatch_fetches_sampled_total": ("fetches_sampled", "fetches_sampled"),
    "gpuwatch_loader_fetches_total": ("worker_fetches", "worker_fetches"),
    "gpuwatch_loader_empty_fetches_total": ("empty_fetches", "worker_fetches"),
    "gpuwatch_loader_ready_batches_total": ("ready_batches", "worker_fetches"),
    "gpuwatch_comm_steps_total": ("comm_steps", "comm_steps"),
}
"""By metric: its counter, and the counter that must be above 0 for it to be served."""


def run_samples(run: Run, workers: WorkerWatch, wall_offset_ns: int) -> Iterator[AnySample]:
    """Yield all series of one run. `wall_offset_ns`: Unix time minus the agent's monotonic clock."""
    if run.ledger is None:
        return
    key, counts = (run.run, str(run.rank)), run.counts
    for state in RUN_STATES:
        yield Sample("gpuwatch_run_seconds_total", run.ledger.totals_ns[state] / 1e9, (*key, state))
    for phase in ("data_wait", "transfer", "compute"):
        yield Sample("gpuwatch_step_phase_seconds_total", counts.phases_ns.get(phase, 0) / 1e9, (*key, phase))
    for name, ns in counts.declared_ns.items():
        yield Sample("gpuwatch_phase_seconds_total", ns / 1e9, (*key, name))
    total_s = sum(counts.phases_ns.values()) / 1e9
    yield HistogramSample("gpuwatch_step_seconds", wire.STEP_BUCKETS_S, tuple(counts.step_histogram), total_s, key)
    for metric, (counter, needed) in _COUNTERS.items():
        if needed is None or getattr(counts, needed):
            yield Sample(metric, getattr(counts, counter) / (1e9 if counter.endswith("_ns") else 1), key)
    has_workers = run.worker_cpu_s or workers.count(run)
    values = {
        "gpuwatch_ledger_watermark_timestamp_seconds": (run.ledger.watermark_ns + wall_offset_ns) / 1e9,
        "gpuwatch_samples_total": counts.samples if counts.samples >= 0 else None,
        "gpuwatch_tokens_total": counts.tokens if counts.tokens >= 0 else None,
        "gpuwatch_last_step_timestamp_seconds": run.last_step_s,
        "gpuwatch_run_up": float(run.status == RUNNING and run.activity != "silent"),
        "gpuwatch_step_records_lost_total": run.lost,
        "gpuwatch_loader_worker_cpu_seconds_total": run.worker_cpu_s if has_workers else None,
        "gpuwatch_loader_workers": workers.count(run) if has_workers else None,
    }
    yield from (Sample(metric, value, key) for metric, value in values.items() if value is not None)
    if (hello := run.hello) is not None:
        owner, loader = run.owner, None if hello.loader is None else hello.loader.num_workers
        ids = (owner.step, run.user, owner.container_id, owner.pod_uid, owner.namespace, owner.pod, owner.container)
        settings = (hello.timeline, hello.device, str(hello.world_size), "" if loader is None else str(loader))
        about = (hello.name, owner.job or hello.job, *ids, *settings, hello.versions.get("gpuwatch", ""))
        yield Sample("gpuwatch_run_info", 1, (*key, *about))


def recent_samples(view: api.Run) -> Iterator[Sample]:
    """Yield the step time percentiles and the MFU of a run's last minute."""
    recent = view.recent
    if recent is None or view.status != RUNNING:
        return
    if recent.mfu_ratio is not None:
        yield Sample("gpuwatch_run_mfu_ratio", recent.mfu_ratio, (view.run, str(view.rank)))
    for percentile, value in (("p50", recent.step_s_p50), ("p95", recent.step_s_p95)):
        if value is not None:
            yield Sample("gpuwatch_step_percentile_seconds", value, (view.run, str(view.rank), percentile))


def job_samples(jobs: Iterable[api.Job]) -> Iterator[Sample]:
    """Yield the ledgers of the jobs."""
    for job in jobs:
        for state in sorted({*job.states, "compute", "down", "redone", "restart"}):
            yield Sample("gpuwatch_job_seconds_total", job.states.get(state, 0.0), (job.job, state))
        if job.goodput_ratio is not None:
            yield Sample("gpuwatch_job_goodput_ratio", job.goodput_ratio, (job.job,))
        yield Sample("gpuwatch_job_attempts_total", job.attempts, (job.job,))


def shm_samples(run: Run, table: ProcessTable) -> Iterator[Sample]:
    """Yield /dev/shm as seen by a run in its own mount namespace."""
    pid = table.host_pid(run.live_hello)
    shm = table.shm(pid) if pid is not None else None
    if shm is not None and not shm.is_hosts:
        yield Sample("gpuwatch_shm_size_bytes", shm.size_bytes, (run.run,))
        yield Sample("gpuwatch_shm_used_bytes", shm.used_bytes, (run.run,))


def gpu_samples(account: GpuAccount, table: ProcessTable, wall_offset_ns: int) -> Iterator[Sample]:
    """Yield a GPU's ledger, its owner and, while it is held idle, a process that holds it."""
    key = (account.gpu, account.uuid)
    for state in GPU_STATES:
        yield Sample("gpuwatch_gpu_seconds_total", account.ledger.totals_ns[state] / 1e9, (*key, state))
    watermark_s = (account.ledger.watermark_ns + wall_offset_ns) / 1e9
    yield Sample("gpuwatch_gpu_ledger_watermark_timestamp_seconds", watermark_s, key)
    run = account.run
    rank = str(run.rank) if run is not None else ""
    owner = gpu_owner(account, table)
    job = owner.job or (run.hello.job if run is not None and run.hello is not None else "")
    workload = (owner.namespace, owner.pod, owner.container)
    yield Sample("gpuwatch_gpu_owner_info", 1, (*key, account.owner, rank, owner.user, job, *workload))
    if account.state == HELD_IDLE and account.pids:
        yield Sample("gpuwatch_gpu_holder_pid", account.pids[0], (*key, table.name(account.pids[0])))


def finding_samples(book: FindingTracker, runs: list[Run]) -> Iterator[Sample]:
    """Yield 0 or 1 for each cause that a run has had (over all of its ranks), the evidence of active ones, and stragglers' delays."""
    ratios: dict[tuple[str, str], float | None] = {}
    for run in runs:
        active = {entry.finding.cause: entry.finding.ratio for entry in book.active(run.run, run.rank)}
        for cause in book.causes_seen.get((run.run, run.rank), ()):
            known, ratio = ratios.get((run.run, cause)), active.get(cause)
            ratios[run.run, cause] = max((r for r in (known, ratio) if r is not None), default=None)
        if straggler.cause in active:
            yield Sample("gpuwatch_straggler_excess_ratio", active[straggler.cause], (run.run, str(run.rank)))
    for (name, cause), ratio in ratios.items():
        yield Sample("gpuwatch_finding_active", float(ratio is not None), (name, cause))
        if ratio is not None:
            yield Sample("gpuwatch_finding_evidence_ratio", ratio, (name, cause))


_STANDARD_REASONS = {"power", "thermal", "hardware"}
_FULL = frozenset(name for name, metric in BY_NAME.items() if metric.when == "full")
_COUNTED = frozenset(name for name, metric in BY_NAME.items() if metric.when == "counted")


def standard(samples: Iterable[AnySample]) -> Iterator[AnySample]:
    """Yield the standard set: without what `--series full` adds, and without error counters at 0."""
    for sample in samples:
        name = sample.metric
        if name in _FULL or (name in _COUNTED and isinstance(sample, Sample) and not sample.value):
            continue
        if name == "gpuwatch_gpu_throttled" and sample.labels[2] not in _STANDARD_REASONS:
            continue
        yield sample


class Page:
    """One moment's /metrics, rendered at the first request and then served as bytes."""

    def __init__(self, samples: Sequence[AnySample]) -> None:
        self._samples = samples
        self._bodies: dict[tuple[bool, bool], bytes] = {}

    def body(self, open_metrics: bool, compressed: bool) -> bytes:
        """Return the page as Prometheus text or OpenMetrics, gzipped or plain."""
        key = (open_metrics, compressed)
        if key not in self._bodies:
            module: Any = openmetrics if open_metrics else exposition  # typed in one of the two only
            self._bodies[key] = (
                gzip.compress(self.body(open_metrics, False), 1) if compressed else module.generate_latest(self)
            )
        return self._bodies[key]

    def value(self, metric: str) -> float | None:
        """Return the value of a metric without labels; None when it was not measured."""
        return self.values(metric).get(())

    def values(self, metric: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric by its labels' values, in the catalogue's order; empty when it was not measured."""
        return {s.labels: s.value for s in self._samples if s.metric == metric and isinstance(s, Sample)}

    def collect(self) -> Iterator[Metric]:
        """Yield the samples as prometheus-client's families, in the catalogue's order."""
        by_metric: dict[str, list[AnySample]] = {}
        for sample in self._samples:
            by_metric.setdefault(sample.metric, []).append(sample)
        for name, metric in BY_NAME.items():
            if name in by_metric:
                family = Metric(name.removesuffix("_total").removesuffix("_info"), metric.help, metric.kind)
                for sample in by_metric[name]:
                    _add(family, sample)
                yield family


def content_type(open_metrics: bool) -> str:
    """Return the Content-Type of a page."""
    return openmetrics.CONTENT_TYPE_LATEST if open_metrics else exposition.CONTENT_TYPE_LATEST


def _add(family: Metric, sample: AnySample) -> None:
    name, labels = sample.metric, labels_of(sample)
    if isinstance(sample, Sample):
        family.add_sample(name, labels, sample.value)
        return
    bounds = [*map(repr, map(float, sample.bounds)), "+Inf"]
    for bound, count in zip(bounds, accumulate(sample.counts), strict=True):
        family.add_sample(f"{name}_bucket", {**labels, "le": bound}, float(count))
    family.add_sample(f"{name}_count", labels, float(sum(sample.counts)))
    family.add_sample(f"{name}_sum", labels, sample.sum)


@dataclass(frozen=True)
class Snapshot:
    """What is served by HTTP. It is replaced as a whole, never changed."""

    time_s: float
    monotonic_s: float
    page: Page
    runs: list[api.Run] = field(default_factory=list)
    findings: list[api.Finding] = field(default_factory=list)
    gpus: list[api.Gpu] = field(default_factory=list)
    jobs: list[api.Job] = field(default_factory=list)
    collectors: list[api.Collector] = field(default_factory=list)
