"""Resource use of each run's processes: the training process itself, and its loader's workers by the pids in its hook's message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.host import blocked, proc
from gpuwatch.host.cgroup import Quota, throttled_ratio
from gpuwatch.metrics import Sample
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.runs.records import WorkerIo

_WINDOW_NS = 15_000_000_000
_MOST_WORKERS = 256
_MOST_SAMPLED = 64
_SAMPLES_KEPT = 16
_MEMORY_EVERY_NS = 15_000_000_000


class WorkerWatch:
    """Follows workers as they come and go; a worker that ended keeps its part of the run's total."""

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._cpu_s: dict[int, deque[tuple[int, float, float | None]]] = {}
        """By pid: (when, CPU time, time ready to run without a core)."""
        self._waits: dict[tuple[str, int], deque[tuple[str, ...]]] = {}
        self._private: dict[int, tuple[int, int | None]] = {}
        """By pid: (when, private memory), of one worker of each run."""
        self._received: dict[tuple[str, int], deque[tuple[int, int]]] = {}
        self._quotas: dict[tuple[str, int], deque[Quota]] = {}

    def update(self, runs: Sequence[Run], now_ns: int) -> None:
        """Read every known worker once and add to the runs' totals."""
        workers = {run.key: _worker_pids(run, self._table) for run in runs}
        alive = {pid for pids in workers.values() for pid in pids}
        for by_pid in (self._cpu_s, self._private):
            for pid in by_pid.keys() - alive:
                del by_pid[pid]
        running = {run.key for run in runs if run.status == RUNNING}
        for by_run in (self._waits, self._received, self._quotas):
            for key in by_run.keys() - running:
                del by_run[key]
        for run in runs:
            if run.status == RUNNING:
                known = run.worker_seen_s
                run.worker_seen_s = {pid: known[pid] for pid in workers[run.key] if pid in known}
            if workers[run.key]:
                self._sample(run, workers[run.key], now_ns)

    def _sample(self, run: Run, pids: Sequence[int], now_ns: int) -> None:
        table, first = self._table, pids[0]
        if first not in self._private or now_ns - self._private[first][0] >= _MEMORY_EVERY_NS:
            self._private[first] = (now_ns, table.read(proc.private_bytes, first))
        found = tuple(w for pid in pids[:_MOST_SAMPLED] if (w := table.read(blocked.blocked_on, pid)) is not None)
        self._waits.setdefault(run.key, deque(maxlen=_SAMPLES_KEPT)).append(found)
        if (quota := table.quota(first)) is not None:
            self._quotas.setdefault(run.key, deque(maxlen=_SAMPLES_KEPT)).append(quota)
        if (received := table.read(proc.received_bytes, first)) is not None:
            self._received.setdefault(run.key, deque(maxlen=_SAMPLES_KEPT)).append((now_ns, received))
        for pid in pids:
            cpu_s = table.read(proc.process_cpu_s, pid)
            if cpu_s is None:
                self._cpu_s.pop(pid, None)
                continue
            run.worker_cpu_s += max(0.0, cpu_s - run.worker_seen_s.get(pid, 0.0))
            run.worker_seen_s[pid] = cpu_s
            seen = self._cpu_s.setdefault(pid, deque())
            seen.append((now_ns, cpu_s, table.read(proc.run_queue_s, pid)))
            while len(seen) > 2 and seen[1][0] <= now_ns - _WINDOW_NS:
                seen.popleft()

    def waits(self, run: Run) -> dict[str, float] | None:
        """Return the share of the last samples in which a worker was blocked on each of `gpuwatch.host.blocked.WAITS`; None with too few."""
        return blocked.shares(wait for sample in self._waits.get(run.key, ()) for wait in sample)

    def quota(self, run: Run) -> tuple[float | None, float | None]:
        """Return (cores of the workers' CPU quota, share of its last periods in which it was exhausted), each None where not known."""
        seen = self._quotas.get(run.key)
        return (seen[-1].cores, throttled_ratio(seen[0], seen[-1])) if seen else (None, None)

    def receive_rate(self, run: Run) -> float | None:
        """Return the bytes per second received in the workers' network namespace; None where that is not visible."""
        seen = self._received.get(run.key)
        if not seen or seen[-1][0] <= seen[0][0]:
            return None
        return max(0, seen[-1][1] - seen[0][1]) / ((seen[-1][0] - seen[0][0]) / 1e9)

    def ratios(self, run: Run) -> tuple[float, ...] | None:
        """Return the CPU use of each live worker over the last 15 s, 1.0 = one core; None where it is not known."""
        return tuple(ratio for ratio, _ in self._use(run)) or None

    def busy_ratios(self, run: Run) -> tuple[float, ...] | None:
        """Return the same with the time in the run queue; None where the kernel does not count it."""
        ratios = [busy for _, busy in self._use(run)]
        known = tuple(busy for busy in ratios if busy is not None)
        return known if known and len(known) == len(ratios) else None

    def _use(self, run: Run) -> Iterator[tuple[float, float | None]]:
        """Yield (CPU use, the same with the run queue) of each live worker over the last 15 s."""
        for pid in _worker_pids(run, self._table):
            seen = self._cpu_s.get(pid)
            if seen and seen[-1][0] > seen[0][0]:
                (begin_ns, cpu_s, queue_s), (end_ns, cpu_end_s, queue_end_s) = seen[0], seen[-1]
                used_s, elapsed_s = cpu_end_s - cpu_s, (end_ns - begin_ns) / 1e9
                waited_s = None if queue_s is None or queue_end_s is None else queue_end_s - queue_s
                yield used_s / elapsed_s, None if waited_s is None else (used_s + waited_s) / elapsed_s

    def private_bytes(self, run: Run) -> int | None:
        """Return the private memory of the run's first worker; None where it is not known."""
        return next((self._private[pid][1] for pid in _worker_pids(run, self._table)[:1] if pid in self._private), None)

    def count(self, run: Run) -> int:
        """Return how many of the run's workers could be read."""
        return sum(pid in self._cpu_s for pid in _worker_pids(run, self._table))


