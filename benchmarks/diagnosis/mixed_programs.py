"""Trainings with two things wrong: the stronger one must come first, and the other one must be listed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import gpuwatch

from .gpu import Gpu
from .input_programs import Items
from .program import Clock, Program


def starved_and_evaluating(clock: Clock) -> None:
    """Half of the time waits for data, a quarter evaluates."""
    with gpuwatch.Watch() as watch:
        for number, _ in enumerate(watch.steps(DataLoader(Items(lambda _: time.sleep(0.02)), batch_size=2))):
            time.sleep(0.02)
            if number % 20 == 19:
                with watch.phase("eval"):
                    time.sleep(0.45)
            if clock.over:
                break


def starved_and_saving(clock: Clock) -> None:
    """Two fifths of the time wait for storage, more than a fifth goes into checkpoints."""
    loader = DataLoader(Items(lambda _: time.sleep(0.05)), batch_size=2, num_workers=2)
    with gpuwatch.Watch() as watch, tempfile.TemporaryDirectory() as folder:
        for number, _ in enumerate(watch.steps(loader)):
            time.sleep(0.015)
            if number % 25 == 24:
                with watch.phase("checkpoint"):
                    torch.save(torch.rand(1_000_000), Path(folder) / "last.pt")
                    time.sleep(0.55)  # a slow file server
            if clock.over:
                break


def evaluating_and_pausing(clock: Clock) -> None:
    """Evaluation after each short pass whose workers are restarted."""
    with gpuwatch.Watch() as watch:
        while not clock.over:
            items = Items(lambda _: None, 160)
            for _ in watch.steps(
                DataLoader(items, batch_size=4, num_workers=1, worker_init_fn=lambda _: time.sleep(0.3))
            ):
                time.sleep(0.025)
            with watch.phase("eval"):
                time.sleep(1.2)


def copying_and_logging(clock: Clock) -> None:
    """32 MiB from pageable memory, 20 ms of compute, then 8 ms of logging."""
    gpu = Gpu()
    loader = DataLoader(Items(lambda _: None, shape=(8 << 20,)), batch_size=None)
    with gpu.measures(gpuwatch.Watch()) as watch:
        for _ in watch.steps(loader):
            with watch.transfer():
                gpu.device.launch(0.02)
                gpu.device.synchronize()
            gpu.compute(0.02)
            time.sleep(0.03)
            if clock.over:
                break


def starved_and_copying(clock: Clock) -> None:
    """25 ms in the loader, 12 ms of copies, 20 ms of compute."""
    gpu = Gpu()
    loader = DataLoader(Items(lambda _: time.sleep(0.025), shape=(8 << 20,)), batch_size=None)
    with gpu.measures(gpuwatch.Watch()) as watch:
        for _ in watch.steps(loader):
            with watch.transfer():
                gpu.device.launch(0.012)
                gpu.device.synchronize()
            gpu.compute(0.02)
            gpu.device.synchronize()
            if clock.over:
                break


def late_and_evaluating(clock: Clock) -> None:
    """Rank 1's loader is late, and every rank evaluates for a third of the time."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    late = os.environ["RANK"] == "1"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    end = torch.zeros(1)
    with gpuwatch.Watch() as watch:
        watch.watch_communication(model)
        fetch_s = 0.05 if late else 0.002
        loader = DataLoader(Items(lambda _: time.sleep(fetch_s)), batch_size=1)
        for number, _ in enumerate(watch.steps(loader)):
            time.sleep(0.03)
            optimizer.zero_grad()
            model(torch.rand(8, 32)).sum().backward()
            optimizer.step()
            if number % 20 == 19:
                with watch.phase("eval"):
                    time.sleep(0.9)
            end[0] = clock.over
            torch.distributed.all_reduce(end)
            if end[0]:
                break
    torch.distributed.destroy_process_group()


MIXED = (
    Program("starved, and evaluating", starved_and_evaluating, ("input_single_process", "eval_share"), mixed=True),
    Program("starved, and saving", starved_and_saving, ("input_unexplained", "checkpoint_stall"), also=("burst_every_n",), mixed=True),
    Program("evaluating, and pausing at each pass", evaluating_and_pausing, ("eval_share", "epoch_start_pause"), mixed=True),
    Program("copying, and logging", copying_and_logging, ("transfer_pageable", "host_bound"), gpu=True, mixed=True),
    Program("starved, and copying", starved_and_copying, ("input_single_process", "transfer_pageable"), gpu=True, mixed=True),
    Program("a late rank, and evaluating", late_and_evaluating, ("straggler", "eval_share"), ranks=3, also=("input_single_process",), hook_sees=False, mixed=True),
)  # fmt: skip
