"""Two published tables about slow loaders, made again in shape, with gpuwatch's verdict next to each row.

    python -m benchmarks.published_tables            # about 3 minutes; Markdown on stdout
    python -m benchmarks.published_tables --quick    # three rows of the first table, both ends of the second
    python -m benchmarks.published_tables --write    # docs/evidence/published-tables.md

A scale model: the times of fetch, copy and step are taken from the tables (a tenth, or ten times, of them), fetches
sleep, and the device is one that is only time, with a queue as a GPU has one. What is shown is what comes out of that
when loaders, workers and queues are real: what a stopwatch on the host reads, and what gpuwatch's verdict.

Exit status: 0 when every row has the verdict that the truth demands and compute is reported as what the device
takes, else 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import fmean, median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from benchmarks import ROOT
from benchmarks.fakes import FakeDevice, measure_by
from benchmarks.prose import wrapped
from gpuwatch.hook import account

REALTIME = "GPUWATCH_BENCHMARK_REALTIME"
"""Environment variable, 1: trainings are scheduled first (SCHED_FIFO, which root may), so that on a machine that others
load they wake in time."""
PAGE = ROOT / "docs" / "evidence" / "published-tables.md"


@dataclass(frozen=True)
class Row:
    """One row of a published table, and its scale model. Times in ms a batch."""

    label: str
    published: str
    workers: int
    fetch_ms: float
    step_ms: float
    starved: bool
    copy_ms: float = 0.0
    pinned: bool = False
    steps: int = 500


def _sweep(workers: int, data: float, compute: float) -> Row:
    starved = 150 / max(1, workers) > 1.15 * 20
    steps = 60 if workers == 0 else 300 + 30 * workers  # the workers' start must not weigh much
    return Row(str(workers), f"{data:.2f} / {compute:.2f}", workers, 150, 20, starved, steps=steps)


SWEEP = tuple(
    _sweep(*row)
    for row in ((0, 1.50, 0.02), (2, 0.78, 0.05), (4, 0.38, 0.05), (6, 0.27, 0.05), (8, 0.22, 0.05), (12, 0.17, 0.07), (24, 0.11, 0.11), (48, 0.00, 0.20))
)  # fmt: skip
MNIST = (
    Row("as it was", "22.67 s", 0, 46, 18.5, True, copy_ms=1.0, steps=150),
    Row("8 workers", "9.14 s (2.48×)", 8, 46, 18.5, False, copy_ms=1.0),
    Row("and pinned, non_blocking", "9.00 s (2.52×)", 8, 46, 18.5, False, copy_ms=0.7, pinned=True),
)


class Slow(Dataset):  # type: ignore[type-arg]
    """Batches that take a known time to fetch."""

    def __init__(self, fetch_s: float) -> None:
        self._fetch_s = fetch_s
        self._batch = torch.zeros(64, 784)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._fetch_s)
        return self._batch


def train(row: Row) -> dict[str, Any]:
    """Train the model of a row; return what the host's stopwatch and gpuwatch say. Times in seconds a step."""
    warnings.simplefilter("ignore")
    if os.environ.get(REALTIME) == "1":
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    device = FakeDevice()
    account.device = lambda: "cuda"  # torch has none here, and is not asked: a step on the CPU would be blocked
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    loader = DataLoader(Slow(row.fetch_ms / 1e3), batch_size=None, num_workers=row.workers, pin_memory=row.pinned)
    settled = 3 * max(4, row.workers)
    data, compute = [], []
    with gpuwatch.Watch(quiet=True) as watch:
        measure_by(watch, device)
        batches = iter(watch.steps(loader))
        for number in range(row.steps + settled):
            begin = time.perf_counter()
            next(batches)
            in_hand = time.perf_counter()
            if row.copy_ms:
                with watch.transfer():
                    device.launch(row.copy_ms / 1e3)
                    if not row.pinned:
                        device.synchronize()
            device.launch(row.step_ms / 1e3)
            optimizer.step()
            while device.busy_ns - device.done_ns > row.step_ms * 1e6:  # one step waits in the queue, no more
                time.sleep(0.0005)
            if number >= settled:
                data.append(in_hand - begin)
                compute.append(time.perf_counter() - in_hand)
        device.synchronize()
        watch._recorder.poll(watch._recorder.clock())
        report = watch.report()
        columns = watch._publisher.accounts.window(watch._recorder.clock())[0].steps
    finding = next((each for each in report.findings if each.severity != "info"), None)
    return {
        "data_s": fmean(data),
        "compute_s": fmean(compute),
        "step_s": (sum(data) + sum(compute)) / len(data),
        "input_wait_s": fmean(columns.data_wait_s[settled:]),
        "device_compute_s": median(columns.compute_s[settled:]),
        "sentence": report.verdict.sentence,
        "state": report.verdict.state,
        "cause": finding.cause if finding else None,
        "advice": finding.advice if finding else "",
        "gain": finding.predicted_range if finding else None,
    }


