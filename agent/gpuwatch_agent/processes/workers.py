"""What each run takes of the node: its training process, its loader's workers (pids from its hook), its control group.

The control group is its container's or job's, of version 1 or 2. Its series are exported once, for the lowest rank in
it. The root group is the node itself, which the collectors cover.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Literal

from gpuwatch.diagnosis.window import MemoryKills
from gpuwatch.host import blocked, cgroup, proc
from gpuwatch.metrics import Sample
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.owners import is_of_job
from gpuwatch_agent.runs import LOST, RUNNING, Run, RunKey

_WINDOW_S = 15.0
_MOST_WORKERS = 256
_SAMPLES_KEPT = 16
_USAGE_EVERY_NS = 5_000_000_000
_TOTALS = {
    "cpu_s": "gpuwatch_loader_worker_cpu_seconds_total",
    "read_bytes": "gpuwatch_loader_worker_read_bytes_total",
    "written_bytes": "gpuwatch_loader_worker_written_bytes_total",
    "run_queue_s": "gpuwatch_loader_worker_run_queue_seconds_total",
}


@dataclass
class Seen:
    """What was seen lately of a running run's processes."""

    workers: blocked.Workers = field(default_factory=lambda: blocked.Workers(_WINDOW_S, _SAMPLES_KEPT))
    quotas: deque[cgroup.Quota] = field(default_factory=lambda: deque(maxlen=_SAMPLES_KEPT))
    received: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES_KEPT))
    usage: Mapping[str, float | None] = field(default_factory=dict)  # by metric


class WorkerWatch:
    """Follows the processes of running runs; a worker that ended keeps its part of its run's totals."""

    def __init__(self, table: ProcessTable) -> None:
        self.table = table
        self._seen: dict[RunKey, Seen] = {}
        self._usage_ns: int | None = None
        self._tick = 0

    def update(self, runs: Sequence[Run], now_ns: int) -> None:
        """Read each run's workers every other tick, each process's use every five seconds; add to the runs' totals."""
        self._tick += 1
        self._seen = {run.key: self.of(run) for run in runs if run.status == RUNNING}
        usage_is_due = self._usage_ns is None or now_ns - self._usage_ns >= _USAGE_EVERY_NS
        if usage_is_due:
            self._usage_ns = now_ns
        for number, run in enumerate(runs):
            is_due = (self._tick + number) % 2 == 0
            if (seen := self._seen.get(run.key)) is None or not (is_due or usage_is_due or not seen.workers.times):
                continue
            pids = _worker_pids(run, self.table)
            run.worker_seen = {pid: run.worker_seen[pid] for pid in pids if pid in run.worker_seen}
            if not pids or not self._sample(run, seen, pids, now_ns):
                seen.workers.times.clear()
            if usage_is_due:
                self._read_usage(run, seen, pids)

    def _sample(self, run: Run, seen: Seen, pids: Sequence[int], now_ns: int) -> bool:
        """Sample a run's workers; return whether any can be read."""
        table, first = self.table, pids[0]
        if (quota := table.quota(first)) is not None:
            seen.quotas.append(quota)
        if (received := table.read(proc.received_bytes, first)) is not None:
            seen.received.append((now_ns, received))
        stats = {pid: stat for pid in pids if (stat := table.stat(pid)) is not None}
        found = seen.workers.sample(now_ns / 1e9, stats, table.procfs)
        for pid, cpu_s in found.items():
            run.add_worker(pid, cpu_s=cpu_s)
        return bool(found)

    def _read_usage(self, run: Run, seen: Seen, pids: Sequence[int]) -> None:
        """Read what the processes use, and add up what the workers did since they were seen last."""
        pid = self.table.host_pid(run.hello)
        process = None if pid is None else self.table.stat(pid)
        workers = {each: stat for each in pids if (stat := self.table.stat(each)) is not None}
        seen.usage = {
            "gpuwatch_run_resident_memory_bytes": process.resident_bytes if process else None,
            "gpuwatch_run_threads": process.threads if process else None,
            "gpuwatch_run_open_files": None if pid is None else self.table.open_files(pid),
            "gpuwatch_loader_workers_in_disk_wait": sum(s.state == "D" for s in workers.values()) if workers else None,
        }
        for worker in workers:
            read, written = self.table.read(proc.io_bytes, worker) or (None, None)
            queue_s = self.table.read(proc.run_queue_s, worker)
            run.add_worker(worker, read_bytes=read, written_bytes=written, run_queue_s=queue_s)

    def of(self, run: Run) -> Seen:
        """Return what was seen of a run's processes."""
        return self._seen.get(run.key) or Seen()

    def samples(self, run: Run) -> Iterator[Sample]:
        """Yield the series of one run's processes."""
        values = {**self.of(run).usage, **{_TOTALS[name]: total for name, total in run.worker_totals.items()}}
        if "cpu_s" in run.worker_totals:
            values["gpuwatch_loader_workers"] = self.count(run)
        key = (run.run, str(run.rank))
        yield from (Sample(metric, value, key) for metric, value in values.items() if value is not None)

    def quota(self, run: Run) -> tuple[float | None, float | None]:
        """Return (cores of the workers' CPU quota, share of its last periods that exhausted it); None: not known."""
        quotas = self.of(run).quotas
        return (quotas[-1].cores, cgroup.throttled_ratio(quotas[0], quotas[-1])) if quotas else (None, None)

    def receive_rate(self, run: Run) -> float | None:
        """Return the bytes per second received in the workers' network namespace; None where that is not visible."""
        received = self.of(run).received
        if not received or received[-1][0] <= received[0][0]:
            return None
        return max(0, received[-1][1] - received[0][1]) / ((received[-1][0] - received[0][0]) / 1e9)

    def count(self, run: Run) -> int:
        """Return how many of the run's workers could be read."""
        last_s = [times[-1][0] for times in self.of(run).workers.times.values()]
        return last_s.count(max(last_s, default=0.0))  # those of the pass before are kept for a while


