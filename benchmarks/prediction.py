"""Predicted and achieved step time after following gpuwatch's advice, over a grid of loaders that are too slow.

    python -m benchmarks.prediction            # the whole grid, about 8 minutes; Markdown on stdout
    python -m benchmarks.prediction --quick    # three cells
    python -m benchmarks.prediction --write    # docs/evidence/prediction.md

Each cell is trained twice, one time after the other in processes of their own: as given, and with the `num_workers` of
the verdict's advice. Fetches sleep (storage, network) or compute on the CPU, for a known time a batch; the device's
step is a sleep, as a training thread's is that waits for a device. A cell counts as hit when the achieved mean step
(first batches left out) is within 15% of the predicted step, or of the nearer end where a range is predicted.

Exit status: 0 when 9 of 10 cells are hit, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import fmean
from typing import Any

from benchmarks import ROOT
from benchmarks.prose import wrapped

PAGE = ROOT / "docs" / "evidence" / "prediction.md"
NEEDED, WITHIN = 0.9, 0.15
REALTIME = "GPUWATCH_BENCHMARK_REALTIME"
"""Environment variable, 1: trainings are scheduled first (SCHED_FIFO, which root may), so that on a machine that others
load too they wake in time. They use hardly any CPU; those whose fetches compute, up to half a core."""
_SECONDS = 9.0
_SETTLED = 12
"""Steps of a pass that are left out, and one for each worker: they start and their queues fill."""


@dataclass(frozen=True)
class Cell:
    """A loader and a step. Times in milliseconds a batch."""

    kind: str
    """"sleep" or "cpu"."""
    fetch_ms: float
    workers: int
    compute_ms: float


GRID = (
    *(Cell("sleep", fetch, workers, 20) for fetch, workers in ((40, 0), (120, 0), (120, 1), (120, 3), (300, 0), (300, 1), (300, 4))),
    *(Cell("sleep", fetch, workers, 50) for fetch, workers in ((40, 0), (120, 0), (120, 1), (300, 0), (300, 2), (300, 4))),
    *(Cell("cpu", fetch, 0, compute) for fetch, compute in ((10, 30), (25, 30), (40, 60))),
)  # fmt: skip
QUICK = (GRID[1], GRID[3], GRID[-2])


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
    if os.environ.get(REALTIME) == "1":
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
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
    reported = None
    if finding is not None:
        reported = {
            "cause": finding.cause,
            "advice": finding.advice,
            "gain": finding.predicted_speedup,
            "range": finding.predicted_range,
        }
    return {"step_s": fmean(taken[_SETTLED + workers :]), "steps": len(taken), "finding": reported}


def measure(cell: Cell) -> dict[str, Any]:
    """Return a cell's row: trained as given, then as advised."""
    before = _run(cell, cell.workers)
    reported = before["finding"]
    found = re.search(r"num_workers(?:=| \d+ → )(\d+)", reported["advice"]) if reported else None
    row: dict[str, Any] = {"cell": cell, "before_s": before["step_s"], "cause": reported["cause"] if reported else None}
    row["load"] = os.getloadavg()[0]
    if found is None:
        return row
    low, high = reported["range"] or (reported["gain"], reported["gain"])
    after = _run(cell, int(found[1]))
    # An advice "if each waits for itself" is followed because here each does: its gain is the range's upper end.
    low = high if reported["cause"] == "input_unexplained" else low
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
    environment = {**os.environ, "GPUWATCH_ENDPOINT": "ipc:///tmp/gpuwatch-benchmark-no-agent.sock"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.prediction", "--train", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=ROOT,
        timeout=120,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cell = row["cell"]
    start = f"| {cell.kind} | {cell.fetch_ms:g} | {cell.workers} | {cell.compute_ms:g} | {row['before_s'] * 1e3:.1f} |"
    if "workers" not in row:
        return f"{start} {row['cause'] or 'nothing found'}: no number of workers | | | | {row['load']:.1f} |"
    low, high = (each * 1e3 for each in row["predicted_s"])
    predicted = f"{low:.1f}" if high < 1.02 * low else f"{low:.1f} to {high:.1f}"
    error = f"{row['error']:+.0%}" if abs(row["error"]) >= 0.005 else "0%"
    return f"{start} {row['workers']} | {predicted} | {row['achieved_s'] * 1e3:.1f} | {error} | {row['load']:.1f} |"


_HEADER = """| fetch | ms a batch | workers | step's own ms | step ms | advised workers | predicted ms | achieved ms | error | load |
|---|---|---|---|---|---|---|---|---|---|"""


def hits(rows: Sequence[dict[str, Any]]) -> int:
    """Return how many cells came out as predicted; one without any number in its advice did not."""
    return sum("error" in row and abs(row["error"]) <= WITHIN for row in rows)


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return docs/evidence/prediction.md."""
    text = (ROOT / "benchmarks" / "prediction_page.md").read_text()
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    loads = [row["load"] for row in rows]
    first = ", these trainings scheduled first" if os.environ.get(REALTIME) == "1" else ""
    summary = (
        f"**{hits(rows)} of {len(rows)} cells within {WITHIN:.0%}** ({when}, {os.cpu_count()} cores{first}; *load* is the machine's "
        f"one-minute load average between a cell's two trainings, {min(loads):.1f} to {max(loads):.1f})."
    )
    return text.replace("SUMMARY", summary).replace("TABLE", "\n".join((_HEADER, *map(show, rows))))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/prediction.md")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="cells whose fetches sleep, at a time [2]")
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        kind, fetch, workers, compute, used = arguments.train
        print(json.dumps(train(Cell(kind, float(fetch), int(workers), float(compute)), int(used))))
        return 0
    if arguments.write and arguments.quick:
        parser.error("--write takes the whole grid: leave --quick out")
    print(_HEADER, flush=True)

    def one(cell: Cell) -> dict[str, Any]:
        row = measure(cell)
        print(show(row), flush=True)
        return row

    cells = QUICK if arguments.quick else GRID
    with ThreadPoolExecutor(arguments.at_once) as pool:
        rows = list(pool.map(one, [cell for cell in cells if cell.kind == "sleep"]))
    rows += [one(cell) for cell in cells if cell.kind == "cpu"]
    print(f"\n{hits(rows)} of {len(rows)} cells within {WITHIN:.0%}")
    if arguments.write:
        PAGE.write_text(wrapped(page(rows)))
    return 0 if hits(rows) >= NEEDED * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
