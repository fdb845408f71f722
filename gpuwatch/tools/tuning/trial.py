"""One trial, in a process of its own: make the loader, iterate it, time its batches. Results go back as plain values."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gpuwatch.errors import ConfigError
from gpuwatch.hook import batches
from gpuwatch.host.proc import by_pid, cpu_times_s, process_cpu_s, run_queue_s
from gpuwatch.tools.tuning.host import descendants, read_bytes
from gpuwatch.tools.tuning.rows import Measured, Setting
from gpuwatch.tools.tuning.steady import Pace, cycles_s, pace, precise, warm_up, whole_passes
from gpuwatch.tools.tuning.target import Target

_FEWEST_CYCLES = 3
_MOST_PASSES = 1000
_COPIES = 20
_SHORT_RUN_S = 0.25
"""A trial whose cycles agree may end after this share of its time."""


@dataclass(frozen=True)
class Plan:
    """How long a trial measures."""

    measure_s: float
    """Of steady running."""
    limit_s: float
    """Of all; it is then killed."""
    second_pass: bool = False
    """Start a second pass, to time its first batch."""
    seed: int = 0
    """Another one for each trial: the same order again would find its files in the page cache."""


@dataclass
class _Counters:
    """CPU and reads of the trial's processes at one moment."""

    at_s: float = field(default_factory=time.perf_counter)
    main_s: float = field(default_factory=time.process_time)
    workers: list[int] = field(default_factory=lambda: descendants(os.getpid()))

    def __post_init__(self) -> None:
        self.worker_s = by_pid(process_cpu_s, self.workers)
        self.read = read_bytes([os.getpid(), *self.workers])
        self.wait_s = by_pid(run_queue_s, [os.getpid(), *self.workers])
        self.node_busy_s = cpu_times_s()[0]


def run_trial(target: Target, setting: Setting, plan: Plan, tell: Callable[[Measured], None]) -> None:
    """Tell what the loader does under a setting, before its workers are ended.

    Raises whatever the user's code raises; ConfigError for no iterable.
    """
    deadline = time.perf_counter() + plan.limit_s
    _seed(plan.seed)
    begun = time.perf_counter()
    loader = target.make(setting)
    make_s = time.perf_counter() - begun
    run = _Run(setting, plan, deadline)
    run.iterate(loader, target.name)
    copy_s = _copy_s(run.last_batch)
    second = _second_first_batch_s(loader, run) if plan.second_pass else None
    found = run.pace()
    tell(
        Measured(
            setting=setting,
            make_s=make_s,
            first_batch_s=run.first_batch_s,
            batch_s=found.batch_s,
            spread_ratio=found.spread_ratio,
            batches=found.batches,
            steady=run.is_steady(),
            batch_bytes=run.batch_bytes,
            shared_bytes=run.shared_bytes,
            second_first_batch_s=second,
            copy_s=copy_s,
            **run.use(),
        )
    )