def _worker_pids(run: Run, table: ProcessTable) -> tuple[int, ...]:
    """Return the pids of a run's workers; none where they are another pid namespace's."""
    hello = run.live_hello
    if hello is None or hello.loader is None or table.host_pid(hello) != hello.pid:
        return ()
    pids = hello.loader.worker_pids[:_MOST_WORKERS]
    if run.uid is None:
        return pids
    # Its children, and their children: those of a fork server.
    return tuple(pid for pid in pids if hello.pid in islice(table.with_parents(pid), 1, 5))


def group_samples(runs: Sequence[Run], table: ProcessTable) -> Iterator[Sample]:
    """Yield the series of every control group that a run lives in."""
    seen: set[tuple[str, tuple[Path, ...]]] = set()
    for run in sorted(runs, key=lambda run: (run.run, run.rank)):
        if (pid := table.host_pid(run.live_hello)) is None:
            continue
        memory, unified = (table.groups(controller, pid, root=False) for controller in ("memory", ""))
        key = (run.run, (*memory[:1], *unified[:1]))
        if key in seen:
            continue
        seen.add(key)
        values: dict[str, float | None] = {}
        if memory:
            limits = [limit for folder in memory if (limit := cgroup.memory_bytes(folder, "limit")) is not None]
            values["gpuwatch_run_memory_limit_bytes"] = min(limits, default=None)
            values["gpuwatch_run_memory_used_bytes"] = cgroup.memory_bytes(memory[0], "used")
            values["gpuwatch_run_oom_kills_total"] = cgroup.kills_in(memory[0])
        for resource in ("cpu", "io", "memory") if unified else ():
            waited_s = proc.optional(proc.pressure_s, unified[0] / f"{resource}.pressure")
            values[f"gpuwatch_run_pressure_{resource}_waiting_seconds_total"] = waited_s
        labels = (run.run, str(run.rank))
        yield from (Sample(metric, value, labels) for metric, value in values.items() if value is not None)


