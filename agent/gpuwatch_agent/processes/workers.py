"""What the processes of each run take of their node: the training process itself, and its loader's workers, by the pids that its hook names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.host import blocked
from gpuwatch.host.cgroup import Quota, throttled_ratio
from gpuwatch.host.proc import ProcessUsage, usage
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
        """By pid: (when, memory of its own), of one worker of each run."""
        self._received: dict[tuple[str, int], deque[tuple[int, int]]] = {}
        self._quotas: dict[tuple[str, int], deque[Quota]] = {}

    def update(self, runs: list[Run], now_ns: int) -> None:
        """Read every known worker once and add to the runs' totals."""
        pids = {pid for run in runs for pid in _worker_pids(run, self._table)}
        for gone in self._cpu_s.keys() - pids:
            del self._cpu_s[gone]
        self._private = {pid: seen for pid, seen in self._private.items() if pid in pids}
        for run in runs:
            for pid in _worker_pids(run, self._table)[:1]:
                sampled_ns = self._private.get(pid, (None, None))[0]
                if sampled_ns is None or now_ns - sampled_ns >= _MEMORY_EVERY_NS:
                    self._private[pid] = (now_ns, self._table.private_bytes(pid))
        self._sample_waits(runs, now_ns)
        for run in runs:
            if run.status == RUNNING:
                known = run.worker_seen_s
                run.worker_seen_s = {pid: known[pid] for pid in _worker_pids(run, self._table) if pid in known}
            for pid in _worker_pids(run, self._table):
                cpu_s = self._table.cpu_s(pid)
                if cpu_s is None:
                    self._cpu_s.pop(pid, None)
                    continue
                seen = self._cpu_s.setdefault(pid, deque())
                run.worker_cpu_s += max(0.0, cpu_s - run.worker_seen_s.get(pid, 0.0))
                run.worker_seen_s[pid] = cpu_s
                seen.append((now_ns, cpu_s, self._table.run_queue_s(pid)))
                while len(seen) > 2 and seen[1][0] <= now_ns - _WINDOW_NS:
                    seen.popleft()

    def _sample_waits(self, runs: list[Run], now_ns: int) -> None:
        running = {(run.run, run.rank): run for run in runs if run.status == RUNNING}
        for kept in (self._waits, self._received, self._quotas):
            for key in kept.keys() - running.keys():
                del kept[key]
        for key, run in running.items():
            pids = _worker_pids(run, self._table)[:_MOST_SAMPLED]
            if not pids:
                continue
            found = tuple(wait for pid in pids if (wait := self._table.blocked_on(pid)) is not None)
            self._waits.setdefault(key, deque(maxlen=_SAMPLES_KEPT)).append(found)
            quota = self._table.quota(pids[0])
            if quota is not None:
                self._quotas.setdefault(key, deque(maxlen=_SAMPLES_KEPT)).append(quota)
            received = self._table.received_bytes(pids[0])
            if received is not None:
                self._received.setdefault(key, deque(maxlen=_SAMPLES_KEPT)).append((now_ns, received))

    def waits(self, run: Run) -> dict[str, float] | None:
        """Return in which share of the last samples a worker was blocked on each of `gpuwatch.host.blocked.WAITS`; None with too few samples."""
        return blocked.shares(wait for sample in self._waits.get((run.run, run.rank), ()) for wait in sample)

    def quota(self, run: Run) -> tuple[float | None, float | None]:
        """Return (the cores of the workers' CPU quota, in which share of its last periods it was used up), each None where not known."""
        seen = self._quotas.get((run.run, run.rank))
        return (seen[-1].cores, throttled_ratio(seen[0], seen[-1])) if seen else (None, None)

    def receive_rate(self, run: Run) -> float | None:
        """Return the bytes a second that arrive in the workers' network namespace; None where it cannot be seen."""
        seen = self._received.get((run.run, run.rank))
        if not seen or seen[-1][0] <= seen[0][0]:
            return None
        return max(0, seen[-1][1] - seen[0][1]) / ((seen[-1][0] - seen[0][0]) / 1e9)

    def ratios(self, run: Run) -> tuple[float, ...] | None:
        """Return the CPU use of each live worker over the last 15 s, 1.0 = one core; None where it is not known."""
        return tuple(ratio for ratio, _ in self._use(run)) or None

    def busy_ratios(self, run: Run) -> tuple[float, ...] | None:
        """Return the same with the time in which a worker was ready to run and had no core; None where the kernel does not count it."""
        ratios = [busy for _, busy in self._use(run)]
        known = tuple(busy for busy in ratios if busy is not None)
        return known if known and len(known) == len(ratios) else None

    def _use(self, run: Run) -> Iterator[tuple[float, float | None]]:
        """Yield (CPU use, the same with the wait for a core) of each live worker over the last 15 s."""
        for pid in _worker_pids(run, self._table):
            seen = self._cpu_s.get(pid)
            if seen and seen[-1][0] > seen[0][0]:
                (begin_ns, cpu_s, queue_s), (end_ns, cpu_end_s, queue_end_s) = seen[0], seen[-1]
                used_s, elapsed_s = cpu_end_s - cpu_s, (end_ns - begin_ns) / 1e9
                waited_s = None if queue_s is None or queue_end_s is None else queue_end_s - queue_s
                yield used_s / elapsed_s, None if waited_s is None else (used_s + waited_s) / elapsed_s

    def private_bytes(self, run: Run) -> int | None:
        """Return the memory that the run's first worker has of its own; None where it is not known."""
        return next((self._private[pid][1] for pid in _worker_pids(run, self._table)[:1] if pid in self._private), None)

    def count(self, run: Run) -> int:
        """Return how many of the run's workers could be read."""
        return sum(pid in self._cpu_s for pid in _worker_pids(run, self._table))


