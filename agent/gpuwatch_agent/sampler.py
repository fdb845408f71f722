"""The agent's main loop: once a second, apply what arrived, sample the node, book, diagnose, commit, publish."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from gpuwatch import __version__, wire
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors import CollectorRunner, build, gpu_source
from gpuwatch_agent.evaluator import Evaluator
from gpuwatch_agent.exporter import (
    AnySample,
    Page,
    Snapshot,
    finding_samples,
    gpu_samples,
    job_samples,
    recent_samples,
    run_samples,
    shm_samples,
    standard,
)
from gpuwatch_agent.gpus import GpuLedgers
from gpuwatch_agent.gpus.allocations import AllocationWatch
from gpuwatch_agent.gpus.readings import gpu_readings, gpu_view, note_gpus, without_hook
from gpuwatch_agent.history import FindingRow, History, StepBatch, Tick
from gpuwatch_agent.options import STANDARD, Choice, Roots
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.control_groups import OomWatch, group_samples
from gpuwatch_agent.processes.stacks import StackWatch
from gpuwatch_agent.processes.workers import RunProcesses, WorkerWatch
from gpuwatch_agent.receiver import Arrival, Receiver
from gpuwatch_agent.runs import Run, RunRegistry
from gpuwatch_agent.runs.jobs import Jobs
from gpuwatch_agent.runs.views import finding_view
from gpuwatch_agent.runs.window import RecentSamples

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_TRIM_EVERY = 60
_FINDINGS_EVERY = 5
"""Ticks between two updates of an active finding in the history."""


class Sampler:
    """Owns the agent's state: only this thread changes it."""

    def __init__(
        self,
        receiver: Receiver,
        history: History,
        roots: Roots,
        boot_id: str,
        choice: Choice = STANDARD,
        thresholds: Thresholds = THRESHOLDS,
    ) -> None:
        self._receiver = receiver
        self._history = history
        self._roots = roots
        self._boot_id = boot_id
        self._choice = choice
        collectors = build(roots, choice)
        self._gpu_collector = gpu_source(collectors)
        self._collectors = CollectorRunner(collectors)
        self._runs = RunRegistry(boot_id)
        self._allocations = AllocationWatch(choice.allocations, choice.pod_resources)
        self._jobs = Jobs()
        self._gpus = GpuLedgers(thresholds.gpu_idle_utilization)
        self._table = ProcessTable(roots.procfs, roots.sysfs, roots.shm)
        self._workers = WorkerWatch(self._table)
        self._processes = RunProcesses(roots.procfs, self._table)
        self._oom = OomWatch(self._table, roots.procfs, roots.sysfs)
        self._node = RecentSamples()
        self._evaluator = Evaluator(self._node, self._workers, self._table, thresholds)
        self._ticks_done = 0
        self._kept_findings: Collection[tuple[tuple[str, int, str, str], bool]] = ()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.snapshot: Snapshot | None = None
        self.extra_samples: Callable[[], Iterable[Sample]] = tuple
        """Further series of the agent itself (the notifier's counters)."""
        self.prices = Prices()
        self.stacks: StackWatch | None = None
        """Captures stacks when a finding begins; None: not enabled."""

    def start(self) -> None:
        """Load the state that a former agent kept, and start."""
        now_ns, now_s = time.monotonic_ns(), time.time()
        records = self._history.reader.runs()
        self._runs.restore(records, now_ns, now_s)
        self._jobs.update(records)
        self._gpus.restore(self._history.reader.gpus(), self._boot_id, now_ns)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the tick in progress and a last one, so that all messages are booked."""
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            last = self._stop.is_set()
            try:
                self._tick()
                self._history.downsample(time.time())
                if self._ticks_done % _TRIM_EVERY == 0:
                    self._history.trim(time.time())
            except Exception:
                logger.exception("a tick of the sampler failed; it continues with the next one")
            if last:
                return
            self._ticks_done += 1
            due = max(due + INTERVAL_S, time.monotonic())  # a missed tick is skipped
            self._stop.wait(max(0.0, due - time.monotonic()))

    def _tick(self) -> None:
        self._runs.excuse_pause(time.monotonic_ns())
        self._table.begin_tick()
        arrivals = self._receiver.drain()
        now_ns, now_s = time.monotonic_ns(), time.time()
        with_steps = [
            arrival for arrival in arrivals if self._runs.apply(arrival.message, arrival.monotonic_ns, arrival.time_s)
        ]
        self._runs.forget_ended(now_s)
        runs = list(self._runs.runs.values())
        for run in runs:
            run.pass_time(now_ns, now_s, self._table.alive(run.hello))
            run.remember(now_ns)
        self._jobs.update(run for run in runs if run.changed)
        self._oom.update(runs, now_ns)
        node_samples = self._collectors.tick()
        self._node.remember(node_samples, now_ns)
        self._table.update_shm(run.live_hello for run in runs)
        self._workers.update(runs, now_ns)
        self._processes.update(runs, now_ns)
        allocations = self._allocations.tick(self._gpu_collector.devices() if self._gpu_collector is not None else ())
        readings = gpu_readings(self._gpu_collector, self._node, self._table, allocations)
        runs_by_pid = self._runs_by_pid(runs)
        self._gpus.advance(readings, runs_by_pid, now_ns)
        alone = without_hook(readings, runs_by_pid, self._table)
        if alone is not None:
            node_samples.append(Sample("gpuwatch_processes_without_hook", alone))
        accounts = list(self._gpus.accounts.values())
        note_gpus(runs, accounts, self._gpu_collector)
        self._evaluator.evaluate(runs, accounts, now_ns, now_s, self.prices)
        if self.stacks is not None:
            self.stacks.tick(runs, self._evaluator.findings, self._table, now_ns, now_s)
        samples = [*self._samples(runs, now_ns, now_s), *node_samples]
        if not self._choice.full:
            samples = list(standard(samples))
        self._commit(samples, runs, with_steps, now_s)
        self._publish(samples, runs, now_ns, now_s)

    def _runs_by_pid(self, runs: Sequence[Run]) -> dict[int, Run]:
        found = {}
        for run in runs:
            pid = self._table.host_pid(run.live_hello)
            if pid is not None:
                found[pid] = run
                run.owner = self._table.owner(pid)
                run.user = run.owner.user
        return found

    def _samples(self, runs: Sequence[Run], now_ns: int, now_s: float) -> list[AnySample]:
        offset_ns = int(now_s * 1e9) - now_ns
        samples: list[AnySample] = []
        for run in runs:
            samples += run_samples(run, self._workers, offset_ns)
            samples += self._processes.samples(run)
            samples += shm_samples(run, self._table)
        samples += job_samples(self._jobs.views({run.run for run in runs}))
        for view in self._evaluator.views.values():
            samples += recent_samples(view)
        samples += group_samples(runs, self._table, self._roots.procfs, self._roots.sysfs)
        for account in self._gpus.accounts.values():
            samples += gpu_samples(account, self._table, offset_ns)
        samples += finding_samples(self._evaluator.findings, list(runs))
        samples += [
            Sample("gpuwatch_build_info", 1, (__version__,)),
            Sample("gpuwatch_messages_received_total", self._receiver.received),
            *(Sample("gpuwatch_messages_rejected_total", n, (why,)) for why, n in sorted(self._rejected().items())),
            Sample("gpuwatch_history_bytes", self._history.size_bytes),
            Sample("gpuwatch_history_failures_total", self._history.failures),
            *self.extra_samples(),
            Sample("gpuwatch_sample_timestamp_seconds", now_s),
        ]
        return samples

    def _rejected(self) -> dict[str, int]:
        """Return rejected messages by reason; the expected reasons exist from the start, at 0."""
        refused = {"too_many_runs": self._runs.refused}
        return {"malformed": 0, "version": 0, "too_large": 0, "impossible": 0, **self._receiver.rejected, **refused}

    def _commit(
        self, samples: Sequence[AnySample], runs: Sequence[Run], arrivals: Sequence[Arrival], now_s: float
    ) -> None:
        changed = [run for run in runs if run.changed]
        active = {key: entry for key, entry in self._evaluator.findings.entries.items() if entry.active}
        again = self._ticks_done % _FINDINGS_EVERY == 0
        kept = {
            (key, entry.stacks is not None) for key, entry in active.items()
        }  # stacks come seconds after the finding
        found = {
            key: entry
            for key, entry in active.items()
            if again or (key, entry.stacks is not None) not in self._kept_findings
        }
        tick = Tick(
            time_s=now_s,
            samples=[sample for sample in samples if isinstance(sample, Sample)],
            runs=[record for run in changed if (record := run.record()) is not None],
            gpus=[account.record(self._boot_id) for account in self._gpus.accounts.values()],
            steps=step_batches(arrivals),
            findings=[
                FindingRow(*key, e.since_s, e.seen_s, msgspec.json.encode(finding_view(e)).decode())
                for key, e in found.items()
            ],
        )
        if self._history.commit(tick):
            self._kept_findings = kept
            for run in changed:
                run.changed = False

    def _publish(self, samples: Sequence[AnySample], runs: Sequence[Run], now_ns: int, now_s: float) -> None:
        views = sorted(self._evaluator.views.values(), key=lambda view: -view.last_message_s)
        found = [
            msgspec.structs.replace(finding, run=view.run, rank=view.rank, name=view.name)
            for view in views
            for finding in view.findings
        ]
        found += map(finding_view, self._evaluator.findings.active("", 0))
        self.snapshot = Snapshot(
            time_s=now_s,
            monotonic_s=now_ns / 1e9,
            page=Page(samples),
            runs=views,
            jobs=list(self._jobs.views()),
            findings=found,
            gpus=[
                gpu_view(account, self._gpu_collector, self._node, self._table)
                for account in self._gpus.accounts.values()
            ],
            collectors=self._collectors.outcomes,
        )


def step_batches(arrivals: Sequence[Arrival]) -> list[StepBatch]:
    """Return the step records in these messages."""
    batches = []
    for arrival in arrivals:
        message = arrival.message
        if isinstance(message, wire.Steps) and message.columns:
            offset_ns = message.origin.time_ns - message.origin.monotonic_ns
            batches.append(
                StepBatch(message.run, message.rank, message.first_step, arrival.time_s, offset_ns, message.columns)
            )
    return batches
