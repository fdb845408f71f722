"""The same trainings under frameworks, whose own events are the clock."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from . import Clock, program, workers
from .loaders import Items, cheap, conv_net, jpeg, made, mlp

QUIET = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "enable_model_summary": False}


def trainer_callback(clock: Clock) -> Any:
    """Return a callback of transformers by which the clock follows a training, and ends it."""
    from transformers import TrainerCallback

    class Clocked(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = clock.got()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.done()
            control.should_training_stop = clock.over

    return Clocked()


def _hf(clock: Clock, make: Any, net: nn.Module, batch: int) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    def item(i: int) -> Any:
        x, y = make(i)
        return {"x": x, "labels": y}

    used = workers(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=100_000,
            per_device_train_batch_size=batch,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_num_workers=used,
            dataloader_persistent_workers=used > 0,
            use_cpu=True,
        )
        Trainer(Model(), arguments, train_dataset=Items(item), callbacks=[trainer_callback(clock)]).train()


@program("input_single_process")
def hf_trainer(clock: Clock) -> None:
    """Items that are decoded in the training process."""
    _hf(clock, jpeg, conv_net(), 16)


@program("input_single_process", threads=2)
def hf_tiny_steps(clock: Clock) -> None:
    """Steps of some milliseconds, for which a worker costs more than it saves."""
    _hf(clock, cheap, mlp(), 16)


def _accelerate(clock: Clock, loader: Any, net: nn.Module) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), loader)
    clock.begin()
    for x, y in loader:
        if clock.got():
            return
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(net(x), y))
        optimizer.step()
        clock.done()


@program("input_single_process")
def accelerate_loop(clock: Clock) -> None:
    """Accelerate's own loop."""
    _accelerate(clock, made(jpeg), conv_net())


@program("input_single_process")
def accelerate_tiny_steps(clock: Clock) -> None:
    """The same with items that are nearly free."""
    _accelerate(clock, made(cheap, 64), mlp())


def lightning_module(clock: Clock) -> Any:
    """Return a class of a training that the clock follows."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()

        def on_train_start(self) -> None:
            clock.begin()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            clock.got()

        def on_train_batch_end(self, *_: Any) -> None:
            clock.done()
            self.trainer.should_stop = clock.over

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Module


@program("input_single_process", seconds=10)
def lightning(clock: Clock) -> None:
    """Lightning's Trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    from lightning.pytorch import Trainer

    Trainer(accelerator="cpu", max_epochs=1, **QUIET).fit(lightning_module(clock)(), made(jpeg))  # type: ignore[arg-type]


@program("input_single_process")
def ignite(clock: Clock) -> None:
    """Ignite's Engine."""
    from ignite.engine import Engine, Events

    net = conv_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def update(engine: Engine, batch: Any) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    def end(engine: Engine) -> None:
        clock.done()
        if clock.over:
            engine.terminate()

    engine = Engine(update)
    engine.add_event_handler(Events.STARTED, clock.begin)
    engine.add_event_handler(Events.GET_BATCH_COMPLETED, lambda: clock.got() and None)
    engine.add_event_handler(Events.ITERATION_COMPLETED, end)
    engine.run(made(jpeg), max_epochs=1)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_ = DataLoader
