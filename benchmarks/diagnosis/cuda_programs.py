"""Trainings on a real GPU, whose driver's readings the agent sees: `python -m benchmarks.diagnosis --cuda`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import gpuwatch

from .input_programs import Items
from .program import Clock, Program, decode

_CUDA = "cuda"


class Work:
    """A step's work: matrix products that take the device so long, in one launch each, and an optimizer's step."""

    def __init__(self, seconds: float) -> None:
        self.matrix = torch.randn(4096, 4096, device=_CUDA, dtype=torch.bfloat16)
        self.weight = nn.Parameter(torch.zeros(1, device=_CUDA))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(50):
            self.matrix @ self.matrix
        begin.record()
        for _ in range(100):
            self.matrix @ self.matrix
        end.record()
        end.synchronize()
        self.products = max(1, round(seconds * 1e3 / (begin.elapsed_time(end) / 100)))

    def step(self) -> torch.Tensor:
        """Launch it; return the loss, on the device."""
        for _ in range(self.products):
            out = self.matrix @ self.matrix
        loss = out[0, 0].float() * self.weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _batches(mib: int, *, pinned: bool = False, fetch: Callable[[int], None] = lambda _: None) -> DataLoader[Any]:
    return DataLoader(Batches(fetch, shape=(max(1, mib) << 18,)), batch_size=None, pin_memory=pinned)


class Batches(Items):
    """The same batch again and again."""

    def pin(self) -> None:
        self._item = self._item.pin_memory()


def _train(
    clock: Clock,
    loader: Any,
    compute_s: float,
    *,
    after: Callable[[int, torch.Tensor], Any] = lambda *_: None,
    reads_every: int = 0,
    asynchronous: bool = False,
) -> None:
    work = Work(compute_s)
    with gpuwatch.Watch() as watch:
        for number, batch in enumerate(watch.steps(loader)):
            batch.to(_CUDA, non_blocking=asynchronous)
            loss = work.step()
            if reads_every and number % reads_every == 0:
                loss.item()
            after(number, loss)
            if clock.over:
                break


def pageable(clock: Clock) -> None:
    _train(clock, _batches(128), 0.01, reads_every=20)


def full_bus(clock: Clock) -> None:
    """The batch is pinned already, which a DataLoader that pins gives on as it is."""
    batches = _batches(512, pinned=True)
    batches.dataset.pin()  # type: ignore[attr-defined]
    _train(clock, batches, 0.005, reads_every=20, asynchronous=True)


class Forever:
    """The same batch again and again, which is there already."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.batch


