"""/metrics: the agent's state as samples of the catalogue, rendered by prometheus-client; and the served snapshot."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from gpuwatch import api
from gpuwatch.diagnosis.rules.progress import straggler
from gpuwatch.ledger.states import GPU_STATES, HELD_IDLE, RUN_STATES, by_kind
from gpuwatch.metrics import BY_NAME, CATALOGUE, GPU, RUN, Sample, labels_of
from gpuwatch_agent.evaluator import FindingTracker
from gpuwatch_agent.gpus import GpuAccount
from gpuwatch_agent.gpus.readings import gpu_owner
from gpuwatch_agent.processes import ProcessTable, Shm
from gpuwatch_agent.runs import LOST, RUNNING, Run, RunKey
from gpuwatch_agent.runs.views import ActiveFinding
from gpuwatch_agent.runs.window import THROTTLED

_COUNTERS = [(metric.name, metric.counter, metric.needs) for metric in CATALOGUE if metric.counter]


def run_samples(run: Run, wall_offset_ns: int) -> Iterator[Sample]:
    """Yield one run's series by its hook. `wall_offset_ns`: Unix time minus the agent's monotonic clock."""
    if run.ledger is None:
        return
    key, counts = (run.run, str(run.rank)), run.counts
    for state in RUN_STATES:
        yield Sample("gpuwatch_run_seconds_total", run.ledger.totals_ns[state] / 1e9, (*key, state))
    for phase in ("data_wait", "transfer", "compute"):
        yield Sample("gpuwatch_step_phase_seconds_total", counts.phases_ns.get(phase, 0) / 1e9, (*key, phase))
    for name, ns in counts.declared_ns.items():
        yield Sample("gpuwatch_phase_seconds_total", ns / 1e9, (*key, name))
    for name, ns in counts.breakdown_ns.items():
        yield Sample("gpuwatch_compute_breakdown_seconds_total", ns / 1e9, (*key, name))
    for metric, counter, needed in _COUNTERS:
        if needed is None or getattr(counts, needed):
            yield Sample(metric, getattr(counts, counter) / (1e9 if counter.endswith("_ns") else 1), key)
    values = {
        "gpuwatch_ledger_watermark_timestamp_seconds": (run.ledger.watermark_ns + wall_offset_ns) / 1e9,
        "gpuwatch_samples_total": counts.samples if counts.samples >= 0 else None,
        "gpuwatch_tokens_total": counts.tokens if counts.tokens >= 0 else None,
        "gpuwatch_run_up": float(run.status == RUNNING and run.activity != "silent"),
        "gpuwatch_run_job_over": 1 if run.job_over else None,
        "gpuwatch_step_records_lost_total": run.lost,
    }
    yield from (Sample(metric, value, key) for metric, value in values.items() if value is not None)
    if (hello := run.hello) is not None:
        owner, loader = run.owner, None if hello.loader is None else hello.loader.num_workers
        ids = (owner.step, run.user, owner.container_id, owner.pod_uid, owner.namespace, owner.pod, owner.container)
        settings = (hello.timeline, hello.device, str(hello.world_size), "" if loader is None else str(loader))
        about = (hello.name, owner.job or hello.job, *ids, *settings, hello.versions.get("gpuwatch", ""))
        yield Sample("gpuwatch_run_info", 1, (*key, *about))


def recent_samples(view: api.Run | None) -> Iterator[Sample]:
    """Yield the step time percentiles and the MFU of a run's last minute; `view`: None before it was evaluated."""
    if view is None or view.recent is None or view.status != RUNNING:
        return
    key, recent = (view.run, str(view.rank)), view.recent
    for name in ("mfu", "mfu_estimated"):
        if (ratio := getattr(recent, f"{name}_ratio")) is not None:
            yield Sample(f"gpuwatch_run_{name}_ratio", ratio, key)
    for percentile, value in (("p50", recent.step_s_p50), ("p95", recent.step_s_p95)):
        if value is not None:
            yield Sample("gpuwatch_step_percentile_seconds", value, (*key, percentile))


