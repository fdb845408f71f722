"""The agent's main loop: once a second, apply what arrived, sample the node, book, diagnose, commit, publish."""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuwatch import __version__, wire
from gpuwatch.config import Config
from gpuwatch.errors import ProtocolError
from gpuwatch.metrics import Sample
from gpuwatch_agent import exporter
from gpuwatch_agent.collectors import CollectorRunner, build, gpu_source
from gpuwatch_agent.collectors.node import Roots
from gpuwatch_agent.deadline import Background
from gpuwatch_agent.evaluator import Evaluator
from gpuwatch_agent.gpus import GpuLedgers
from gpuwatch_agent.gpus.allocations import AllocationWatch
from gpuwatch_agent.gpus.readings import gpu_readings, gpu_view, note_gpus, without_hook
from gpuwatch_agent.history import History, RetentionClock, StepBatch, Tick
from gpuwatch_agent.history.writer import HistoryWriter
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.stacks import StackWatch
from gpuwatch_agent.processes.workers import OomWatch, WorkerWatch, group_samples
from gpuwatch_agent.receiver import Arrival, Receiver
from gpuwatch_agent.runs import Run, RunKey, RunRegistry
from gpuwatch_agent.runs.jobs import Jobs
from gpuwatch_agent.runs.views import finding_view
from gpuwatch_agent.runs.window import RecentSamples

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_TIDY_EVERY, _TRIM_EVERY = 5, 60
_CHECK_EVERY, _FIRST_CHECK = 3600, 600  # ticks
_CLOCK_SET_NS = 1_000_000_000
_REJECTED = ("malformed", "version", "too_large", "impossible", "too_many_runs")
"""Reasons of rejected messages that exist from the start, at 0."""
_FINDINGS_EVERY = 5  # ticks between two updates of an active finding in the history