def small_kernels(clock: Clock) -> None:
    """A deep network of tiny layers: Python and launches take the time."""
    layers = [part for _ in range(60) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    net = nn.Sequential(*layers).to(_CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, foreach=False)
    with gpuwatch.Watch() as watch:
        for batch in watch.steps(Forever(torch.randn(32, 64))):
            net(batch.to(_CUDA)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if clock.over:
                break


def logging_after_the_step(clock: Clock) -> None:
    _train(clock, Forever(torch.ones(1024)), 0.02, after=lambda *_: time.sleep(0.035))


def loss_at_every_step(clock: Clock) -> None:
    _train(clock, Forever(torch.ones(1024)), 0.03, reads_every=1, after=lambda *_: decode(0.012))


def saturated(clock: Clock) -> None:
    _train(clock, Forever(torch.ones(1024)), 0.04, reads_every=10)


def kept_graphs(clock: Clock) -> None:
    """The losses of all steps are kept with their graphs: 80 MB a step of 40 ms."""
    kept: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        kept.append(torch.zeros(20 << 20, device=_CUDA))

    _train(clock, Forever(torch.ones(1024)), 0.04, reads_every=10, after=keep)


def notebook_left_open(clock: Clock) -> None:
    """A process that has ended its work and keeps the GPU."""
    Work(0.001).step().item()
    time.sleep(clock.seconds)


def decoding_in_the_process(clock: Clock) -> None:
    _train(clock, _batches(1, fetch=lambda _: decode(0.03)), 0.02, reads_every=20)


def evaluating_undeclared(clock: Clock) -> None:
    """30 forward passes without gradients after each 20 steps, outside of any declared phase."""
    net = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).to(_CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    rows = torch.randn(8192, 4096, device=_CUDA)
    with gpuwatch.Watch() as watch:
        for number, _ in enumerate(watch.steps(Forever(torch.ones(8)))):
            net(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 20 == 19:
                net.eval()
                with torch.no_grad():
                    sum(net(rows).mean() for _ in range(30)).item()  # type: ignore[union-attr]
                net.train()
            if clock.over:
                break


def saving_often(clock: Clock) -> None:
    """torch.save of 1 GiB of weights, from the device, every 25 steps."""
    weights, work = torch.randn(1 << 28, device=_CUDA), Work(0.04)
    with tempfile.TemporaryDirectory() as folder, gpuwatch.Watch() as watch:
        for number, _ in enumerate(watch.steps(Forever(torch.ones(1024)))):
            work.step()
            if number % 25 == 24:
                torch.save(weights, Path(folder) / "last.pt")
            if clock.over:
                break


def hidden_wait(clock: Clock) -> None:
    """Fetches of 15 ms behind steps of 40 ms of a device that runs behind the host."""
    _train(clock, _batches(1, pinned=True, fetch=lambda _: time.sleep(0.015)), 0.04, reads_every=20, asynchronous=True)


def loss_every_fifty(clock: Clock) -> None:
    _train(clock, Forever(torch.ones(1024)), 0.03, reads_every=50)


def memory_that_settles(clock: Clock) -> None:
    """An allocator that takes memory in its first seconds, and then has enough."""
    work, kept = Work(0.03), []
    with gpuwatch.Watch() as watch:
        for _ in watch.steps(Forever(torch.ones(1024))):
            work.step().item()
            if clock.passed_s < 6 and len(kept) < 100:
                kept.append(torch.zeros(40 << 20, device=_CUDA))
            if clock.over:
                break


_SOON = {"memory_creep_s": 14.0, "memory_creep_share": 0.02}

CUDA = (
    Program("128 MiB a batch from pageable memory", pageable, ("transfer_pageable",), cuda=True, seconds=10),
    Program("512 MiB a batch from pinned memory", full_bus, ("transfer_pcie",), cuda=True, seconds=10),
    Program("180 tiny layers", small_kernels, ("host_bound",), cuda=True, seconds=24, hook_sees=False),
    Program("35 ms of logging after the step", logging_after_the_step, ("host_bound",), cuda=True, seconds=10),
    Program("the loss read at every step", loss_at_every_step, ("sync_every_step",), cuda=True, seconds=10, also=("host_bound",)),
    Program("a GPU with work all the time", saturated, ("gpu_saturated",), cuda=True, seconds=24, hook_sees=False),
    Program("losses kept with their graphs", kept_graphs, ("memory_creep",), cuda=True, also=("gpu_saturated",), seconds=26, thresholds=_SOON, hook_sees=False),
    Program("a process that holds its GPU and does nothing", notebook_left_open, ("held_idle",), cuda=True, seconds=14, thresholds={"gpu_idle_s": 6.0}, hook_sees=False),
    Program("30 ms of decoding before each batch", decoding_in_the_process, ("input_single_process",), cuda=True, seconds=10),
    Program("an undeclared evaluation", evaluating_undeclared, ("eval_share",), cuda=True, seconds=12),
    Program("1 GiB saved every 25 steps", saving_often, ("checkpoint_stall",), cuda=True, seconds=14),
    Program("a fetch hidden behind the device", hidden_wait, (), cuda=True, seconds=14, also=("gpu_saturated",)),
    Program("the loss read every 50 steps", loss_every_fifty, (), cuda=True, seconds=14, also=("gpu_saturated",)),
    Program("memory that settles", memory_that_settles, (), cuda=True, seconds=24, thresholds=_SOON, also=("gpu_saturated",)),
)  # fmt: skip
