"""Trainings on a GPU: on a fake device with a timeline of its own, whose driver's readings the agent sees."""

from __future__ import annotations

import time
from dataclasses import replace

import pynvml
from torch.utils.data import DataLoader

import gpuwatch

from .gpu import Gpu
from .input_programs import Items
from .program import Clock, Program

_PAGEABLE_BYTES_PER_S, _PCIE_BYTES_PER_S = 3e9, 14e9


def _batches(mib: int = 0, *, pinned: bool = False, fetch_s: float = 0.0) -> DataLoader:  # type: ignore[type-arg]
    """Return batches of so many MiB that are there already (or take a fetch to wait for)."""
    shape = (mib << 18,) if mib else (3, 32, 32)
    items = Items(lambda _: time.sleep(fetch_s) if fetch_s else None, shape=shape)
    return DataLoader(items, batch_size=None, pin_memory=pinned)


def _train(clock: Clock, gpu: Gpu, loader: DataLoader, *, copy_s: float = 0.0, compute_s: float, bubbles: int = 0, host_s: float = 0.0, reads_every: int = 0) -> None:  # type: ignore[type-arg]  # fmt: skip
    """Train on the device.

    Args:
        copy_s: Of each batch, for which the host waits.
        compute_s: Of the device, in one launch, or in `bubbles` launches with 2 ms of Python before each.
        host_s: Of Python after the last launch.
        reads_every: Steps between two readings of the loss; 0: none.
    """
    with gpu.measures(gpuwatch.Watch()) as watch:
        for number, _ in enumerate(watch.steps(loader)):
            if copy_s:
                with watch.transfer():
                    gpu.device.launch(copy_s)
                    gpu.device.synchronize()
            for _launch in range(bubbles - 1):
                time.sleep(0.002)
                gpu.device.launch(compute_s / bubbles)
            if bubbles:
                time.sleep(0.002)
            gpu.compute(compute_s / max(1, bubbles))
            if reads_every and number % reads_every == 0:
                gpu.read_back()
            time.sleep(host_s)
            while gpu.device.busy_ns - gpu.device.done_ns > 60e6:  # a driver's queue of launches is not endless either
                time.sleep(0.002)
            if clock.over:
                break


def pageable(clock: Clock) -> None:
    loader = _batches(32)
    _train(clock, Gpu(), loader, copy_s=(32 << 20) / _PAGEABLE_BYTES_PER_S, compute_s=0.02, reads_every=20)


def full_bus(clock: Clock) -> None:
    loader = _batches(192, pinned=True)
    _train(clock, Gpu(), loader, copy_s=(192 << 20) / _PCIE_BYTES_PER_S, compute_s=0.02, reads_every=20)


def small_kernels(clock: Clock) -> None:
    """Twelve launches of 0.2 ms, each after 2 ms of Python, and 1 ms of it at the end."""
    _train(clock, Gpu(), _batches(), compute_s=0.0024, bubbles=12, host_s=0.001)


def logging_after_the_step(clock: Clock) -> None:
    _train(clock, Gpu(), _batches(), compute_s=0.02, host_s=0.035)


def loss_at_every_step(clock: Clock) -> None:
    _train(clock, Gpu(), _batches(), compute_s=0.03, reads_every=1, host_s=0.012)


def saturated(clock: Clock) -> None:
    _train(clock, Gpu(), _batches(), compute_s=0.04)


def hot(clock: Clock) -> None:
    gpu = Gpu()
    gpu.base = replace(gpu.base, event_reasons=pynvml.nvmlClocksEventReasonSwThermalSlowdown, temperature_celsius=88)
    _train(clock, gpu, _batches(), compute_s=0.04)


def kept_graphs(clock: Clock) -> None:
    """The losses of all steps are kept with their graphs: 40 MB a step."""
    gpu = Gpu()
    kept: list[int] = []
    with gpu.measures(gpuwatch.Watch()) as watch:
        for _ in watch.steps(_batches()):
            gpu.compute(0.04)
            time.sleep(0.02)
            kept.append(40_000_000)
            gpu.base = replace(gpu.base, memory_used_bytes=(20 << 30) + sum(kept))
            if clock.over:
                break


def lost_rank(clock: Clock) -> None:
    """After 36 s an all-reduce waits for a rank that does not come: its kernel spins."""
    gpu = Gpu()
    with gpu.measures(gpuwatch.Watch()) as watch:
        for _ in watch.steps(_batches()):
            gpu.compute(0.04)
            time.sleep(0.04)
            if clock.passed_s > 36:
                gpu.spins = True
                time.sleep(max(0.0, clock.seconds - clock.passed_s))
                break


def notebook_left_open(clock: Clock) -> None:
    """A process that has ended its work and keeps the GPU."""
    Gpu()
    time.sleep(clock.seconds)


def hidden_wait(clock: Clock) -> None:
    """Fetches of 15 ms behind steps of 40 ms of a device that runs behind the host."""
    _train(clock, Gpu(), _batches(fetch_s=0.015), compute_s=0.04)


def loss_every_fifty(clock: Clock) -> None:
    _train(clock, Gpu(), _batches(), compute_s=0.03, reads_every=50)


def memory_that_settles(clock: Clock) -> None:
    """An allocator that takes memory in its first seconds, and then has enough."""
    gpu = Gpu()
    with gpu.measures(gpuwatch.Watch()) as watch:
        for _ in watch.steps(_batches()):
            gpu.compute(0.03)
            time.sleep(0.02)
            gpu.base = replace(gpu.base, memory_used_bytes=(10 << 30) + int(min(clock.passed_s, 6.0) * (2 << 30)))
            if clock.over:
                break


_SOON = {"memory_creep_s": 14.0, "memory_creep_share": 0.02}

GPU = (
    Program("32 MiB a batch from pageable memory", pageable, ("transfer_pageable",), gpu=True),
    Program("192 MiB a batch from pinned memory", full_bus, ("transfer_pcie",), gpu=True),
    Program("many small launches", small_kernels, ("host_bound",), gpu=True, seconds=32, hook_sees=False),
    Program("35 ms of logging after the step", logging_after_the_step, ("host_bound",), gpu=True),
    Program("the loss read at every step", loss_at_every_step, ("sync_every_step",), gpu=True, also=("host_bound",)),
    Program("a GPU with work all the time", saturated, ("gpu_saturated",), gpu=True, seconds=40, hook_sees=False),
    Program("a GPU that is too hot", hot, ("throttled",), gpu=True, also=("gpu_saturated",), seconds=32, hook_sees=False),
    Program("losses kept with their graphs", kept_graphs, ("memory_creep",), gpu=True, seconds=40, thresholds=_SOON, hook_sees=False),
    Program("an all-reduce that waits for a lost rank", lost_rank, ("hung",), gpu=True, seconds=85, also=("stalled",), hook_sees=False),
    Program("a process that holds its GPU and does nothing", notebook_left_open, ("held_idle",), gpu=True, seconds=25, thresholds={"gpu_idle_s": 8.0}, hook_sees=False),
)  # fmt: skip
HEALTHY_GPU = (
    Program("a fetch hidden behind the device", hidden_wait, (), gpu=True, seconds=32, also=("gpu_saturated",)),
    Program("the loss read every 50 steps", loss_every_fifty, (), gpu=True, seconds=32, also=("gpu_saturated",)),
    Program("memory that settles", memory_that_settles, (), gpu=True, seconds=40, thresholds=_SOON),
)
