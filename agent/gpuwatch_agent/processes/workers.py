"""What the loader workers of each run do: their CPU use, what they stand at, what they receive. From the pids that its hook names."""

from __future__ import annotations

from collections import deque

from gpuwatch.host import blocked as waits
from gpuwatch.host.cgroup import Quota, throttled_ratio
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import RUNNING, Run

_WINDOW_NS = 15_000_000_000
_MOST_WORKERS = 256
_MOST_LOOKED_AT = 64
_LOOKS = 16
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

    def look(self, runs: list[Run], now_ns: int) -> None:
        """Read every known worker once and add to the runs' totals."""
        pids = {pid for run in runs for pid in self._pids(run)}
        for gone in self._cpu_s.keys() - pids:
            del self._cpu_s[gone]
        self._private = {pid: seen for pid, seen in self._private.items() if pid in pids}
        for run in runs:
            for pid in self._pids(run)[:1]:
                looked_ns = self._private.get(pid, (None, None))[0]
                if looked_ns is None or now_ns - looked_ns >= _MEMORY_EVERY_NS:
                    self._private[pid] = (now_ns, self._table.private_bytes(pid))
        self._look_at_waits(runs, now_ns)
        for run in runs:
            if run.status == RUNNING:
                known = run.worker_seen_s
                run.worker_seen_s = {pid: known[pid] for pid in self._pids(run) if pid in known}
            for pid in self._pids(run):
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

    def _look_at_waits(self, runs: list[Run], now_ns: int) -> None:
        running = {(run.run, run.rank): run for run in runs if run.status == RUNNING}
        for kept in (self._waits, self._received, self._quotas):
            for key in kept.keys() - running.keys():
                del kept[key]
        for key, run in running.items():
            pids = self._pids(run)[:_MOST_LOOKED_AT]
            if not pids:
                continue
            found = tuple(wait for pid in pids if (wait := self._table.standing_at(pid)) is not None)
            self._waits.setdefault(key, deque(maxlen=_LOOKS)).append(found)
            quota = self._table.quota(pids[0])
            if quota is not None:
                self._quotas.setdefault(key, deque(maxlen=_LOOKS)).append(quota)
            received = self._table.received_bytes(pids[0])
            if received is not None:
                self._received.setdefault(key, deque(maxlen=_LOOKS)).append((now_ns, received))

    def waits(self, run: Run) -> dict[str, float] | None:
        """Return in which share of the last looks a worker was found at each of `gpuwatch.host.blocked.WAITS`; None with too few."""
        return waits.shares(wait for look in self._waits.get((run.run, run.rank), ()) for wait in look)

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
        ratios = []
        for pid in self._pids(run):
            seen = self._cpu_s.get(pid)
            if seen and seen[-1][0] > seen[0][0]:
                ratios.append((seen[-1][1] - seen[0][1]) / ((seen[-1][0] - seen[0][0]) / 1e9))
        return tuple(ratios) if ratios else None

    def busy_ratios(self, run: Run) -> tuple[float, ...] | None:
        """Return the same with the time in which a worker was ready to run and had no core; None where that is not told."""
        ratios = []
        for pid in self._pids(run):
            seen = self._cpu_s.get(pid)
            if seen and seen[-1][0] > seen[0][0]:
                (begin_ns, cpu_s, queue_s), (end_ns, cpu_end_s, queue_end_s) = seen[0], seen[-1]
                if queue_s is None or queue_end_s is None:
                    return None
                ratios.append((cpu_end_s - cpu_s + queue_end_s - queue_s) / ((end_ns - begin_ns) / 1e9))
        return tuple(ratios) if ratios else None

    def private_bytes(self, run: Run) -> int | None:
        """Return the memory that the run's first worker has of its own; None where it is not known."""
        return next((self._private[pid][1] for pid in self._pids(run)[:1] if pid in self._private), None)

    def count(self, run: Run) -> int:
        """Return how many of the run's workers could be read."""
        return sum(pid in self._cpu_s for pid in self._pids(run))

    def _pids(self, run: Run) -> tuple[int, ...]:
        hello = run.hello
        if run.status != RUNNING or hello is None or hello.loader is None:
            return ()
        # The workers' numbers are the container's own: they can be read only where they are this /proc's as well.
        return hello.loader.worker_pids[:_MOST_WORKERS] if self._table.host_pid(hello) == hello.pid else ()