def job_samples(jobs: Iterable[api.Job], runs: Mapping[str, Iterable[str]]) -> Iterator[Sample]:
    """Yield the ledgers of the jobs, as `Job.part` has them. `runs`: the live ones of each job."""
    for job in jobs:
        for state in sorted({*job.states, "compute", "down", "redone", "restart"}):
            yield Sample("gpuwatch_job_seconds_total", job.states.get(state, 0.0), (job.job, state))
        if lost_s := sum(job.lost.values()):
            yield Sample("gpuwatch_job_lost_seconds", lost_s, (job.job,))
        if job.goodput_ratio is not None:
            yield Sample("gpuwatch_job_goodput_ratio", job.goodput_ratio, (job.job,))
        yield Sample("gpuwatch_job_attempts_total", job.attempts, (job.job,))
        for run in sorted(runs[job.job]):
            yield Sample("gpuwatch_job_start_timestamp_seconds", job.started_s, (job.job, run))
        if job.redone_steps is not None and job.numbers is not None:
            first, after = job.numbers
            steps = {"next": after, "first": first, "missing": after - first - (job.steps - job.redone_steps)}
            known = ((kind, n) for kind, n in steps.items() if n or kind == "next")
            yield from (Sample("gpuwatch_job_steps", n, (job.job, kind)) for kind, n in known)


def shm_samples(runs: Iterable[Run], table: ProcessTable) -> Iterator[Sample]:
    """Yield /dev/shm as runs see it in their own mount namespaces: one for each run, of its ranks' the fullest."""
    fullest: dict[str, tuple[float, Shm]] = {}
    for run in runs:
        pid = table.host_pid(run.live_hello)
        if pid is not None and (shm := table.shm(pid)) is not None and not shm.is_hosts:
            mount = "run host" if run.run == "host" else run.run  # "host" is the node's own
            each = shm.used_bytes / max(1, shm.size_bytes), shm
            fullest[mount] = max(fullest.get(mount, each), each)
    for mount, (_, shm) in fullest.items():
        yield Sample("gpuwatch_shm_size_bytes", shm.size_bytes, (mount,))
        yield Sample("gpuwatch_shm_used_bytes", shm.used_bytes, (mount,))


def gpu_samples(account: GpuAccount, table: ProcessTable, wall_offset_ns: int) -> Iterator[Sample]:
    """Yield a GPU's ledger, its owner and, while it is held idle, a process that holds it."""
    key = (account.gpu, account.uuid)
    for state in GPU_STATES:
        seconds = account.ledger.totals_ns[state] / 1e9 * account.size_ratio
        yield Sample("gpuwatch_gpu_seconds_total", seconds, (*key, state))
    energy = account.ledger.energy
    for kind, joules in by_kind(energy.joules).items() if energy.counter is not None else ():
        yield Sample("gpuwatch_gpu_energy_joules_total", joules, (*key, kind))
    for state, joules in energy.joules.items():
        yield Sample("gpuwatch_gpu_state_energy_joules_total", joules, (*key, state))
    for shared_by, seconds in account.shared_s.items():
        yield Sample("gpuwatch_gpu_shared_seconds_total", seconds * account.size_ratio, (*key, *shared_by))
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


def finding_samples(tracker: FindingTracker, runs: list[Run]) -> Iterator[Sample]:
    """Yield 0 or 1 for each cause a run has had on any rank, evidence and advice of active ones, stragglers' delays."""
    by_cause: dict[tuple[str, str], list[ActiveFinding]] = {}
    for run in runs:
        for cause in tracker.causes_seen.get(run.key, ()):
            by_cause.setdefault((run.run, cause), [])
        for entry in tracker.active(run.run, run.rank):
            by_cause.setdefault((run.run, entry.finding.cause), []).append(entry)
            if entry.finding.cause == straggler.cause:
                yield Sample("gpuwatch_straggler_excess_ratio", entry.finding.ratio, (run.run, str(run.rank)))
    for key, entries in by_cause.items():
        yield Sample("gpuwatch_finding_active", float(bool(entries)), key)
        if entries:
            yield Sample("gpuwatch_finding_evidence_ratio", max(entry.finding.ratio for entry in entries), key)
        if brief := next((entry.brief for entry in entries if entry.brief), ""):
            yield Sample("gpuwatch_finding_info", 1, (*key, brief))