_Where = Literal["group", "around", "node"]
_MOST_SAMPLES = 30
"""A process alive for so many seconds without a message was not killed before them: a killed one is gone sooner."""


@dataclass(frozen=True)
class _Sample:
    """A process while it was alive, or a zombie, and the memory of its control group and of those around it."""

    at_ns: int
    resident_bytes: int
    groups: tuple[Path, ...]  # innermost first
    kills: Mapping[Path, int]  # in those groups that count them
    on_node: int | None  # kills
    room: cgroup.MemoryRoom | None
    peak_bytes: int | None


class OomWatch:
    """Follows every running run's OOM kill counts, and whether the control group of a lost run's job or pod is gone."""

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._samples: dict[RunKey, list[_Sample]] = {}
        """Those since the last sign of life, and the last one before it; the oldest first."""

    def update(self, runs: Sequence[Run], now_ns: int) -> None:
        """Sample the counts of running runs; give lost runs what was counted since their last message."""
        samples, self._samples = self._samples, {}
        kills_in, peak_in = cache(_kills_in), cache(partial(cgroup.memory_bytes, what="peak"))  # ranks share groups
        on_node = proc.oom_kills_on_node(self._table.procfs) if any(run.status == RUNNING for run in runs) else None
        for run in runs:
            seen = samples.get(run.key, [])
            if run.status == LOST:
                run.oom = self._grown(seen) if seen else run.oom
                run.job_over = run.job_over or (run.job_group is not None and not run.job_group.is_dir())
            elif run.status == RUNNING and run.hello is not None:
                pid = self._table.host_pid(run.hello)
                if pid is not None and (stat := self._table.stat(pid)) is not None:
                    groups, room = self._table.groups("memory", pid), self._table.memory_room(pid)
                    peak_bytes = None if room is None else peak_in(room.folder)
                    sample = _Sample(now_ns, stat.resident_bytes, groups, kills_in(groups), on_node, room, peak_bytes)
                    seen = [*seen[1 - _MOST_SAMPLES :], sample]
                    run.job_group = next((folder for folder in groups if is_of_job(folder.name)), None)
                # A kill may come right after a message: only a sample from before that has certainly not counted it.
                before = [number for number, each in enumerate(seen) if each.at_ns <= run.heard_ns]
                self._samples[run.key] = seen[before[-1] if before else 0 :]

    def _grown(self, seen: Sequence[_Sample]) -> MemoryKills | None:
        where, kills = self._kills_since(seen[0])
        if kills <= 0:
            return None
        rooms = [each.room for each in seen if each.room is not None]
        last_peak = cgroup.memory_bytes(rooms[-1].folder, "peak") if rooms else None
        return MemoryKills(
            where=where,
            kills=kills,
            limit_bytes=rooms[-1].limit_bytes if rooms else None,
            # The kernel takes a killed process's memory back before it is gone: the last sample may have little of it.
            used_bytes=_most(room.used_bytes for room in rooms),
            peak_bytes=_most([*(each.peak_bytes for each in seen), last_peak]),
            resident_bytes=_most(each.resident_bytes for each in seen),
        )

    def _kills_since(self, before: _Sample) -> tuple[_Where, int]:
        """Return (whose count was read, its growth): of the innermost group that still has one, else of the node."""
        for folder, count in before.kills.items():
            if (now := cgroup.kills_in(folder)) is not None:
                return ("group" if folder == before.groups[0] else "around"), now - count
        now = proc.oom_kills_on_node(self._table.procfs)
        return "node", 0 if now is None or before.on_node is None else now - before.on_node


def _kills_in(groups: tuple[Path, ...]) -> dict[Path, int]:
    """Return the OOM kills in the groups that count them; in version 1 that is the innermost one."""
    counting = groups if groups and (groups[0] / cgroup.KILLS[0]).exists() else groups[:1]
    return {folder: count for folder in counting if (count := cgroup.kills_in(folder)) is not None}


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
