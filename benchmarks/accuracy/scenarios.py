"""Training loops whose waits are known, on any accelerator.

Each switches the truth's sections itself and is watched as a user's would be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from benchmarks.accuracy.lab import AFTER, BETWEEN, DATA, LAUNCH, OTHER, TRANSFER, Lab

MANY = 1_000_000


class Waits(Dataset[Any]):
    """Items that take time to read: every `every`-th one `slow_s`, the others `item_s`. Pickling takes `pickling_s`."""

    def __init__(
        self, item_s: float, every: int = 0, slow_s: float = 0.0, items: int = MANY, pickling_s: float = 0.0
    ) -> None:
        self.item_s, self.every, self.slow_s, self.items, self.pickling_s = item_s, every, slow_s, items, pickling_s

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.slow_s if self.every and index % self.every == 0 else self.item_s)
        return torch.full((8,), float(index))

    def __getstate__(self) -> dict[str, Any]:
        time.sleep(self.pickling_s)
        return self.__dict__


def loader(item_s: float, every: int = 0, slow_s: float = 0.0, items: int = MANY, **options: Any) -> Any:
    return DataLoader(Waits(item_s, every, slow_s, items), batch_size=1, **options)


def constant_wait(lab: Lab) -> None:
    for _ in lab.loop(loader(0.020)):
        lab.train(0.010)
        if lab.over():
            break


def hidden_wait(lab: Lab) -> None:
    for number, _ in enumerate(lab.loop(loader(0.008))):
        lab.train(0.010)
        if number % 20 == 19:
            lab.read()
        if lab.over():
            break


def partly_hidden_wait(lab: Lab) -> None:
    for _ in lab.loop(loader(0.025)):
        lab.train(0.015, host_s=0.003)
        if lab.over():
            break


def hidden_without_optimizer(lab: Lab) -> None:
    for _ in lab.loop(loader(0.015)):
        lab.train(0.010, optimizer=False)
        if lab.over():
            break


def bursts(lab: Lab) -> None:
    for _ in lab.loop(loader(0.001, every=4, slow_s=0.060)):
        lab.train(0.010)
        if lab.over():
            break


def bursts_of_workers(lab: Lab) -> None:
    for _ in lab.loop(loader(0.050, num_workers=2)):
        lab.train(0.010, host_s=0.005)
        if lab.over():
            break


def slow_first_batch(lab: Lab) -> None:
    while not lab.time_is_up:
        for _ in lab.loop(loader(0.001, every=20, slow_s=0.200, items=20)):
            lab.train(0.010, host_s=0.005)
        lab.truth.now(OTHER)


def declared_evaluation(lab: Lab) -> None:
    for number, _ in enumerate(lab.loop(loader(0.004))):
        lab.train(0.008)
        if number % 10 == 9:
            with lab.truth.during("eval"), lab.watch.phase("eval"):
                for _ in lab.watch.steps(loader(0.020, items=5)):
                    lab.device.launch(0.002, "eval")
        if lab.over():
            break


def undeclared_evaluation(lab: Lab) -> None:
    for number, _ in enumerate(lab.loop(loader(0.004))):
        lab.train(0.008)
        if number % 10 == 9:
            with lab.truth.during("eval"), torch.no_grad():
                for _ in lab.watch.steps(loader(0.020, items=5)):
                    lab.device.launch(0.002, "eval")
        if lab.over():
            break


def host_work_in_the_loop(lab: Lab) -> None:
    for _ in lab.loop(loader(0.001)):
        lab.train(0.007, host_s=0.007, after_s=0.030)
        if lab.over():
            break


def host_work_between_steps(lab: Lab) -> None:
    while True:
        with lab.watch.step():
            lab.train(0.007, host_s=0.007)
            lab.truth.now(BETWEEN)
        if lab.over():
            break
        time.sleep(0.030)


def spawned_workers(lab: Lab) -> None:
    dataset = Waits(0.001, pickling_s=0.3)
    spawned: Any = DataLoader(dataset, batch_size=1, num_workers=2, multiprocessing_context="spawn")
    for number, _ in enumerate(lab.loop(spawned)):
        lab.train(0.010, host_s=0.005)
        if number > 40 and lab.over():
            break


def pageable_copies(lab: Lab) -> None:
    with lab.device.copies(0.004):
        for batch in lab.loop(loader(0.003)):
            lab.copy(batch, blocking=True)
            lab.train(0.010)
            if lab.over():
                break


def pinned_copies(lab: Lab) -> None:
    with lab.device.copies(0.004):
        for number, batch in enumerate(lab.loop(loader(0.012, pin_memory=True))):
            lab.copy(batch, blocking=False)
            lab.train(0.010)
            if number % 50 == 49:
                lab.read()
            if lab.over():
                break


class CopiedAside:
    """Copies each batch on a stream of its own while the device computes: a prefetcher inside the watched loader."""

    def __init__(self, batches: Any, target: str) -> None:
        self._batches, self._target = batches, target

    def __iter__(self) -> Iterator[Any]:
        device = torch.get_device_module(self._target)
        stream = device.Stream()
        for batch in self._batches:
            with device.stream(stream):
                moved = batch.pin_memory().to(self._target, non_blocking=True)
            device.current_stream().wait_stream(stream)
            yield moved


def pinned_copies_aside(lab: Lab) -> None:
    with lab.device.copies(0.002):
        for number, _ in enumerate(lab.loop(CopiedAside(loader(0.006), lab.device.target))):
            lab.train(0.010)
            if number % 50 == 49:
                lab.read()
            if lab.over():
                break


def prefetched(lab: Lab, batches: Any) -> Iterator[Any]:
    """Yield batches copied one step earlier, on a stream of their own: a prefetcher around the watched loader."""
    device = torch.get_device_module(lab.device.target)
    stream, ready = device.Stream(), None
    for batch in batches:
        lab.truth.now(LAUNCH)
        device.current_stream().wait_stream(stream)
        pinned = batch.pin_memory()
        with device.stream(stream):
            copied = lab.copy(pinned, blocking=False)
        if ready is not None:
            yield ready
        ready = copied


def prefetched_aside(lab: Lab) -> None:
    with lab.device.copies(0.012):
        for number, _ in enumerate(prefetched(lab, lab.loop(loader(0.004)))):
            lab.train(0.008)
            if number % 10 == 9:
                lab.read()
            if lab.over():
                break


def copies_by_the_watch(lab: Lab) -> None:
    with lab.device.copies(0.004):
        for _ in lab.loop(CopiedByWatch(lab), to=lab.device.target):
            lab.train(0.010)
            if lab.over():
                break


class CopiedByWatch:
    """Hands out batches that are copied next, and notes that in the truth."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __iter__(self) -> Iterator[Any]:
        batch = torch.zeros(8)
        while True:
            time.sleep(0.003)
            self._lab.truth.now(TRANSFER)
            yield batch