_WHEN = {name: metric.when for name, metric in BY_NAME.items()}
_OWNED = {name for name, metric in BY_NAME.items() if metric.labels[:2] in (RUN, GPU)}
_LEDGERS = {
    "gpuwatch_ledger_watermark_timestamp_seconds": "gpuwatch_run_seconds_total",
    "gpuwatch_gpu_ledger_watermark_timestamp_seconds": "gpuwatch_gpu_seconds_total",
}
"""By watermark: the counter that it belongs to."""
_ALWAYS = {name for name, when in _WHEN.items() if when == "always"} - _LEDGERS.keys()
_COUNTED = {name for name, when in _WHEN.items() if when in ("counted", "seen")} | _LEDGERS.keys()
_FROM_ZERO = ("compute", "input_wait")  # states of a run that are there from 0 on: rules compare its ranks by them
_TAKES = 2  # scrapes that must have taken a value that may be the last, or a first 0: those of a pair of Prometheus
_SCRAPED_TICKS, _LOST_S, _ENDED_S = 120, 300.0, 120.0
_QUIET = ("gpuwatch_gpu_seconds_total", "gpuwatch_gpu_energy_joules_total")
_QUIET_TICKS = 900  # A state that a GPU has not been in for so long is not served, nor its energy, until it is again


def standard(samples: Iterable[Sample]) -> list[Sample]:
    """Return what the history keeps: without what `--series full` adds, and without error counters at 0."""
    kept = (s for s in samples if _WHEN[s.metric] != "full" and (s.value or _WHEN[s.metric] != "counted"))
    return [each for each in kept if each.metric != "gpuwatch_gpu_throttled" or each.labels[2] in THROTTLED]


_Series = tuple[str, tuple[str, ...]]  # a metric, and its labels' values


