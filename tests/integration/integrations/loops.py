"""The same training in each framework's manner. Every function trains on `truth` and reports to `watch`.

A framework that `gpuwatch run` instruments does without, for None: then script.py runs its loop.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gpuwatch
from tests.integration.integrations import workload as w

Loop = Callable[[w.Truth, Any, Path], None]


def _update(optimizer: Any, model: Any, batch: Any, backward: Any = None) -> None:
    optimizer.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward() if backward is None else backward(loss)
    optimizer.step()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def _evaluate(model: torch.nn.Module, loader: Any) -> None:
    model.eval()
    with torch.no_grad():
        for batch in loader:
            model(**batch)
    model.train()


def plain(truth: w.Truth, watch: gpuwatch.Watch, directory: Path) -> None:
    model, loader = w.Model(truth), w.train_loader(truth)
    optimizer = _optimizer(model)
    for _ in range(w.EPOCHS):
        for batch in gpuwatch.watch(loader):
            _update(optimizer, model, batch)
        with watch.phase("eval"):
            _evaluate(model, w.eval_loader(truth))
        with watch.phase("checkpoint"):
            torch.save(model.state_dict(), directory / "model.pt")


def steps(truth: w.Truth, watch: gpuwatch.Watch, directory: Path) -> None:
    model, loader = w.Model(truth), w.train_loader(truth)
    optimizer = _optimizer(model)
    for _ in range(w.EPOCHS):
        batches = iter(loader)
        for _ in range(w.BATCHES):
            with watch.step(samples=w.BATCH_SIZE):
                with watch.data():
                    batch = next(batches)
                _update(optimizer, model, batch)
        with watch.phase("eval"):
            _evaluate(model, w.eval_loader(truth))
        with watch.phase("checkpoint"):
            torch.save(model.state_dict(), directory / "model.pt")


def lightning(truth: w.Truth, watch: gpuwatch.Watch | None, directory: Path) -> None:
    callbacks = [] if watch is None else [_lightning_callback(watch)]
    fit_lightning(truth, directory, callbacks, limit_val_batches=w.EVAL_BATCHES)


def _lightning_callback(watch: gpuwatch.Watch) -> Any:
    w.require("lightning")
    from gpuwatch.integrations.lightning import GpuWatchCallback

    return GpuWatchCallback(watch)


def fit_lightning(
    truth: w.Truth,
    directory: Path,
    callbacks: list[Any],
    loader: Any = None,
    package: str = "lightning.pytorch",
    resume: Path | None = None,
    update: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Any:
    """Fit, and return the trainer. `update` is called in each training step."""
    pl = w.require(package)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=directory, save_top_k=-1, every_n_epochs=1)

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = w.Model(truth)

        def training_step(self, batch: Any, index: int) -> Any:
            update(index)
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> Any:
            return _optimizer(self)

    settings: dict[str, Any] = {
        "max_epochs": w.EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **options,
    }
    trainer = pl.Trainer(callbacks=[*callbacks, checkpoint], **settings)
    trainer.fit(Module(), w.train_loader(truth) if loader is None else loader, w.eval_loader(truth), ckpt_path=resume)
    return trainer


def transformers(truth: w.Truth, watch: gpuwatch.Watch | None, directory: Path) -> None:
    w.require("transformers")
    callbacks = []
    if watch is not None:
        from gpuwatch.integrations.transformers import GpuWatchCallback

        callbacks.append(GpuWatchCallback(watch))
    hf_trainer(truth, directory, callbacks).train()


def hf_trainer(truth: w.Truth, directory: Path, callbacks: list[Any], model: Any = None, **options: Any) -> Any:
    """Return a Trainer that evaluates and saves after each epoch."""
    hf = w.require("transformers")
    settings: dict[str, Any] = {
        "num_train_epochs": w.EPOCHS,
        "per_device_train_batch_size": w.BATCH_SIZE,
        "per_device_eval_batch_size": w.BATCH_SIZE,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "learning_rate": 1e-6,
        "dataloader_pin_memory": False,
        **options,
    }
    return hf.Trainer(
        model=model or w.Model(truth),
        args=hf.TrainingArguments(output_dir=str(directory), **settings),
        train_dataset=w.train_loader(truth).dataset,
        eval_dataset=w.eval_loader(truth).dataset,
        callbacks=callbacks,
    )


def accelerate(truth: w.Truth, watch: gpuwatch.Watch, directory: Path) -> None:
    accelerator = w.require("accelerate").Accelerator(cpu=True)
    from gpuwatch.integrations import accelerate as integration

    model, loader = w.Model(truth), w.train_loader(truth)
    model, optimizer, loader = accelerator.prepare(model, _optimizer(model), loader)
    watched = integration.watch(loader)
    for _ in range(w.EPOCHS):
        for batch in watched:
            _update(optimizer, model, batch, accelerator.backward)
        with watch.phase("eval"):
            _evaluate(model, accelerator.prepare(w.eval_loader(truth)))
        with watch.phase("checkpoint"):
            accelerator.save_state(str(directory))


def ignite(truth: w.Truth, watch: gpuwatch.Watch | None, directory: Path) -> None:
    w.require("ignite")
    trainer = ignite_trainer(truth, directory)
    if watch is not None:
        from gpuwatch.integrations.ignite import GpuWatchHandler

        GpuWatchHandler(watch).attach(trainer)
    trainer.run(w.train_loader(truth), max_epochs=w.EPOCHS)


def ignite_trainer(truth: w.Truth, directory: Path) -> Any:
    """Return an engine that evaluates and saves after each epoch."""
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    model = w.Model(truth)
    optimizer = _optimizer(model)
    trainer = Engine(lambda engine, batch: _update(optimizer, model, batch))

    def infer(engine: Any, batch: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(**batch)
        model.train()

    evaluator = Engine(infer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(w.eval_loader(truth)))
    saver = Checkpoint({"model": model}, DiskSaver(str(directory), require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    return trainer


LOOPS: dict[str, Loop] = {
    "gpuwatch.watch": plain,
    "Watch.step": steps,
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
    "ignite": ignite,
}