def item_every_step(lab: Lab) -> None:
    with lab.device.copies(0.002):
        for batch in lab.loop(loader(0.005)):
            lab.copy(batch, blocking=True)
            lab.device.launch(0.012)
            lab.optimizer.step()
            lab.read()
            if lab.over():
                break


def averaged_weights(lab: Lab) -> None:
    """A moving average of the weights is launched after the optimizer has stepped."""
    average = lab.parameter.detach().clone()
    for number, _ in enumerate(lab.loop(loader(0.012))):
        lab.truth.now(LAUNCH)
        lab.device.launch(0.006)
        lab.optimizer.step()
        lab.device.launch(0.004)
        average.lerp_(lab.parameter.detach(), 0.01)
        lab.truth.now(DATA)
        if number % 50 == 49:
            lab.read()
        if lab.over():
            break


def metrics_after_the_step(lab: Lab) -> None:
    for _ in lab.loop(loader(0.004)):
        lab.truth.now(LAUNCH)
        lab.device.launch(0.006)
        lab.optimizer.step()
        lab.device.launch(0.008)
        lab.parameter.detach().sum().item()
        lab.truth.now(AFTER)
        time.sleep(0.002)
        lab.truth.now(DATA)
        if lab.over():
            break


def two_optimizers(lab: Lab) -> None:
    second = torch.optim.AdamW([lab.parameter], lr=0.1)
    for _ in lab.loop(loader(0.016)):
        lab.truth.now(LAUNCH)
        lab.device.launch(0.005)
        lab.optimizer.step()
        time.sleep(0.002)
        lab.device.launch(0.005)
        second.step()
        lab.truth.now(DATA)
        if lab.over():
            break


def late_labels(lab: Lab) -> None:
    """The labels are copied after the step, for a metric that is computed then."""
    labels = torch.zeros(8)
    with lab.device.copies(0.003):
        for batch in lab.loop(loader(0.006)):
            lab.copy(batch, blocking=True)
            lab.device.launch(0.008)
            lab.optimizer.step()
            lab.copy(labels, blocking=True)
            lab.device.launch(0.004)
            lab.truth.now(DATA)
            if lab.over():
                break


