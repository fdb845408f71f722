"""Lightning: `Trainer(callbacks=[GpuWatchCallback()])`, of `lightning.pytorch` or of `pytorch_lightning`.

A step is one batch. Validation, the sanity check included, is `eval`; `trainer.save_checkpoint`, which ModelCheckpoint
calls, is `checkpoint`; the strategy's `batch_to_device` is `transfer`.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gpuwatch.hook.torch.patches import say_once
from gpuwatch.integrations import MissingFramework
from gpuwatch.integrations.training import FrameworkCallback, Training, open_watch_for_the_process

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _base() -> Any:
    """Return the Callback class of the package that is in use, else of one that is installed."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(name).Callback
    raise MissingFramework("lightning", "lightning")


class GpuWatchCallback(FrameworkCallback, _base()):  # type: ignore[misc]
    """Measures `trainer.fit`. `watch`: an open one, else one is made of the options, as in `gpuwatch.Watch`."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin, in the process that trains (a spawned one too)."""
        if stage == "fit" and self._training is None:
            self._training = training = Training(self._watch, **self._options)
            _follow(training, trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._training is not None:
            self._training.watch_model(trainer.model)
            self._training.count_from(lambda: trainer.fit_loop.total_batch_idx + 1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._note(lambda training: training.fetched([batch]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(Training.end_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._end()

    def _end(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.close()


def unchanged(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Give the trainer the callback. `gpuwatch run` calls this instead of `Trainer.fit`."""
    if not any(isinstance(each, GpuWatchCallback) for each in trainer.callbacks):
        trainer.callbacks.append(GpuWatchCallback())
    open_watch_for_the_process()
    return original(trainer, *args, **kwargs)


def _follow(training: Training, trainer: Any) -> None:
    """Measure what the trainer does inside: its fetches where they happen, its copies, validations and checkpoints.

    Methods of classes are replaced: a loader's spawned workers may get the trainer, with a data module's `collate_fn`.
    """
    training.patches.wrap(type(trainer.strategy), "batch_to_device", training.copy)
    training.wrap_phase(type(trainer), "save_checkpoint", "checkpoint")
    training.wrap_phase(type(trainer.strategy), "load_checkpoint", "checkpoint_load")
    loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
    training.wrap_phase(type(getattr(loop, "val_loop", None)), "run", "eval")
    _follow_fetcher(training, trainer)


def _follow_fetcher(training: Training, trainer: Any) -> None:
    """Time the trainer's data fetchers, which may be a batch ahead. Private to Lightning, unchanged from 2.0 to 2.6."""
    package = "pytorch_lightning" if type(trainer).__module__.startswith("pytorch_lightning") else "lightning.pytorch"
    fetcher = getattr(sys.modules.get(f"{package}.loops.fetchers"), "_DataFetcher", None)
    if fetcher is None:
        say_once(f"{package} has no _DataFetcher: waits for data are counted as other, and steps are not counted")
        return

    training.patches.wrap(fetcher, "__next__", training.fetch)
    training.patches.wrap(fetcher, "__iter__", training.wait)