EVERY_NS = 5_000_000_000


@dataclass
class _Seen:
    """One run as it was seen last."""

    process: proc.ProcessUsage | None = None
    files: int | None = None
    in_disk_wait: int = 0
    workers: int = 0
    last: dict[int, WorkerIo] = field(default_factory=dict)


class RunProcesses:
    """Reads every running run's processes, every five seconds."""

    def __init__(self, procfs: Path, table: ProcessTable) -> None:
        self._procfs = procfs
        self._table = table
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._sampled_ns: int | None = None

    def update(self, runs: Sequence[Run], now_ns: int) -> None:
        """Read the processes again, if it is time, and add what the workers did to their runs' totals."""
        if self._sampled_ns is not None and now_ns - self._sampled_ns < EVERY_NS:
            return
        self._sampled_ns = now_ns
        running = {run.key: run for run in runs if run.live_hello is not None}
        for key in self._seen.keys() - running.keys():
            del self._seen[key]
        for key, run in running.items():
            pid = self._table.host_pid(run.hello)
            if pid is None:
                self._seen.pop(key, None)
                continue
            seen = self._seen.setdefault(key, _Seen(last=dict(run.worker_io_seen)))
            seen.process = proc.usage(pid, self._procfs)
            seen.files = self._table.open_files(pid)
            self._read_workers(run, seen)

    def samples(self, run: Run) -> Iterator[Sample]:
        """Yield the series of one run's processes."""
        key, seen = (run.run, str(run.rank)), self._seen.get(run.key)
        if seen is not None and seen.process is not None:
            yield Sample("gpuwatch_run_resident_memory_bytes", seen.process.resident_bytes, key)
            yield Sample("gpuwatch_run_threads", seen.process.threads, key)
            if seen.files is not None:
                yield Sample("gpuwatch_run_open_files", seen.files, key)
        if seen is not None and seen.workers:
            yield Sample("gpuwatch_loader_workers_in_disk_wait", seen.in_disk_wait, key)
        totals = {
            "gpuwatch_loader_worker_read_bytes_total": run.worker_io.read_bytes,
            "gpuwatch_loader_worker_written_bytes_total": run.worker_io.written_bytes,
            "gpuwatch_loader_worker_run_queue_seconds_total": run.worker_io.run_queue_s,
        }
        yield from (Sample(metric, total, key) for metric, total in totals.items() if total is not None)

    def _read_workers(self, run: Run, seen: _Seen) -> None:
        """Add up what the workers did since they were seen last; one that ended keeps its part."""
        pids = _worker_pids(run, self._table)
        found = {pid: figures for pid in pids if (figures := proc.usage(pid, self._procfs)) is not None}
        seen.workers = len(found)
        seen.in_disk_wait = sum(figures.state == "D" for figures in found.values())
        now = {pid: WorkerIo(f.read_bytes, f.written_bytes, f.run_queue_s) for pid, f in found.items()}
        for pid, io in now.items():
            run.worker_io = run.worker_io.grown(io, seen.last.get(pid, WorkerIo()))
        seen.last = now
        run.worker_io_seen = dict(now)


def _worker_pids(run: Run, table: ProcessTable) -> tuple[int, ...]:
    """Return the pids of a run's workers; none where they are another pid namespace's."""
    hello = run.live_hello
    if hello is None or hello.loader is None or table.host_pid(hello) != hello.pid:
        return ()
    pids = hello.loader.worker_pids[:_MOST_WORKERS]
    return pids if run.uid is None else tuple(pid for pid in pids if table.descends_from(pid, hello.pid))