def measure(row: Row) -> dict[str, Any]:
    """Train a row in a process of its own."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=lambda: send.send(train(row)))
    process.start()
    while not receive.poll(1.0):
        if not process.is_alive() and not receive.poll():
            raise RuntimeError(f"the row {row.label!r} failed with status {process.exitcode}")
    found: dict[str, Any] = receive.recv()
    process.join()
    return found


def right(row: Row, found: dict[str, Any]) -> bool:
    """Whether the verdict is what the truth demands, and compute what the device takes."""
    verdict = found["state"] == "input" if row.starved else found["state"] == "compute"
    return verdict and abs(found["device_compute_s"] - row.step_ms / 1e3) < 0.1 * row.step_ms / 1e3


def sweep_table(rows: Sequence[tuple[Row, dict[str, Any]]]) -> list[str]:
    lines = ["| workers | published: data / compute, s | host's stopwatch: data / compute, ms | gpuwatch: input wait / compute, ms | step ms | gpuwatch's verdict |", "|---|---|---|---|---|---|"]  # fmt: skip
    for row, found in rows:
        ms = {
            name: f"{found[name] * 1e3:.1f}"
            for name in ("data_s", "compute_s", "input_wait_s", "device_compute_s", "step_s")
        }
        lines.append(
            f"| {row.label} | {row.published} | {ms['data_s']} / {ms['compute_s']} | {ms['input_wait_s']} / {ms['device_compute_s']} | {ms['step_s']} "
            f"| {_says(found)}{'' if right(row, found) else ' **(wrong)**'} |"
        )
    return lines


def mnist_table(rows: Sequence[tuple[Row, dict[str, Any]]]) -> list[str]:
    lines = ["| | published | step ms | gain | gpuwatch's verdict |", "|---|---|---|---|---|"]
    first = rows[0][1]["step_s"]
    for row, found in rows:
        gain = f"{first / found['step_s']:.2f}×" if found is not rows[0][1] else ""
        wrong = "" if right(row, found) else " **(wrong)**"
        lines.append(
            f"| {row.label} | {row.published} | {found['step_s'] * 1e3:.1f} | {gain} | {_says(found)}{wrong} |"
        )
    return lines


def _says(found: dict[str, Any]) -> str:
    if found["cause"] is None:
        return found["sentence"]
    gain = "" if found["gain"] is None else f" (predicted {found['gain'][0]:.2f} to {found['gain'][1]:.2f}×)"
    setting = re.search(r"num_workers(=| \d+ → )\d+", found["advice"])
    return f"{found['sentence']}; `{found['cause']}`: {setting[0] if setting else found['advice']}{gain}"


_TEXT = """# Published tables, reproduced

    python -m benchmarks.published_tables --write

Two published tables about slow loaders, as scale models: the times of fetch, copy and step are taken from the tables, fetches sleep,
and the device only takes time, with a queue like a GPU's. Loaders, workers and queues are real. WHEN

## A sweep of num_workers

ResNet-18 on 4 GPUs, 6 cores with 12 threads, seconds an iteration; here a tenth of that. (The published rows for 96 workers, and for the cores that ran out,
are left out: the model's fetches sleep.)

SWEEP

The published columns are misleading, because they were timed without synchronising: as the wait for data shrinks, "compute" grows by as much. The host's stopwatch shows this here too. Nothing became slower: the host now waits for the device within its compute, instead of waiting for data. gpuwatch's compute, on the device timeline, stays at the time that the device needs, and its verdict changes when the loader keeps up.

## MNIST, batch 64

Times of five epochs; here ten times of a batch.

MNIST

The predicted gain is in the first row. Pinning gains as much as in the published run, and gpuwatch does not advise it: copies are a few per cent of the time.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/published-tables.md")
    arguments = parser.parse_args()
    if arguments.write and arguments.quick:
        parser.error("--write takes all rows: leave --quick out")
    sweep = (SWEEP[0], SWEEP[2], SWEEP[-3]) if arguments.quick else SWEEP
    mnist = (MNIST[0], MNIST[-1]) if arguments.quick else MNIST
    os.environ.update(GPUWATCH_ENDPOINT="ipc:///tmp/gpuwatch-benchmark-no-agent.sock")
    done = {row: measure(row) for row in (*sweep, *mnist)}
    first, second = ([(row, done[row]) for row in rows] for rows in (sweep, mnist))
    print("\n".join([*sweep_table(first), "", *mnist_table(second)]))
    if arguments.write:
        when = f"Last run: {datetime.now(timezone.utc):%Y-%m-%d}, {os.cpu_count()} cores at a load of {os.getloadavg()[0]:.1f}{', these trainings scheduled first' if os.environ.get(REALTIME) == '1' else ''}."
        text = _TEXT.replace("WHEN", when).replace("SWEEP", "\n".join(sweep_table(first)), 1)
        PAGE.write_text(wrapped(text.replace("MNIST\n\nThe", "\n".join(mnist_table(second)) + "\n\nThe")))
    return 0 if all(right(row, found) for row, found in done.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