def prefetch_by_hand(lab: Lab) -> None:
    """The batch in hand is copied at the end of the step, and worked on in the next one."""
    with lab.device.copies(0.004):
        for batch in lab.loop(loader(0.014, pin_memory=True)):
            lab.truth.now(LAUNCH)
            lab.device.launch(0.006)
            lab.optimizer.step()
            lab.copy(batch, blocking=False)
            lab.truth.now(DATA)
            if lab.over():
                break


def steps_by_hand(lab: Lab) -> None:
    with lab.device.copies(0.002):
        while True:
            with lab.watch.step():
                lab.truth.now(DATA)
                with lab.watch.data():
                    time.sleep(0.012)
                with lab.watch.transfer():
                    lab.copy(torch.zeros(8), blocking=True)
                lab.device.launch(0.008)
                lab.optimizer.step()
                lab.truth.now(BETWEEN)
            if lab.over():
                break


class Launches(torch.nn.Module):
    """A model whose forward pass launches 8 ms of work."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab

    def forward(self, batch: Any) -> Any:
        self.lab.device.launch(0.008)
        return batch


def no_loader(lab: Lab) -> None:
    """Nothing is watched: steps are bounded by the optimizer, as `gpuwatch run` has it."""
    model = Launches(lab)
    bounds = lab.watch.session.torch_hooks.optimizer
    hook = register_optimizer_step_post_hook(lambda of, *_: None if bounds.is_installed else bounds.stepped(of))
    lab.truth.now(OTHER)
    lab.optimizer.step()
    with lab.device.copies(0.002):
        while True:
            lab.truth.now(DATA)
            time.sleep(0.012)
            model(lab.copy(torch.zeros(8), blocking=True))
            lab.parameter.detach()[0].item()  # the loss, which the device is waited for
            lab.optimizer.step()
            if lab.over():
                break
    hook.remove()


def optimizer_in_backward(lab: Lab) -> None:
    """Each weight has an optimizer of its own that steps as soon as its gradient is there, in autograd's thread."""
    weights = [torch.nn.Parameter(torch.ones(4, 4, device=lab.device.target)) for _ in range(3)]
    optimizers = {weight: torch.optim.SGD([weight], lr=1e-3) for weight in weights}

    def update(weight: Any) -> None:
        lab.device.launch(0.003)
        optimizers[weight].step()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(update)
    for _ in lab.loop(loader(0.006)):
        lab.truth.now(LAUNCH)
        torch.linalg.multi_dot(weights).sum().backward()
        lab.truth.now(AFTER)
        time.sleep(0.012)
        lab.truth.now(DATA)
        if lab.over():
            break


