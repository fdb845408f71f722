"""Calls of the CUDA runtime that gpuwatch adds to a training step, by kind, and their cost by medians of real GPUs.

    make test-cuda-runtime                                       # once: sets up .venv-cuda
    .venv-cuda/bin/python -m benchmarks.overhead.device_calls [--json]

torch is its own CUDA build on a simulated runtime (tests/cuda_runtime), which counts each call. A step is two copies
from pinned memory, work on the device and an optimizer's step. A bare loop's counts are taken from a watched loop's, so
what is left is gpuwatch's. Counts are of the runtime's own functions: one `Event.record` is a capture check and a
record. More steps are measured where they vary, as they do on a busy machine. gpuwatch measures fewer steps by the
device where that takes more than its budget of the step's time, so each regime is counted twice: with every step
measured (`budget=1`), and with the default budget, where `measured` depends on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("GPUWATCH_QUIET", "1")
os.environ["GPUWATCH_ENDPOINT"] = f"ipc://{tempfile.gettempdir()}/gpuwatch-no-agent-{os.getpid()}.sock"
import torch

import gpuwatch
from tests.cuda_runtime.runtime import (
    CAPTURE_CHECK,
    ELAPSED,
    QUERY,
    RECORD,
    Runtime,
    loaded,
    optimizer_of,
    pinned_batch,
)

KINDS = {RECORD: "record", QUERY: "query", ELAPSED: "elapsed", CAPTURE_CHECK: "capture check"}
COST_US = {
    "record": (1.0, 1.7, 2.4),
    "query": (0.0, 2.0, 4.0),
    "elapsed": (3.7, 3.7, 3.7),
    "capture check": (0.5, 0.75, 1.0),
}
"""Host time of a call in µs as measured on real GPUs: low, middle, high. What is not here (`cudaGetDevice`) reads a
variable of the thread."""
LEVELS = ("low", "middle", "high")
_WARM_UP = 40
"""Steps before counting begins."""


@dataclass(frozen=True)
class Regime:
    """What a step of the loop takes. Times in ms."""

    loader_ms: float
    host_ms: float
    """Of the loop's own, between the copies and the optimizer's step."""
    device_ms: float
    reads_back_every: int = 20
    """Steps between two results that are read back: they keep the device's lag within bounds."""


REGIMES = {
    "device lags": Regime(loader_ms=1, host_ms=2, device_ms=4),
    "device starved": Regime(loader_ms=5, host_ms=0.5, device_ms=1),
    "short steps": Regime(loader_ms=0.1, host_ms=0.2, device_ms=0.5),
    "slow steps, starved": Regime(loader_ms=24, host_ms=0.5, device_ms=1),
}


@dataclass(frozen=True)
class Calls:
    """What gpuwatch adds to a step."""

    by_name: dict[str, float]
    """Calls a step, by the runtime's names."""
    measured_ratio: float
    """Share of the steps that were measured by the device, 0–1."""
    synchronising: int
    """Calls that wait for the device, in all."""

    @property
    def by_kind(self) -> dict[str, float]:
        return {kind: self.by_name.get(name, 0.0) for name, kind in KINDS.items()}

    def cost_us(self, level: str) -> float:
        index = LEVELS.index(level)
        return sum(count * COST_US[kind][index] for kind, count in self.by_kind.items())


class _Batches:
    """A loader of one pinned batch, that takes its time. Counting begins once it was asked for `_WARM_UP` batches."""

    def __init__(self, runtime: Runtime, regime: Regime, steps: int) -> None:
        self._runtime, self._regime, self._steps = runtime, regime, steps
        self._batch = pinned_batch()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for step in range(_WARM_UP + self._steps):
            if step == _WARM_UP:
                self._runtime.reset()
            time.sleep(self._regime.loader_ms / 1e3)
            yield self._batch


def _train(runtime: Runtime, regime: Regime, batches: Iterable[tuple[Any, ...]]) -> None:
    work_ns = int(regime.device_ms * 1e6)
    optimizer = optimizer_of(runtime, work_ns // 10)
    loss = torch.zeros(1, device="cuda")
    for step, (inputs, labels) in enumerate(batches, 1):
        inputs = inputs.to("cuda", non_blocking=True)
        labels = labels.to("cuda", non_blocking=True)
        runtime.launch(work_ns - work_ns // 10)
        time.sleep(regime.host_ms / 1e3)
        optimizer.step()
        if step % regime.reads_back_every == 0:
            loss.item()


def added_calls(runtime: Runtime, regime: Regime, steps: int = 200, budget: float | None = 1.0) -> Calls:
    """Return what gpuwatch adds to a loop of this regime, with this share of step time as budget; None: the default."""
    torch.cuda.init()
    _train(runtime, regime, _Batches(runtime, regime, steps))
    bare, bare_synchronising = runtime.calls(), runtime.synchronising_calls
    torch.cuda.synchronize()
    with gpuwatch.Watch() if budget is None else gpuwatch.Watch(budget=budget) as watch:
        _train(runtime, regime, watch.steps(_Batches(runtime, regime, steps)))
        added, synchronising = runtime.calls(), runtime.synchronising_calls
        torch.cuda.synchronize()
        report = watch.report()
    added.subtract(bare)
    by_name = {name: count / steps for name, count in sorted(added.items()) if count}
    return Calls(by_name, report.coverage, synchronising - bare_synchronising)


def table(results: dict[str, Calls]) -> str:
    """Return the results as a Markdown table."""
    kinds = [*KINDS.values(), "other", "synchronising, in all", "measured"]
    lines = [
        f"| calls a step | {' | '.join(kinds)} | µs a step, {', '.join(LEVELS)} |",
        f"|---|{'---:|' * (len(kinds) + 1)}",
    ]
    for name, calls in results.items():
        other = sum(count for call, count in calls.by_name.items() if call not in KINDS)
        cells = [
            *(f"{count:.1f}" for count in calls.by_kind.values()),
            f"{other:.1f}",
            str(calls.synchronising),
            f"{calls.measured_ratio:.0%}",
        ]
        cost = ", ".join(f"{calls.cost_us(level):.1f}" for level in LEVELS)
        lines.append(f"| {name} | {' | '.join(cells)} | {cost} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead.device_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="steps that are counted, in each regime")
    parser.add_argument("--json", action="store_true", help="all calls by the runtime's names")
    options = parser.parse_args()
    runtime = loaded()
    results = {}
    for name, regime in REGIMES.items():
        results[f"{name}, every step"] = added_calls(runtime, regime, options.steps)
        results[f"{name}, default budget"] = added_calls(runtime, regime, options.steps, budget=None)
    if options.json:
        print(json.dumps({name: asdict(calls) for name, calls in results.items()}))
        return
    print(table(results))
    print("\nOther calls a step:")
    for name, calls in results.items():
        others = ", ".join(f"{call} {count:.1f}" for call, count in calls.by_name.items() if call not in KINDS)
        print(f"- {name}: {others or 'none'}")


if __name__ == "__main__":
    main()
