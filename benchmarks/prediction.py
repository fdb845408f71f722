"""Predicted and achieved step time after following gpuwatch's advice, over a grid of loaders that are too slow.

    python benchmarks/prediction.py            # the whole grid, about 6 minutes; Markdown on stdout
    python benchmarks/prediction.py --quick    # three cells

Each cell is trained twice, in a process of its own: as given, and with the `num_workers` of the verdict's advice. Fetches sleep (storage,
network) or compute on the CPU, for a known time a batch; the device's step is a sleep, as a training thread's is that waits for a device.
A cell counts as hit when the achieved mean step (first batches left out) is within 15% of the predicted one, or of the predicted range.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

_SECONDS = 7.0
_SETTLED = 10
"""Steps of a pass that are left out: the queues fill."""


@dataclass(frozen=True)
class Cell:
    """A loader and a step. Times in milliseconds a batch."""

    kind: str
    """"sleep" or "cpu"."""
    fetch_ms: float
    workers: int
    compute_ms: float


GRID = (
    *(Cell("sleep", fetch, workers, compute) for compute in (10, 30) for fetch, workers in ((20, 0), (80, 0), (80, 1), (200, 0), (200, 2), (200, 4))),
    *(Cell("cpu", fetch, 0, compute) for fetch, compute in ((5, 10), (12, 30), (25, 30), (40, 30))),
)  # fmt: skip
QUICK = (GRID[0], GRID[4], GRID[-2])


def train(cell: Cell, workers: int) -> dict[str, Any]:
    """Train for some seconds in this process; return the mean step and the first finding."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    import gpuwatch

    torch.set_num_threads(1)
    each_s = cell.fetch_ms / 1e3 / 4

    class Slow(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if cell.kind == "sleep":
                time.sleep(each_s)
            else:
                end = time.thread_time() + each_s
                while time.thread_time() < end:
                    pass
            return torch.zeros(3, 32, 32)

    taken = []
    with gpuwatch.Watch(quiet=True) as watch:
        begin = last = time.perf_counter()
        for _ in watch.steps(DataLoader(Slow(), batch_size=4, num_workers=workers)):
            time.sleep(cell.compute_ms / 1e3)
            now = time.perf_counter()
            taken.append(now - last)
            last = now
            if now - begin > _SECONDS:
                break
        report = watch.report()
    finding = report.findings[0] if report.findings else None
    told = None
    if finding is not None:
        told = {
            "cause": finding.cause,
            "advice": finding.advice,
            "gain": finding.predicted_speedup,
            "range": finding.predicted_range,
        }
    return {"step_s": fmean(taken[_SETTLED:]), "steps": len(taken), "finding": told}


def measure(cell: Cell) -> dict[str, Any]:
    """Return a cell's row: trained as given, then as advised."""
    before = _run(cell, cell.workers)
    told = before["finding"]
    found = re.search(r"num_workers(?:=| \d+ → )(\d+)", told["advice"]) if told else None
    row: dict[str, Any] = {"cell": cell, "before_s": before["step_s"], "cause": told["cause"] if told else None}
    if found is None:
        return row
    low, high = told["range"] or (told["gain"], told["gain"])
    after = _run(cell, int(found[1]))
    # An advice "if each waits for itself" is followed because here each does: its gain is the range's upper end.
    low = high if told["cause"] == "input_unexplained" else low
    shortest, longest = before["step_s"] / high, before["step_s"] / low
    got = after["step_s"]
    nearest = min(max(got, shortest), longest)
    return {
        **row,
        "workers": int(found[1]),
        "predicted_s": (shortest, longest),
        "achieved_s": got,
        "error": got / nearest - 1,
    }


def _run(cell: Cell, workers: int) -> dict[str, Any]:
    arguments = [cell.kind, str(cell.fetch_ms), str(cell.workers), str(cell.compute_ms), str(workers)]
    environment = {**os.environ, "GPUWATCH_ENDPOINT": "ipc:///tmp/gpuwatch-benchmark-nobody.sock"}
    done = subprocess.run(
        [sys.executable, __file__, "--train", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=120,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cell = row["cell"]
    start = f"| {cell.kind} | {cell.fetch_ms:g} | {cell.workers} | {cell.compute_ms:g} | {row['before_s'] * 1e3:.1f} |"
    if "workers" not in row:
        return f"{start} {row['cause'] or 'nothing found'}: no number of workers | | | |"
    low, high = (each * 1e3 for each in row["predicted_s"])
    predicted = f"{low:.1f}" if high < 1.02 * low else f"{low:.1f} to {high:.1f}"
    return f"{start} {row['workers']} | {predicted} | {row['achieved_s'] * 1e3:.1f} | {row['error']:+.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        kind, fetch, workers, compute, used = arguments.train
        print(json.dumps(train(Cell(kind, float(fetch), int(workers), float(compute)), int(used))))
        return
    print(
        "| fetch | ms a batch | workers | step's own ms | step ms | advised workers | predicted ms | achieved ms | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for cell in QUICK if arguments.quick else GRID:
        rows.append(measure(cell))
        print(show(rows[-1]), flush=True)
    judged = [abs(row["error"]) for row in rows if "error" in row]
    print(
        f"\n{sum(error <= 0.15 for error in judged)} of {len(judged)} cells within 15%; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
