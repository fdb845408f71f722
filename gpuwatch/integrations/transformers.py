"""Hugging Face Trainer: `Trainer(..., callbacks=[GpuWatchCallback()])`.

A step is an optimizer step: the Trainer fetches its micro-batches together, before `on_step_begin`. `evaluate` and `predict` are `eval`,
`save_model` and the trainer's checkpoints are `checkpoint`, copies to the device are `transfer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpuwatch.hook.torch.patches import Patches, say_once
from gpuwatch.hook.watch import Watch
from gpuwatch.integrations import MissingFramework
from gpuwatch.integrations.training import Training, checked

try:
    _transformers: Any = import_module("transformers")
    _Trainer: Any = _transformers.Trainer
except ImportError as error:
    raise MissingFramework("transformers", "transformers[torch]") from error

if TYPE_CHECKING:
    _TrainerCallback = object
else:
    _TrainerCallback = _transformers.TrainerCallback

_callbacks: weakref.WeakSet[GpuWatchCallback] = weakref.WeakSet()
_patches: list[Patches] = []


class GpuWatchCallback(_TrainerCallback):
    """Tells a `Watch` what `trainer.train` does. `watch`: an open one, else one is made of the options, as in `gpuwatch.Watch`.

    A callback is told neither the trainer nor of an exception, so `Trainer.train` is replaced while there is such a callback; another
    trainer's passes through.
    """

    def __init__(self, watch: Watch | None = None, **options: Any) -> None:
        self._watch = watch
        self._options = checked(options)
        self._training: Training | None = None
        self._trainer: Any = None
        _callbacks.add(self)
        weakref.finalize(self, _restore_when_unused)
        if not _patches:
            _patches.append(Patches())
            _patches[0].wrap(_Trainer, "train", _train)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is None:
            say_once("this trainer's train() is not transformers.Trainer's: nothing is measured")
        else:
            self._training.watch_model(self._trainer.model_wrapped)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.fetched([])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.end_step()


def _train(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Train, watched if the trainer has the callback."""
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
    callback = next((each for each in callbacks if isinstance(each, GpuWatchCallback)), None)
    if callback is None or callback._training is not None:
        return original(trainer, *args, **kwargs)
    with Training(callback._watch, **callback._options) as training:
        callback._training, callback._trainer = training, trainer
        try:
            _follow(training, trainer)
            return original(trainer, *args, **kwargs)
        finally:
            callback._training = callback._trainer = None


def _follow(training: Training, trainer: Any) -> None:
    """Watch one trainer from inside. `get_batch_samples` came with transformers 4.46, the others are older."""

    def fetch_step(original: Any, iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        found = original(_Fetched(training, iterator), *args, **kwargs)
        try:
            training.fetched(found[0])
        except (TypeError, IndexError):
            say_once("get_batch_samples() returns no list of batches: samples are not counted")
        return found

    def evaluate(original: Any, *args: Any, **kwargs: Any) -> Any:
        return training.in_phase("eval", original, *args, **kwargs)

    def save(original: Any, *args: Any, **kwargs: Any) -> Any:
        return training.in_phase("checkpoint", original, *args, **kwargs)

    patches = training.patches
    patches.wrap(trainer, "get_batch_samples", fetch_step)
    patches.wrap(trainer, "_prepare_inputs", training.copy)
    patches.wrap(trainer, "evaluate", evaluate)
    patches.wrap(trainer, "predict", evaluate)
    patches.wrap(trainer, "_save_checkpoint", save)
    patches.wrap(trainer, "save_model", save)
    try:
        from gpuwatch.integrations.accelerate import time_copies

        time_copies(patches, lambda: training.watch if training.is_input() else None)
    except ImportError:  # an old transformers that does without it
        pass


class _Fetched:
    """The epoch's iterator, its waits measured."""

    def __init__(self, training: Training, iterator: Iterator[Any]) -> None:
        self._training = training
        self._iterator = iterator

    def __iter__(self) -> _Fetched:
        return self

    def __next__(self) -> Any:
        return self._training.fetch(self._iterator.__next__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _restore_when_unused() -> None:
    if _patches and not list(_callbacks):  # its length would count those that have gone
        _patches.pop().restore()