def real_network(lab: Lab) -> None:
    """Nothing is simulated but time: each operation of a real forward and backward pass and AdamW takes 0.1 ms."""
    layers = torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    model = torch.nn.Sequential(*layers).to(lab.device.target)
    scaler = torch.amp.GradScaler(lab.device.target)
    optimizer = torch.optim.AdamW(model.parameters())

    def forward_and_backward(batch: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()

    def update() -> None:
        scaler.step(optimizer)  # reads back whether a gradient is infinite
        scaler.update()

    with lab.device.copies(0.001):
        for batch in lab.loop(loader(0.008)):
            batch = lab.copy(batch, blocking=True)
            lab.device.work(lambda batch=batch: forward_and_backward(batch), 1e-4)
            lab.device.work(update, 1e-4)
            lab.truth.now(DATA)
            if lab.over():
                break


def accumulation(lab: Lab) -> None:
    for number, _ in enumerate(lab.loop(loader(0.012))):
        lab.train(0.008, optimizer=number % 4 == 3)
        if lab.over():
            break


def early_break(lab: Lab) -> None:
    while not lab.time_is_up:
        for number, _ in enumerate(lab.loop(loader(0.010))):
            lab.train(0.010, host_s=0.006)
            if number == 7:
                lab.truth.now(OTHER)
                break
        time.sleep(0.050)


def nested_loops(lab: Lab) -> None:
    for _ in lab.loop(loader(0.010)):
        lab.truth.now(DATA)
        for _ in lab.watch.steps(loader(0.004, items=3)):
            lab.train(0.006, host_s=0.006)
        lab.train(0.005, host_s=0.005)
        if lab.over():
            break


def mixture(lab: Lab) -> None:
    time.sleep(0.3)
    while not lab.time_is_up:
        for _ in lab.loop(loader(0.008, items=10)):
            lab.train(0.010, host_s=0.010)
        with lab.truth.during("checkpoint"), lab.watch.phase("checkpoint"):
            time.sleep(0.060)
        with lab.truth.during(OTHER), lab.watch.phase("logging"):
            time.sleep(0.040)
        lab.truth.now(OTHER)
        time.sleep(0.030)


@dataclass(frozen=True)
class Scenario:
    name: str
    injected: str
    """In words, for people."""
    run: Callable[[Lab], None]


SCENARIOS = (
    Scenario("constant wait", "20 ms a batch, 10 ms of work", constant_wait),
    Scenario("hidden wait", "8 ms a batch behind 10 ms of work", hidden_wait),
    Scenario("partly hidden wait", "25 ms a batch, 15 ms of work launched over 3 ms", partly_hidden_wait),
    Scenario("no optimizer seen", "15 ms a batch, 10 ms of work, no optimizer", hidden_without_optimizer),
    Scenario("burst every 4th", "60 ms every 4th batch, else 1 ms; 10 ms of work", bursts),
    Scenario("bursts of 2 workers", "50 ms a batch in each of 2 workers, 10 ms of work", bursts_of_workers),
    Scenario("slow first batch", "200 ms at the start of each 20 batches, else 1 ms", slow_first_batch),
    Scenario("evaluation, declared", "5 × 20 ms of a slow loader every 10 steps", declared_evaluation),
    Scenario("evaluation, undeclared", "the same under no_grad, undeclared", undeclared_evaluation),
    Scenario("host work in the loop", "30 ms of Python after each step of 7 ms", host_work_in_the_loop),
    Scenario("host work between steps", "30 ms between `with w.step()` of 7 ms", host_work_between_steps),
    Scenario("spawned workers", "0.3 s of pickling for each of 2 workers, and their start", spawned_workers),
    Scenario("pageable copies", "4 ms a copy, blocking, behind 10 ms of work", pageable_copies),
    Scenario("pinned copies", "4 ms a copy, not blocking, on the same stream", pinned_copies),
    Scenario("pinned copies, overlapped", "2 ms on a side stream while the device computes", pinned_copies_aside),
    Scenario(
        "side-stream prefetcher", "12 ms a copy on a side stream, one batch ahead of 8 ms of work", prefetched_aside
    ),
    Scenario("copies by `to=`", "4 ms a copy, made by gpuwatch itself", copies_by_the_watch),
    Scenario("`.item()` every step", "12 ms of work waited for each step; 2 ms a copy", item_every_step),
    Scenario("weights averaged", "4 ms of work after the optimizer's 6 ms, 12 ms a batch", averaged_weights),
    Scenario(
        "metrics after the step", "8 ms of metrics and `.item()` after the optimizer's 6 ms", metrics_after_the_step
    ),
    Scenario("two optimizers", "5 ms of work for each of two, 2 ms of Python in between", two_optimizers),
    Scenario("late labels", "3 ms a copy after the optimizer's step, then 4 ms of metrics", late_labels),
    Scenario("prefetch by hand", "4 ms a copy after the optimizer's step, for the next step", prefetch_by_hand),
    Scenario("steps by hand", "`with w.step()`: 12 ms of data, 2 ms a copy, 8 ms of work", steps_by_hand),
    Scenario("no loader", "under `gpuwatch run`: 12 ms of Python, 2 ms a copy, 8 ms of work", no_loader),
    Scenario(
        "optimizer in backward",
        "three optimizers of 3 ms step in autograd's thread, 12 ms of Python",
        optimizer_in_backward,
    ),
    Scenario(
        "real network",
        "forward, backward, GradScaler and AdamW, 0.1 ms an operation; 8 ms a batch, 1 ms a copy",
        real_network,
    ),
    Scenario("gradient accumulation", "12 ms a batch, 8 ms of work, optimizer every 4th", accumulation),
    Scenario("early break", "break after 8 of many batches, 50 ms of other work", early_break),
    Scenario("two nested loops", "3 inner steps of 4 + 6 ms in each outer step of 10 + 5 ms", nested_loops),
    Scenario("checkpoint and other", "start-up, checkpoints, a phase of another name, pauses", mixture),
)


def named(name: str) -> Scenario:
    """Return a scenario by its name. Raises: KeyError."""
    return {scenario.name: scenario for scenario in SCENARIOS}[name]
