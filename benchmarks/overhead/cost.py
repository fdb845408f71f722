"""What the hook adds to a step, in microseconds on the training thread, compared with a torch step of about 75 µs.

    python -m benchmarks.overhead.cost [--blocks 60] [--steps 300]

Bare and watched loops take turns in one process, block by block, so that a slow minute of the machine falls on both.
Each block gives the median of its steps; the cost of a variant is the median over blocks of its difference to the bare
blocks before and after it. No agent listens; the hook's background thread runs all the time, in the bare blocks too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

os.environ.setdefault("GPUWATCH_QUIET", "1")
os.environ["GPUWATCH_ENDPOINT"] = f"ipc://{tempfile.gettempdir()}/gpuwatch-no-agent-{os.getpid()}.sock"

import torch

import gpuwatch


class Batches:
    """A loader that hands out the same batch, at no cost of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.batch = [torch.randn(32, 64), torch.zeros(32)]

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        batch = self.batch
        return (batch for _ in range(self.count))


def torch_step() -> Callable[[Any], None]:
    """Return a step whose time is set to about 75 µs on this machine by the size of its matrices."""
    torch.set_num_threads(1)
    width = 64
    while True:
        left, right = torch.randn(width, width), torch.randn(width, width)

        def step(_: Any, left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            for _ in range(4):
                torch.mm(left, right)

        times = []
        for _ in range(500):
            begin = perf_counter_ns()
            step(None)
            times.append(perf_counter_ns() - begin)
        if statistics.median(times) > 70_000 or width > 512:
            return step
        width += 8


@dataclass(frozen=True)
class Times:
    """Medians of a block, in ns."""

    gap: float
    """From the end of a step's work to the beginning of the next one's: all that loader and hook do on this thread."""
    whole: float
    """From end to end: with what the hook's use of the caches costs the step itself, and much more noise."""


class Stopwatch:
    """Calls the step and notes when its work began and ended."""

    def __init__(self, step: Callable[[Any], None]) -> None:
        self._step = step
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __call__(self, batch: Any) -> None:
        self._begins.append(perf_counter_ns())
        self._step(batch)
        self._ends.append(perf_counter_ns())

    def times(self) -> Times:
        gaps = [begin - end for end, begin in zip(self._ends, self._begins[1:], strict=False)]
        whole = [after - end for end, after in zip(self._ends, self._ends[1:], strict=False)]
        return Times(statistics.median(gaps), statistics.median(whole))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead.cost", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    work = torch_step()
    watch = gpuwatch.Watch(run="hook-cost", quiet=True)

    def loop(loader: Iterable[Any]) -> Times:
        stopwatch = Stopwatch(work)
        for batch in loader:
            stopwatch(batch)
        return stopwatch.times()

    def contexts() -> Times:
        stopwatch, batches = Stopwatch(work), iter(Batches(options.steps))
        for _ in range(options.steps):
            with watch.step():
                with watch.data():
                    batch = next(batches)
                stopwatch(batch)
        return stopwatch.times()

    variants: dict[str, Callable[[], Times]] = {
        "bare again (the noise)": lambda: loop(Batches(options.steps)),
        "watch(loader)": lambda: loop(watch.steps(Batches(options.steps))),
        "watch(loader), no tensors": lambda: loop(watch.steps(range(options.steps))),
        "step() and data()": contexts,
    }
    bare: list[float] = []
    costs: dict[str, list[Times]] = {name: [] for name in variants}
    for _ in range(options.blocks):
        for name, run in variants.items():
            before, measured, after = loop(Batches(options.steps)), run(), loop(Batches(options.steps))
            bare.append(before.whole)
            gap, whole = (before.gap + after.gap) / 2, (before.whole + after.whole) / 2
            costs[name].append(Times(measured.gap - gap, measured.whole - whole))
    watch.close()
    print(
        f"torch {torch.__version__}, bare step {statistics.median(bare) / 1e3:.1f} µs, "
        f"{options.blocks} blocks of {options.steps} steps; added µs per step, median (quartiles)"
    )
    print(f"{'':<28}{'between the work':>24}{'in all':>24}")
    for name, times in costs.items():
        print(f"{name:<28}{_spread([t.gap for t in times]):>24}{_spread([t.whole for t in times]):>24}")


def _spread(values_ns: list[float]) -> str:
    low, middle, high = (value / 1e3 for value in statistics.quantiles(values_ns, n=4))
    return f"{middle:.2f} ({low:.2f} … {high:.2f})"


if __name__ == "__main__":
    main()
