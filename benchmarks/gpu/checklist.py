"""Check gpuwatch on a real GPU in five minutes, and print a table to paste into an issue.

    pip install -e .            # with a torch that has your GPU
    python -m benchmarks.gpu.checklist

What it does: the accuracy scenarios with events around each launch as the truth, the cost of each event call, and the
time that a watched loop adds to a step. Exit status: 0 when all rows hold, 1 when one does not, 2 without a device.
docs/evidence/gpu-checklist.md says how to read it.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch

import gpuwatch
from benchmarks.accuracy.measure import ASYNCDEV, BOUND_POINTS, CUDA, DEVICE, DEVICES, in_a_process
from benchmarks.accuracy.page import HEAD, line
from benchmarks.turns import AT_ONCE

REPEATS = 2000
STEPS = 400


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.checklist", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--device", choices=DEVICES, default=CUDA)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a scenario (default 2)")
    options = parser.parse_args()
    if options.device == CUDA and not torch.cuda.is_available():
        print("benchmarks.gpu.checklist: torch sees no CUDA device here", file=sys.stderr)
        return 2
    print(environment(options.device), flush=True)
    over = print_accuracy(options.device, options.seconds)
    print(flush=True)
    if options.device == ASYNCDEV:
        from benchmarks import async_device

        async_device.load()
    print_calls(options.device)
    print_step(options.device)
    return 1 if over else 0


def environment(device: str) -> str:
    """Return what the figures depend on, as one line."""
    parts = [f"torch {torch.__version__}", f"Python {platform.python_version()}", platform.platform()]
    if device == CUDA:
        driver = "driver ?"
        try:
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
            driver = f"driver {found[0]}"
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
        parts = [torch.cuda.get_device_name(), driver, *parts]
    return f"gpuwatch {gpuwatch.__version__} · " + " · ".join(parts)


def print_accuracy(device: str, seconds: float) -> int:
    """Run the scenarios by the device's events; print a row each. Return how many do not hold."""
    from benchmarks.accuracy.scenarios import SCENARIOS

    print(f"\n{HEAD}")
    over = 0
    with ThreadPoolExecutor(AT_ONCE if device == CUDA else 1) as pool:
        asked = [pool.submit(in_a_process, scenario.name, DEVICE, seconds, device) for scenario in SCENARIOS]
        for scenario, answer in zip(SCENARIOS, asked, strict=True):
            try:
                row = answer.result()
            except (RuntimeError, subprocess.SubprocessError) as error:
                over += 1
                print(
                    f"| {scenario.name} | {scenario.injected} | | **failed**: {str(error).splitlines()[0]} | | |",
                    flush=True,
                )
                continue
            over += not row.holds
            print(line(row), flush=True)
    print(f"\n{len(SCENARIOS) - over} of {len(SCENARIOS)} hold within {BOUND_POINTS} points")
    return over


def print_calls(device: str) -> None:
    """Print what each event call takes, in a loop of nothing else: a real step makes them dearer."""
    first, second = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    if device == CUDA:
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    second.synchronize()
    calls: dict[str, Callable[[], Any]] = {
        "record": second.record,
        "query": second.query,
        "elapsed_time": lambda: first.elapsed_time(second),
    }
    if device == CUDA:
        calls["capture check"] = torch.cuda.is_current_stream_capturing
    print("| call | median, us |\n|---|---:|")
    for name, call in calls.items():
        second.synchronize()
        print(f"| {name} | {median(_timed_us(call) for _ in range(REPEATS)):.2f} |")


def _timed_us(call: Callable[[], Any]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


def print_step(device: str) -> None:
    """Print what the hook says that it takes of a step, and what a watched loop adds to a bare one's median step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [(torch.randn(256, 512), torch.randn(256, 512)) for _ in range(8)]

    def train(loader: Any) -> float:
        """Return the median time of a step in microseconds, as the host sees it."""
        times, before = [], time.perf_counter_ns()
        for inputs, labels in loader:
            loss = (model(inputs.to(device)) - labels.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter_ns()
            times.append(now - before)
            before = now
        torch.accelerator.synchronize()
        return median(times[20:]) / 1e3

    def loader() -> Any:
        return (batches[number % len(batches)] for number in range(STEPS))

    train(loader())
    rounds = []
    for _ in range(3):
        bare_us = train(loader())
        with gpuwatch.Watch(quiet=True) as watch:
            watched_us = train(watch.steps(loader()))
            report = watch.report()
        own_us = None if report.hook_s is None or not report.steps else report.hook_s / report.steps * 1e6
        rounds.append((bare_us, watched_us, own_us))
    print(
        "\n| bare step, us | watched, us | added, us | the hook by its own account, us a step |\n|---:|---:|---:|---:|"
    )
    for bare_us, watched_us, own_us in rounds:
        own = "not measured" if own_us is None else f"{own_us:.1f}"
        print(f"| {bare_us:.0f} | {watched_us:.0f} | {watched_us - bare_us:+.0f} | {own} |")


if __name__ == "__main__":
    sys.exit(main())