class Served:
    """Which runs and samples are on /metrics.

    Series that stay at 0 are not. `increase` needs a 0 before a first rise: a group with a new series stays as in the
    last tick, with the new one at 0, until two scrapes took that. So each sample's states add up to its watermark.
    """

    def __init__(self, full: bool) -> None:
        self._full = full
        self._page = Page(())
        self._tick, self._taken, self._idle = 0, 0, _SCRAPED_TICKS
        self._served: dict[_Series, Sample] = {}
        self._last: dict[_Series, Sample] = {}
        self._grown: dict[_Series, int] = {}  # the tick at which each value was new, of _QUIET
        self._waits: dict[tuple[str, ...], int] = {}  # how many scrapes must still take a group as it is served
        self._ended: dict[tuple[str, int, float], int] = {}  # by run, rank and end (it may end again): scrapes since

    def runs(self, runs: Iterable[Run], now_s: float) -> tuple[set[RunKey], set[RunKey]]:
        """Begin a tick: return the keys of runs that are served, and of those that ended so long ago that only this is.

        An ended run's last values are served until two scrapes have taken them.
        """
        self._tick, self._taken = self._tick + 1, self._page.taken
        self._idle = 0 if self._taken else self._idle + 1
        former, self._ended = self._ended, {}
        # The last page did not have the last values of these.
        waiting = {key[1:] for key in self._waits}
        whole, ending = set(), set()
        for run in runs:
            if self._full or run.status == RUNNING or run.ended_s is None:
                whole.add(run.key)
                continue
            end = (*run.key, run.ended_s)
            taken = former.get(end, -self._taken)
            taken = 0 if (run.run, str(run.rank)) in waiting else taken + self._taken
            self._ended[end] = taken
            age_s = now_s - run.over_s
            if age_s < _ENDED_S and taken < _TAKES:
                whole.add(run.key)
            elif age_s < (_LOST_S if run.status == LOST or taken < _TAKES else _ENDED_S):
                ending.add(run.key)
        return whole, ending

    def page(self, samples: Iterable[Sample]) -> Page:
        """Return the page of this tick."""
        if self._full:
            return Page(list(samples))
        shown: list[Sample] = []
        found: dict[_Series, Sample] = {}
        for sample in samples:
            if (name := sample.metric) in _ALWAYS:
                shown.append(sample)
            elif name in _COUNTED and (name != "gpuwatch_gpu_throttled" or sample.labels[2] in THROTTLED):
                found[name, sample.labels] = sample
        quiet = ((key, each) for key, each in found.items() if key[0] in _QUIET)
        self._grown = {k: self._grown[k] if self._last.get(k) == each else self._tick for k, each in quiet}
        served = {key: each for key, each in found.items() if self._is_served(key, each.value)}
        self._hold_back(found, served)
        self._last, self._served = found, served
        self._page = Page([*shown, *served.values()])
        return self._page

    def _is_served(self, key: _Series, value: float) -> bool:
        """Return whether a series is not left out for its 0, or as a state that the GPU is not in any more."""
        metric, labels = key
        if metric in _QUIET:
            return value != 0 and self._tick - self._grown[key] < _QUIET_TICKS
        from_zero = metric == "gpuwatch_run_seconds_total" and labels[-1] in _FROM_ZERO
        return value != 0 or from_zero or key in self._served

    def _hold_back(self, found: Mapping[_Series, Sample], served: dict[_Series, Sample]) -> None:
        """Put what was served last in the place of the samples of those groups that scrapes must take as they were."""
        new = [_group(*key) for key in served.keys() - self._served.keys()]
        if not new and not self._waits:
            return
        there = {_group(*key) for key in found} & {_group(*key) for key in self._last}
        left = {group: waits - self._taken for group, waits in self._waits.items()} | dict.fromkeys(new, _TAKES)
        is_scraped = self._idle < _SCRAPED_TICKS
        self._waits = {group: n for group, n in left.items() if n > 0 and group in there and is_scraped}
        for key in [key for key in served if _group(*key) in self._waits]:
            served[key] = self._served.get(key) or self._last.get(key) or Sample(key[0], 0.0, key[1])


def _group(metric: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return what it is held back with: a ledger's states and watermark, or all of a counter with its run or GPU."""
    return (_LEDGERS.get(metric, metric), *(labels[:2] if metric in _OWNED else ()))


FORMATS: Sequence[Any] = (exposition, openmetrics)
"""The modules that write a page: as Prometheus text, and (True) as OpenMetrics. Typed in one of the two only."""


class Page:
    """One moment's /metrics, rendered at the first request and then served as bytes."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self.taken = 0  # how often it was asked for
        self._bodies: dict[tuple[bool, bool], bytes] = {}

    def body(self, open_metrics: bool, compressed: bool) -> bytes:
        """Return the page as Prometheus text or OpenMetrics, gzipped or plain."""
        key = (open_metrics, compressed)
        if key not in self._bodies:
            plain = self.body(open_metrics, False) if compressed else FORMATS[open_metrics].generate_latest(self)
            self._bodies[key] = gzip.compress(plain, 1) if compressed else plain
        return self._bodies[key]

    def values(self, metric: str) -> dict[tuple[str, ...], float]:
        """Return a metric's values by its labels' values, in the catalogue's order; empty when it was not measured."""
        return {s.labels: s.value for s in self._samples if s.metric == metric}

    def collect(self) -> Iterator[Metric]:
        """Yield the samples as prometheus-client's families, in the catalogue's order."""
        by_metric: dict[str, list[Sample]] = {}
        for sample in self._samples:
            by_metric.setdefault(sample.metric, []).append(sample)
        for name, metric in BY_NAME.items():
            if name in by_metric:
                family = Metric(name.removesuffix("_total").removesuffix("_info"), metric.help, metric.kind)
                for sample in by_metric[name]:
                    family.add_sample(name, labels_of(sample), sample.value)
                yield family


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
