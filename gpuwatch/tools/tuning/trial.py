"""One trial, in its own process: make the loader, iterate it, and compute the time between batches.

Two traps. The first `workers × prefetch` batches are made before they are requested. And workers that started together
deliver together: with four workers three batches come at once and then none for a whole fetch, so that the median of
single gaps is near 0. What counts is the time for a cycle of `workers` batches, divided by `workers`.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from gpuwatch.errors import ConfigError
from gpuwatch.hook import batches
from gpuwatch.hook.loader_health import shared_bytes
from gpuwatch.host.proc import by_pid, cpu_times_s, io_bytes, run_queue_s, stat, text_of
from gpuwatch.tools.tuning.result import Measured, Setting
from gpuwatch.tools.tuning.target import Target

_FEWEST_CYCLES, _MOST_CYCLES, _CYCLES_FOR_A_SPREAD = 3, 100_000, 4
_MOST_PASSES = 1000  # as a trial's memory is measured too, which grows with each pass that is kept
_COPIES = 20


@dataclass(frozen=True)
class Plan:
    measure_s: float
    limit_s: float
    seed: int = 0  # another one for each trial: in the same order its files would be in the page cache


@dataclass(frozen=True)
class Pace:
    batch_s: float
    spread_ratio: float | None
    batches: int
    steady: bool


def warm_up(workers: int, ahead: int) -> int:
    """Return how many batches at the start of a pass do not count: the first, and all that were prefetched."""
    return max(1, ahead, workers)


def cycles_s(passes: Sequence[Sequence[float]], workers: int, ahead: int) -> list[float]:
    """Return the time between batches in each cycle of all workers. `passes`: arrival times of each, oldest first."""
    length = max(1, workers)
    start = warm_up(workers, ahead) - 1
    return [(later - earlier) / length for arrivals in passes for earlier, later in pairwise(arrivals[start::length])]


def pace(passes: Sequence[Sequence[float]], durations_s: Sequence[float], workers: int, ahead: int) -> Pace:
    """Return the steady pace; where no cycle follows the prefetched batches, that of whole passes with start-up."""
    cycles = cycles_s(passes, workers, ahead)
    if not cycles:
        each = [duration / len(arrivals) for duration, arrivals in zip(durations_s, passes, strict=True)]
        return Pace(median(each), None, sum(map(len, passes)), steady=False)
    middle = median(cycles)
    spread = None
    if len(cycles) >= _CYCLES_FOR_A_SPREAD and middle > 0:
        lower, _, upper = quantiles(cycles, n=4, method="inclusive")
        spread = (upper - lower) / 2 / middle
    return Pace(middle, spread, len(cycles) * max(1, workers), steady=True)


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's children and theirs. Source: /proc/PID/task/TID/children."""
    found: list[int] = []
    with suppress(OSError):  # it may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, text_of(task / "children").split())
    return found + [each for child in found for each in descendants(child)]


class _Counters:
    def __init__(self) -> None:
        self.at_s, self.main_s = time.perf_counter(), time.process_time()
        workers = descendants(os.getpid())
        pids = [os.getpid(), *workers]
        self.worker_s = {pid: found.cpu_s for pid, found in by_pid(stat, workers).items()}
        read = by_pid(lambda pid, procfs: io_bytes(pid, procfs)[0], pids)
        self.read = sum(read.values()) if read else None
        self.wait_s = by_pid(run_queue_s, pids)
        self.node_busy_s = cpu_times_s()[0]