class Sampler(Background):
    """Owns the agent's state: only this thread changes it. It ends with a last tick, which books all messages."""

    def __init__(self, receiver: Receiver, history: History, config: Config, boot_id: str) -> None:
        super().__init__("sampler", 10.0)
        own, thresholds = config.agent, config.thresholds
        roots = Roots(Path(own.procfs), Path(own.sysfs), Path(own.shm))
        self._receiver = receiver
        self._history, self.writer = history, HistoryWriter(history)
        self._retention_s = RetentionClock()
        self._boot_id, self._lost_memory_s = boot_id, config.alerts.gpu_lost_memory_s
        self._full = own.series == "full"
        self._served = exporter.Served(self._full)
        self._gpu_collector = gpu_source(roots, own)
        self._collectors = CollectorRunner(build(roots, self._gpu_collector))
        self._table = ProcessTable(roots.procfs, roots.sysfs, roots.shm)
        self._runs = RunRegistry(boot_id, self._table.alive, self._table.is_peer)
        self._allocations = AllocationWatch(Path(own.allocations), Path(own.pod_resources))
        self._jobs = Jobs(thresholds)
        self._gpus = GpuLedgers(thresholds.gpu_idle_utilization)
        self._workers = WorkerWatch(self._table)
        self._oom = OomWatch(self._table)
        self._node = RecentSamples()
        self._evaluator = Evaluator(self._node, self._workers, config)
        self._ticks_done = self._offset_ns = 0
        self.ticked_s = time.monotonic()  # when the last tick ended, on the monotonic clock
        self._kept_findings: Collection[tuple[tuple[str, int, str, str], bool]] = ()
        self.snapshot: exporter.Snapshot | None = None
        self.extra_samples: list[Callable[[], Iterable[Sample]]] = []
        """Further series of the agent itself (the notifier's counters)."""
        self.stacks: StackWatch | None = None  # captures stacks when a finding begins; None: not enabled

    def start(self) -> None:
        """Load the state that a former agent kept, and start."""
        now_ns, now_s = time.monotonic_ns(), time.time()
        try:
            records = self._history.reader.records()
            self._runs.restore(records, now_ns, now_s)
            self._jobs.update(sorted(records, key=lambda run: run.started_s))
            if self._history.was_behind:
                logger.warning(
                    "the previous agent served data that it had not written: GPU counters restart at 0, a run's continue with its next message"
                )
            else:
                kept = self._history.reader.gpus()
                self._gpu_collector.expect(self._gpus.restore(kept, self._boot_id, now_ns, self._lost_memory_s))
        except sqlite3.Error as error:  # on a full disk
            logger.warning("the previous agent's state cannot be read (%s): counters start from hooks' totals", error)
        super().start()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            last = self._stop.is_set()
            with self._part("tick"):
                self._tick()
                self.ticked_s = time.monotonic()
            with self._part("history"):
                if self._ticks_done % _TIDY_EVERY == 0:
                    self.writer.tidy(self._retention_s(), self._ticks_done % _TRIM_EVERY == 0)
                if self._ticks_done % _CHECK_EVERY == _FIRST_CHECK and not self.writer.waiting:  # else its disk hangs
                    threading.Thread(target=self._history.check, name="history check", daemon=True).start()
            if last:
                return
            self._ticks_done += 1
            due = max(due + INTERVAL_S, time.monotonic())  # a missed tick is skipped
            self._stop.wait(max(0.0, due - time.monotonic()))

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Count and log an error of one part of a tick; the other parts go on."""
        try:
            yield
        except Exception as error:
            self._runs.count_failure(name, error, "its results are missing for this second")

    def _each(self, step: str, work: Callable[[Run], object], now_s: float) -> list[Run]:
        """Do it for each run, and return those for which it worked; the others are dropped."""
        for run in list(self._runs.runs.values()):
            with self._runs.guard(run, step, now_s):
                work(run)
        return list(self._runs.runs.values())

    def _tick(self) -> None:
        self._table.begin_tick()
        arrivals = self._receiver.drain()
        now_ns, now_s = time.monotonic_ns(), time.time()
        self._runs.excuse_pause(now_ns)
        steps = [batch for arrival in arrivals if (batch := self._apply(arrival)) is not None]
        self._runs.forget_ended(now_s)

        def book(run: Run) -> None:
            run.pass_time(now_ns, now_s, self._table.alive(run.hello))
            run.remember(now_ns, len(self._runs.runs))

        runs = self._each("book", book, now_s)
        with self._part("jobs"):
            self._jobs.update(run for run in runs if run.changed)
        node_samples: list[Sample] = []
        with self._part("collectors"):
            node_samples = self._collectors.tick()
            self._node.remember(node_samples, now_ns)
        with self._part("processes"):
            self._oom.update(runs, now_ns)
            self._table.update_shm(run.live_hello for run in runs)
            self._workers.update(runs, now_ns)
        with self._part("gpus"):
            allocations = self._allocations.tick(self._gpu_collector.devices())
            readings = gpu_readings(self._gpu_collector, self._node, self._table, allocations)
            runs_by_pid = self._runs_by_pid(runs)
            self._gpus.advance(readings, runs_by_pid, now_ns)
            if (alone := without_hook(readings, runs_by_pid, self._table)) is not None:
                node_samples.append(Sample("gpuwatch_processes_without_hook", alone))
        for run, error in self._gpus.failed:
            self._runs.drop(run, "gpus", error, now_s)
        accounts = list(self._gpus.accounts.values())
        with self._part("findings"):
            note_gpus(self._runs.runs.values(), accounts, self._gpu_collector)
            self._evaluator.evaluate(self._runs, accounts, now_ns, now_s)
        if self.stacks is not None:
            with self._part("stacks"):
                runs = list(self._runs.runs.values())
                self.stacks.tick(runs, self._evaluator.findings, self._table, now_ns, now_s)
        records: dict[RunKey, bytes] = {}
        samples: list[Sample] = []
        offset_ns = int(now_s * 1e9) - now_ns
        behind = self._history.was_behind  # then a counter that was restored may be lower than it was served
        known = [run for run in self._runs.runs.values() if not (behind and run.restored)]
        whole, ending = self._served.runs(known, now_s)
        if abs(offset_ns - self._offset_ns) < _CLOCK_SET_NS:  # two clocks, read one after the other
            offset_ns = self._offset_ns
        self._offset_ns = offset_ns

        def serve(run: Run) -> None:
            found: list[Sample] = []
            if run.key in whole:
                found += exporter.run_samples(run, offset_ns)
                found += self._workers.samples(run)
                found += exporter.recent_samples(self._evaluator.views.get(run.key))
            if run.changed:  # fails here, not in the transaction of all
                record = run.record()
                self._runs.weigh(run, record)
                if record is not None:
                    records[run.key] = record
            samples.extend(found)

        runs = self._each("serve", serve, now_s)
        served, over = ([run for run in runs if run.key in some] for some in (whole, ending))
        samples += [*self._samples(served, over, offset_ns, now_s), *node_samples]
        with self._part("history"):
            kept = [*samples, *self._history_samples()]
            self._commit(kept if self._full else exporter.standard(kept), records, steps, now_s)
        self._publish([*samples, *self._history_samples()], now_ns, now_s)

    def _apply(self, arrival: Arrival) -> StepBatch | None:
        """Apply a message; return the step records in it that are new."""
        message, origin = arrival.message, arrival.message.origin
        try:
            run = self._runs.apply(message, arrival.monotonic_ns, arrival.time_s, arrival.peer)
        except ProtocolError as error:
            self._receiver.reject(error.reason, error)
            return None
        except Exception as error:  # all other messages count
            self._runs.count_failure("apply", error, f"a message of run {message.run!r} is not applied")
            return None
        if run is None or not isinstance(message, wire.Steps):
            return None
        offset_ns = origin.time_ns - origin.monotonic_ns
        return StepBatch(run.run, message.rank, message.first_step, arrival.time_s, offset_ns, message.columns)

    def _runs_by_pid(self, runs: Sequence[Run]) -> dict[int, Run]:
        found = {}
        for run in runs:
            if (pid := self._table.host_pid(run.live_hello)) is not None:
                found[pid] = run
                run.owner = self._table.owner(pid)
                run.user = run.owner.user
        return found

    def _samples(self, runs: Sequence[Run], over: Sequence[Run], offset_ns: int, now_s: float) -> list[Sample]:
        samples: list[Sample] = [Sample("gpuwatch_run_up", 0, (r.run, str(r.rank))) for r in over]
        samples += [Sample("gpuwatch_run_job_over", 1, (r.run, str(r.rank))) for r in over if r.job_over]
        # Of a job's nodes one serves it; once scrapes took its last values, only where another attempt is expected.
        names = {run.run for run in (*runs, *(one for one in over if not one.ended_well)) if run.rank == 0}
        served = (job for job in self._jobs.views(served=True) if job.runs[-1] in names)
        samples += exporter.job_samples(served, self._jobs.runs_of(names))
        samples += group_samples(runs, self._table)
        samples += exporter.shm_samples(runs, self._table)
        for account in self._gpus.accounts.values():
            samples += exporter.gpu_samples(account, self._table, offset_ns)
        samples += exporter.finding_samples(self._evaluator.findings, [*runs, *over])
        rejected = {**dict.fromkeys(_REJECTED, 0), **self._receiver.rejected}
        samples += [
            Sample("gpuwatch_build_info", 1, (__version__, os.environ.get("GPUWATCH_ADDRESS", ""))),
            Sample("gpuwatch_messages_received_total", self._receiver.received),
            *(Sample("gpuwatch_messages_rejected_total", n, (why,)) for why, n in sorted(rejected.items())),
            *(Sample("gpuwatch_run_failures_total", n, (step,)) for step, n in sorted(self._runs.failures.items())),
            Sample("gpuwatch_runs_kept_apart_total", self._runs.kept_apart),
            *(sample for samples_of in self.extra_samples for sample in samples_of()),
            Sample("gpuwatch_sample_timestamp_seconds", now_s),
        ]
        return samples

    def _history_samples(self) -> Iterator[Sample]:
        """Yield the history's own series: those on a page show whether its data is written."""
        yield Sample("gpuwatch_history_bytes", self._history.size_bytes)
        yield Sample("gpuwatch_history_failures_total", self._history.failures + self.writer.skipped)
        yield Sample("gpuwatch_history_bad_rows_total", self._history.bad_rows)
        yield Sample("gpuwatch_history_damaged_total", self._history.damaged)
        yield Sample("gpuwatch_history_waiting_seconds", len(self.writer.waiting))

    def _commit(
        self, samples: Sequence[Sample], records: Mapping[RunKey, bytes], steps: Sequence[StepBatch], now_s: float
    ) -> None:
        active = {
            (key, entry.stacks is not None): entry  # stacks come seconds after the finding
            for key, entry in self._evaluator.findings.entries.items()
            if entry.active
        }
        again = self._ticks_done % _FINDINGS_EVERY == 0
        tick = Tick(
            time_s=now_s,
            samples=samples,
            runs=records,
            gpus=[account.record(self._boot_id) for account in self._gpus.accounts.values()],
            steps=steps,
            findings=[
                (*key, int(e.since_s * 1000), int(e.seen_s * 1000), msgspec.json.encode(finding_view(e)).decode())
                for (key, has_stacks), e in active.items()
                if again or (key, has_stacks) not in self._kept_findings
            ],
        )
        if self.writer.commit(tick):
            self._kept_findings = active.keys()
            for key in records:
                self._runs.runs[key].changed = False

    def _publish(self, samples: Sequence[Sample], now_ns: int, now_s: float) -> None:
        views = sorted(self._evaluator.views.values(), key=lambda view: -view.last_message_s)
        found = [replace(f, run=view.run, rank=view.rank, name=view.name) for view in views for f in view.findings]
        found += map(finding_view, self._evaluator.findings.active("", 0))
        self.snapshot = exporter.Snapshot(
            time_s=now_s,
            monotonic_s=now_ns / 1e9,
            page=self._served.page(samples),
            runs=views,
            jobs=self._jobs.views(),
            findings=found,
            gpus=[gpu_view(one, self._gpu_collector, self._node, self._table) for one in self._gpus.accounts.values()],
            collectors=self._collectors.outcomes,
        )
