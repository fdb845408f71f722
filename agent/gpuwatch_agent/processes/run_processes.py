"""What the processes of each run take of their node: the training process itself, and its loader's workers together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.metrics import Sample
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.figures import Figures, open_files, read_figures
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.runs.records import WorkerIo

EVERY_NS = 5_000_000_000
_MOST_WORKERS = 256


@dataclass
class _Seen:
    """One run as it was seen last."""

    process: Figures | None = None
    files: int | None = None
    in_disk_wait: int = 0
    workers: int = 0
    last: dict[int, WorkerIo] = field(default_factory=dict)


class RunProcesses:
    """Looks at every running run's processes, every five seconds."""

    def __init__(self, procfs: Path, table: ProcessTable) -> None:
        self._procfs = procfs
        self._table = table
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._looked_ns: int | None = None

    def look(self, runs: Sequence[Run], now_ns: int) -> None:
        """Read the processes again, if it is time, and add what the workers did to their runs' totals."""
        if self._looked_ns is not None and now_ns - self._looked_ns < EVERY_NS:
            return
        self._looked_ns = now_ns
        running = {(run.run, run.rank): run for run in runs if run.status == RUNNING and run.hello is not None}
        for key in self._seen.keys() - running.keys():
            del self._seen[key]
        for key, run in running.items():
            pid = self._table.host_pid(run.hello) if run.hello is not None else None
            if pid is None:
                self._seen.pop(key, None)
                continue
            seen = self._seen.setdefault(key, _Seen(last=dict(run.worker_io_seen)))
            seen.process = read_figures(self._procfs / str(pid))
            seen.files = open_files(self._procfs / str(pid))
            self._look_at_workers(run, pid, seen)

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

    def _look_at_workers(self, run: Run, pid: int, seen: _Seen) -> None:
        """Add up what the workers did since they were seen last; one that ended keeps its part."""
        hello = run.hello
        known = (
            hello is not None and hello.loader is not None and pid == hello.pid
        )  # else the numbers are another namespace's
        pids = (
            hello.loader.worker_pids[:_MOST_WORKERS] if known and hello is not None and hello.loader is not None else ()
        )
        found = {pid: figures for pid in pids if (figures := read_figures(self._procfs / str(pid))) is not None}
        seen.workers = len(found)
        seen.in_disk_wait = sum(figures.state == "D" for figures in found.values())
        now = {pid: WorkerIo(f.read_bytes, f.written_bytes, f.run_queue_s) for pid, f in found.items()}
        for pid, io in now.items():
            run.worker_io = run.worker_io.grown(io, seen.last.get(pid, WorkerIo()))
        seen.last = now
        run.worker_io_seen = dict(now)