EVERY_NS = 5_000_000_000


@dataclass
class _Seen:
    """One run as it was seen last."""

    process: ProcessUsage | None = None
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
        running = {(run.run, run.rank): run for run in runs if run.status == RUNNING and run.hello is not None}
        for key in self._seen.keys() - running.keys():
            del self._seen[key]
        for key, run in running.items():
            pid = self._table.host_pid(run.hello) if run.hello is not None else None
            if pid is None:
                self._seen.pop(key, None)
                continue
            seen = self._seen.setdefault(key, _Seen(last=dict(run.worker_io_seen)))
            seen.process = usage(pid, self._procfs)
            seen.files = self._table.open_files(pid)
            self._read_workers(run, seen)

    def samples(self, run: Run) -> Iterator[Sample]:
        """Yield the series of one run's processes."""
        key = (run.run, str(run.rank))
        seen = self._seen.get((run.run, run.rank))
        if seen is not None and seen.process is not None:
            yield Sample("gpuwatch_run_resident_memory_bytes", seen.process.resident_bytes, key)
            yield Sample("gpuwatch_run_threads", seen.process.threads, key)
            if seen.files is not None:
                yield Sample("gpuwatch_run_open_files", seen.files, key)
        if seen is not None and seen.workers:
            yield Sample("gpuwatch_loader_workers_in_disk_wait", seen.in_disk_wait, key)
        totals = run.worker_io
        if totals.read_bytes is not None:
            yield Sample("gpuwatch_loader_worker_read_bytes_total", totals.read_bytes, key)
        if totals.written_bytes is not None:
            yield Sample("gpuwatch_loader_worker_written_bytes_total", totals.written_bytes, key)
        if totals.run_queue_s is not None:
            yield Sample("gpuwatch_loader_worker_run_queue_seconds_total", totals.run_queue_s, key)

    def _read_workers(self, run: Run, seen: _Seen) -> None:
        """Add up what the workers did since they were seen last; one that ended keeps its part."""
        pids = _worker_pids(run, self._table)
        found = {pid: figures for pid in pids if (figures := usage(pid, self._procfs)) is not None}
        seen.workers = len(found)
        seen.in_disk_wait = sum(figures.state == "D" for figures in found.values())
        now = {pid: WorkerIo(f.read_bytes, f.written_bytes, f.run_queue_s) for pid, f in found.items()}
        for pid, io in now.items():
            run.worker_io = run.worker_io.grown(io, seen.last.get(pid, WorkerIo()))
        seen.last = now
        run.worker_io_seen = dict(now)


def _worker_pids(run: Run, table: ProcessTable) -> tuple[int, ...]:
    """Return the pids of a run's workers, as far as they can be read: they are the container's own, and may be another namespace's."""
    hello = run.hello
    if run.status != RUNNING or hello is None or hello.loader is None or table.host_pid(hello) != hello.pid:
        return ()
    return hello.loader.worker_pids[:_MOST_WORKERS]