class _Run:
    """Passes over a loader until enough is known."""

    def __init__(self, setting: Setting, plan: Plan, deadline: float) -> None:
        self.setting = setting
        self.plan = plan
        self.deadline = deadline
        self.first_batch_s = 0.0
        self.batch_bytes: int | None = None
        self.shared_bytes: int | None = None
        self.last_batch: Any = None
        self.passes: list[list[float]] = []
        self.durations_s: list[float] = []
        self.iterator: Iterator[Any] | None = None
        self._since: _Counters | None = None
        self._until: _Counters | None = None

    def iterate(self, loader: Any, name: str) -> None:
        """Take batches, pass after pass, until the pace is known or time is up."""
        begun = time.perf_counter()
        while len(self.passes) < _MOST_PASSES:
            started = time.perf_counter()
            try:
                self.iterator = iter(loader)
            except TypeError as error:
                if hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
                    raise
                raise ConfigError(f"{name} returned a {type(loader).__name__}, which is no iterable: {error}") from None
            arrivals: list[float] = []
            self.passes.append(arrivals)
            over = self._one_pass(self.iterator, arrivals, started)
            self.durations_s.append(time.perf_counter() - started)
            if not arrivals:
                raise ConfigError(
                    f"{name}: the loader gave no batch in its pass {len(self.passes)}: is the dataset empty?"
                )
            if over or self._long_enough(begun):
                break
        self._until = _Counters()

    def _one_pass(self, iterator: Iterator[Any], arrivals: list[float], started: float) -> bool:
        """Return True when enough is known, False at the pass's end."""
        uncounted = warm_up(self.setting.num_workers, self.setting.batches_ahead)
        for batch in iterator:
            arrivals.append(time.perf_counter())
            if len(self.passes) == 1 and len(arrivals) == 1:
                self.first_batch_s = arrivals[0] - started
            if len(arrivals) <= 8 or len(arrivals) % 16 == 0:  # looking costs microseconds, but not none
                self._look(batch)
            if self._since is None and len(arrivals) == uncounted:
                self._since = _Counters()
            if self._enough(arrivals, uncounted):
                self.last_batch = batch
                return True
            del batch  # its memory is free before the next is asked for
        return False

    def _look(self, batch: Any) -> None:
        found = list(batches.tensors(batch))
        if found:
            shared = sum(int(tensor.nbytes) for tensor in found if hasattr(tensor, "untyped_storage"))
            self.batch_bytes = max(self.batch_bytes or 0, sum(int(tensor.nbytes) for tensor in found))
            self.shared_bytes = max(self.shared_bytes or 0, shared)

    def _enough(self, arrivals: list[float], uncounted: int) -> bool:
        now = arrivals[-1]
        if now >= self.deadline:
            return True
        if len(arrivals) <= uncounted or (len(arrivals) - uncounted) % max(1, self.setting.num_workers):
            return False
        cycles = cycles_s(self.passes, self.setting.num_workers, self.setting.batches_ahead)
        if len(cycles) < _FEWEST_CYCLES:
            return False
        counted_s = sum(cycles) * max(1, self.setting.num_workers)
        return counted_s >= self.plan.measure_s or (counted_s >= _SHORT_RUN_S * self.plan.measure_s and precise(cycles))

    def _long_enough(self, begun: float) -> bool:
        now = time.perf_counter()
        return now >= self.deadline or (now - begun >= self.plan.measure_s and len(self.passes) >= _FEWEST_CYCLES)

    def is_steady(self) -> bool:
        return pace(self.passes, self.setting.num_workers, self.setting.batches_ahead) is not None

    def pace(self) -> Pace:
        found = pace(self.passes, self.setting.num_workers, self.setting.batches_ahead) or whole_passes(
            self.durations_s, [len(arrivals) for arrivals in self.passes]
        )
        if found is None:
            raise ConfigError("the loader gave no batch")
        return found

    def use(self) -> dict[str, Any]:
        """Return CPU and reads over the counted time; None where a pass was too short to see them."""
        since, until = self._since, self._until
        elapsed = until.at_s - since.at_s if since and until else 0.0
        if since is None or until is None or elapsed < 0.05:
            return {}
        main = (until.main_s - since.main_s) / elapsed
        lived = [pid for pid in until.worker_s if pid in since.worker_s]
        workers = [(until.worker_s[pid] - since.worker_s[pid]) / elapsed for pid in lived]
        fetching = lived if self.setting.num_workers else [os.getpid()]
        waited = [until.wait_s.get(pid, 0.0) - since.wait_s.get(pid, 0.0) for pid in fetching]
        if self.setting.num_workers and not workers:  # they end with each pass
            return {"main_cpu_ratio": main}
        read = None if since.read is None or until.read is None else max(0, until.read - since.read) / elapsed
        return {
            "cpu_cores": main + sum(workers),
            "others_cores": max(0.0, (until.node_busy_s - since.node_busy_s) / elapsed - main - sum(workers)),
            "main_cpu_ratio": main,
            "worker_cpu_ratio": sum(workers) / len(workers) if workers else None,
            "cpu_demand_ratio": min(
                1.0, (sum(workers) if workers else main) / len(fetching) + sum(waited) / elapsed / len(fetching)
            ),
            "read_bytes_per_s": read,
        }


def _second_first_batch_s(loader: Any, run: _Run) -> float | None:
    """Return the time from a second `iter()` to its first batch.

    The first pass was left early, and persistent workers finish what they were asked for before they begin anew; a pass that ends by
    itself leaves nothing over. So they are given the time for it.
    """
    left_over = max(run.setting.batches_ahead, run.setting.num_workers) * run.pace().batch_s
    if time.perf_counter() + 2 * left_over + 2 * run.first_batch_s >= run.deadline:
        return None
    time.sleep(1.2 * left_over)
    run.last_batch = run.iterator = None  # without persistent workers, the old ones end here
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
        torch.cuda.synchronize()  # nobody trains here: the copy alone is timed
        begun = time.perf_counter()
        batches.move(batch, "cuda")
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return median(taken[_COPIES // 4 :])


def _seed(seed: int) -> None:
    import random

    random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