def run_trial(target: Target, setting: Setting, plan: Plan, send: Callable[[Measured], None]) -> None:
    """Send a loader's measurement before its workers end. Raises: what user code raises; ConfigError: no iterable."""
    begun = time.perf_counter()
    random.seed(plan.seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(plan.seed)
    loader = target.make(setting)
    run = _Run(setting, plan, begun + plan.limit_s)
    make_s = time.perf_counter() - begun
    run.iterate(loader, target.name)
    copy_s = _copy_s(run.last_batch)
    found = pace(run.passes, run.durations_s, setting.num_workers, setting.batches_ahead)
    send(
        Measured(
            setting=setting,
            make_s=make_s,
            first_batch_s=run.first_batch_s,
            **vars(found),
            batch_bytes=run.batch_bytes,
            shared_bytes=run.shared_bytes,
            second_first_batch_s=_second_first_batch_s(loader, run, found.batch_s),
            copy_s=copy_s,
            **run.use(),
        )
    )


@dataclass
class _Run:
    setting: Setting
    plan: Plan
    deadline: float
    first_batch_s: float = 0.0
    batch_bytes: int | None = None
    shared_bytes: int | None = None
    last_batch: Any = None
    passes: list[list[float]] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    iterator: Iterator[Any] | None = None
    _cycles: int = 0
    _counted_s: float = 0.0
    _since: _Counters | None = None
    _until: _Counters | None = None

    def iterate(self, loader: Any, name: str) -> None:
        """Take batches, pass after pass, until the pace is known or time is up."""
        begun = now = time.perf_counter()
        uncounted = warm_up(self.setting.num_workers, self.setting.batches_ahead)
        over = False
        while not over and len(self.passes) < _MOST_PASSES:
            started = now
            try:
                self.iterator = iter(loader)
            except TypeError as error:
                if hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
                    raise
                raise ConfigError(f"{name} returned a {type(loader).__name__}, not an iterable: {error}") from None
            arrivals: list[float] = []
            self.passes.append(arrivals)
            for batch in self.iterator:
                arrivals.append(time.perf_counter())
                self.first_batch_s = self.first_batch_s or arrivals[0] - started
                is_measured = len(arrivals) <= 8 or len(arrivals) % 16 == 0  # it costs microseconds
                if is_measured and (size := batches.size_bytes(batch)) is not None:
                    self.batch_bytes = max(self.batch_bytes or 0, size)
                    self.shared_bytes = max(self.shared_bytes or 0, shared_bytes(batch) or 0)
                if self._since is None and len(arrivals) == uncounted:
                    self._since = _Counters()
                if over := self._enough(arrivals, uncounted):
                    self.last_batch = batch
                    break
                del batch  # frees its memory before the next is requested
            if not arrivals:
                raise ConfigError(f"{name}: the loader gave no batch in pass {len(self.passes)}: is the dataset empty?")
            now = time.perf_counter()
            self.durations_s.append(now - started)
            long_enough = now - begun >= self.plan.measure_s and len(self.passes) >= _FEWEST_CYCLES
            over = over or long_enough or now >= self.deadline
        self._until = _Counters()

    def _enough(self, arrivals: list[float], uncounted: int) -> bool:
        if arrivals[-1] >= self.deadline:
            return True
        length = max(1, self.setting.num_workers)
        if len(arrivals) <= uncounted or (len(arrivals) - uncounted) % length:
            return False
        self._cycles += 1
        self._counted_s += arrivals[-1] - arrivals[-1 - length]
        long_enough = self._counted_s >= self.plan.measure_s or self._cycles >= _MOST_CYCLES
        return self._cycles >= _FEWEST_CYCLES and long_enough

    def use(self) -> dict[str, Any]:
        """Return CPU and reads over the counted time, as far as it was long enough to measure them."""
        since, until = self._since, self._until
        if since is None or until is None or (elapsed := until.at_s - since.at_s) < 0.05:
            return {}
        main = (until.main_s - since.main_s) / elapsed
        lived = [pid for pid in until.worker_s if pid in since.worker_s]
        if self.setting.num_workers and not lived:  # they end with each pass
            return {"main_cpu_ratio": main}
        of_workers = sum(until.worker_s[pid] - since.worker_s[pid] for pid in lived) / elapsed
        fetching = lived if self.setting.num_workers else [os.getpid()]
        waited = sum(until.wait_s.get(pid, 0.0) - since.wait_s.get(pid, 0.0) for pid in fetching) / elapsed
        read = None if since.read is None or until.read is None else max(0, until.read - since.read) / elapsed
        return {
            "cpu_cores": main + of_workers,
            "others_cores": max(0.0, (until.node_busy_s - since.node_busy_s) / elapsed - main - of_workers),
            "main_cpu_ratio": main,
            "worker_cpu_ratio": of_workers / len(lived) if lived else None,
            "cpu_demand_ratio": min(1.0, ((of_workers if lived else main) + waited) / len(fetching)),
            "read_bytes_per_s": read,
        }


def _second_first_batch_s(loader: Any, run: _Run, batch_s: float) -> float | None:
    """Return the time from a second `iter()` to its first batch; None without persistent workers, or time for it.

    The first pass was left early, and persistent workers finish their prefetched batches before they start the next
    pass, as they do not have to after a complete pass. So the time for that is waited out first.
    """
    remaining_s = max(run.setting.batches_ahead, run.setting.num_workers) * batch_s
    is_late = time.perf_counter() + 2 * remaining_s + 2 * run.first_batch_s >= run.deadline
    if is_late or not run.setting.persistent_workers:
        return None
    time.sleep(1.2 * remaining_s)
    run.last_batch = run.iterator = None  # ends the old workers, unless they are persistent
    begun = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - begun


def _copy_s(batch: Any) -> float | None:
    """Return the time to copy a batch to the GPU; None without CUDA or tensors."""
    torch = sys.modules.get("torch")
    if torch is None or batch is None or not torch.cuda.is_available():
        return None
    taken = []
    for _ in range(_COPIES):
        torch.cuda.synchronize()  # no training runs in this process: only the copy is timed
        begun = time.perf_counter()
        batches.move(batch, "cuda")
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return median(taken[_COPIES // 4 :])
