"""A DistributedDataParallel training on the CPU with a known truth: where each rank sleeps. A helper of the tests.

Under torchrun, or with RANK, WORLD_SIZE and MASTER_* set, it is one rank; `--spawn N` makes N ranks of its own. Each
rank's last line is its report as JSON. Once the `--end-file` is there, all ranks end after the same step, before
`--steps`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gpuwatch


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--method", default="spawn")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--end-file", type=Path)
    parser.add_argument("--data", type=float, default=0.01)
    parser.add_argument("--compute", type=float, default=0.02)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-data", type=float, default=0.0)
    parser.add_argument("--slow-compute", type=float, default=0.0)
    parser.add_argument("--hang-rank", type=int, default=-1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--watch-communication", action="store_true")
    parser.add_argument("--verdict", action="store_true")
    return parser.parse_args()


def batches(wanted: argparse.Namespace, seconds: float) -> Iterator[torch.Tensor]:
    for step in range(wanted.steps):
        if wanted.end_file is not None and wanted.end_file.exists() and step >= steps_of_all(step, wanted):
            return
        time.sleep(seconds)
        yield torch.ones(8, 16)


def steps_of_all(step: int, wanted: argparse.Namespace) -> float:
    """Return after how many steps all ranks end.

    Rank 0 decides, and writes it before an all-reduce that the other ranks need to continue.
    """
    if dist.get_rank() == 0 and not wanted.end_file.stat().st_size:
        wanted.end_file.write_text(str((step // wanted.accumulate + 1) * wanted.accumulate))
    return float(wanted.end_file.read_text() or "inf")


def save(step: int) -> None:
    """Save a checkpoint to storage that does not answer."""
    if step == 20:
        time.sleep(3600)


def train(rank: int, wanted: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with gpuwatch.Watch(quiet=not wanted.verdict) as w:  # before there is a process group
        place = {"rank": rank, "world_size": wanted.spawn} if wanted.spawn else {}
        dist.init_process_group("gloo", **place)
        late = dist.get_rank() == wanted.slow_rank
        model = DistributedDataParallel(torch.nn.Linear(16, 4))
        if wanted.watch_communication:
            w.watch_communication(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        wait = wanted.data + (wanted.slow_data if late else 0.0)
        work = wanted.compute + (wanted.slow_compute if late else 0.0)
        dist.barrier()
        body_s = 0.0
        for step, batch in enumerate(w.steps(batches(wanted, wait))):
            begin = time.perf_counter()
            last = (step + 1) % wanted.accumulate == 0
            with nullcontext() if last else model.no_sync():
                time.sleep(work)
                model(batch).sum().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            body_s += time.perf_counter() - begin
            if dist.get_rank() == wanted.hang_rank:
                save(step)
        report = w.report()
        dist.destroy_process_group()
    reported = {"run": w.run, "rank": w.identity.rank, "world_size": w.identity.world_size, "steps": report.steps}
    reported |= {"states": dict(report.states), "duration_s": report.duration_s, "body_s": body_s}
    sys.stdout.write(json.dumps(reported) + "\n")
    sys.stdout.flush()


def main() -> None:
    wanted = options()
    if wanted.method == "fork":
        import_module("torch._dynamo")  # DDP and optimizers import it, for seconds: once, before the ranks are forked
    if wanted.spawn:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(wanted.port)}
        torch.multiprocessing.start_processes(train, (wanted,), nprocs=wanted.spawn, start_method=wanted.method)
    else:
        train(0, wanted)


if __name__ == "__main__":
    main()
