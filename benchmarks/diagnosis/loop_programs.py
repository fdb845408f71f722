"""Trainings whose loop loses time: pauses between passes, evaluation, checkpoints, a stalling loader, waiting ranks."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import gpuwatch

from .input_programs import Items
from .program import Clock, Program, decode


def _ready(count: int = 1_000_000) -> DataLoader:  # type: ignore[type-arg]
    """Return batches that are there already."""
    return DataLoader(Items(lambda _: None, count, (3, 32, 32)), batch_size=4)


def pause_at_each_pass(clock: Clock) -> None:
    """Short passes, workers that open an archive at their start, and no persistent_workers."""
    while not clock.over:
        loader = DataLoader(
            Items(lambda _: None, 160), batch_size=4, num_workers=2, worker_init_fn=lambda _: time.sleep(0.5)
        )
        for _ in gpuwatch.watch(loader):
            time.sleep(0.025)


def heavy_evaluation(clock: Clock) -> None:
    """An evaluation that is not declared: a loop without gradients, every 20 steps."""
    held_out = Items(lambda _: None, 80)
    for number, _ in enumerate(gpuwatch.watch(_ready())):
        time.sleep(0.02)
        if number % 20 == 19:
            with torch.no_grad():
                for _images in gpuwatch.watch(DataLoader(held_out, batch_size=4)):
                    time.sleep(0.015)
        if clock.over:
            break


def heavy_checkpoints(clock: Clock) -> None:
    """A state of 80 MB written and synced every 25 steps."""
    state = {"weights": torch.rand(20_000_000)}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, gpuwatch.Watch() as watch:
        for number, _ in enumerate(watch.steps(_ready())):
            time.sleep(0.01)
            if number % 25 == 24:
                with watch.phase("checkpoint"), (Path(folder) / "last.pt").open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
            if clock.over:
                break


def loader_that_stops(clock: Clock) -> None:
    """After 200 batches a lock is never given back."""
    never = threading.Event()
    make = Items(lambda index: never.wait(max(0.0, clock.seconds - clock.passed_s)) if index > 800 else None)
    for _ in gpuwatch.watch(DataLoader(make, batch_size=4)):
        time.sleep(0.01)
        if clock.over:
            break


def real_work(clock: Clock) -> None:
    """A network trained on the CPU with its data in memory."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 30 * 30, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in gpuwatch.watch(_ready()):
        optimizer.zero_grad()
        model(torch.rand(32, 3, 64, 64)).square().mean().backward()
        optimizer.step()
        if clock.over:
            break


def _rank(clock: Clock, *, fetch_s: float, work_s: float, late_fetch_s: float = 0.0, late_work_s: float = 0.0) -> None:
    """Train as one rank of a DistributedDataParallel run over gloo; rank 1 is the late one."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    late = torch.distributed.get_rank() == 1
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wait = fetch_s + (late_fetch_s if late else 0.0)
    work = work_s + (late_work_s if late else 0.0)
    end = torch.zeros(1)
    with gpuwatch.Watch() as watch:
        watch.watch_communication(model)
        for _ in watch.steps(DataLoader(Items(lambda _: time.sleep(wait)), batch_size=1)):
            time.sleep(work)
            optimizer.zero_grad()
            model(torch.rand(8, 32)).sum().backward()
            optimizer.step()
            end[0] = clock.over
            torch.distributed.all_reduce(end)
            if end[0]:
                break
    torch.distributed.destroy_process_group()


def rank_with_a_slow_loader(clock: Clock) -> None:
    _rank(clock, fetch_s=0.002, work_s=0.03, late_fetch_s=0.04)


def rank_on_a_slow_host(clock: Clock) -> None:
    _rank(clock, fetch_s=0.002, work_s=0.03, late_work_s=0.03)


def balanced_ranks(clock: Clock) -> None:
    _rank(clock, fetch_s=0.002, work_s=0.05)


def quick_loader(clock: Clock) -> None:
    """Workers that are ready long before the step."""
    loader = DataLoader(Items(lambda _: decode(0.0002)), batch_size=4, num_workers=2, persistent_workers=True)
    for _ in gpuwatch.watch(loader):
        time.sleep(0.1)
        if clock.over:
            break


def evaluation_now_and_then(clock: Clock) -> None:
    with gpuwatch.Watch() as watch:
        for number, _ in enumerate(watch.steps(_ready())):
            time.sleep(0.02)
            if number % 100 == 99:
                with watch.phase("eval"):
                    time.sleep(0.25)
            if clock.over:
                break


def checkpoint_now_and_then(clock: Clock) -> None:
    with tempfile.TemporaryDirectory() as folder, gpuwatch.Watch() as watch:
        for number, _ in enumerate(watch.steps(_ready())):
            time.sleep(0.03)
            if number % 150 == 149:
                with watch.phase("checkpoint"):
                    torch.save(torch.rand(1_000_000), Path(folder) / "last.pt")
            if clock.over:
                break


def long_warm_up(clock: Clock) -> None:
    """A first batch of 2 s and slow first steps, then all is well."""
    time.sleep(1)
    fetch = Items(lambda index: time.sleep(2.0 if index == 0 else 0.0))
    for number, _ in enumerate(gpuwatch.watch(DataLoader(fetch, batch_size=4))):
        time.sleep(0.5 if number < 5 else 0.08)
        if clock.over:
            break


def short_passes(clock: Clock) -> None:
    """Short passes by persistent workers."""
    loader = DataLoader(Items(lambda _: None, 160), batch_size=4, num_workers=2, persistent_workers=True)
    while not clock.over:
        for _ in gpuwatch.watch(loader):
            time.sleep(0.1)


def uneven_steps(clock: Clock) -> None:
    """Sequences of all lengths: steps of 40 to 160 ms."""
    for number, _ in enumerate(gpuwatch.watch(_ready())):
        time.sleep(0.04 + 0.12 * ((number * 7919) % 100) / 100)
        if clock.over:
            break


LOOP = (
    Program("workers restarted for each pass", pause_at_each_pass, ("epoch_start_pause",)),
    Program("an undeclared evaluation, 40% of the time", heavy_evaluation, ("eval_share",)),
    Program("a checkpoint every 25 steps", heavy_checkpoints, ("checkpoint_stall",)),
    Program("a lock that is never given back", loader_that_stops, ("stalled",), seconds=55, hook_sees=False),
    Program("a network on the CPU", real_work, ("compute_bound",), cpu_bound=True),
    Program("one rank's loader is slow", rank_with_a_slow_loader, ("straggler",), ranks=3, also=("input_single_process",), hook_sees=False),
    Program("one rank's host is slow", rank_on_a_slow_host, ("straggler",), ranks=3, hook_sees=False),
)  # fmt: skip
HEALTHY_LOOPS = (
    Program("ready workers", quick_loader, ()),
    Program("evaluation, 11% of the time", evaluation_now_and_then, ()),
    Program("a checkpoint now and then", checkpoint_now_and_then, ()),
    Program("a slow start", long_warm_up, ()),
    Program("short passes, persistent workers", short_passes, ()),
    Program("steps of all lengths", uneven_steps, ()),
    Program("3 ranks in step", balanced_ranks, (), ranks=3),
)
