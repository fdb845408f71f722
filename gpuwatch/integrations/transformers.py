"""Hugging Face Trainer: `Trainer(..., callbacks=[GpuWatchCallback()])`.

A step is an optimizer step: the Trainer fetches its micro-batches together, before `on_step_begin`. `evaluate` and
`predict` are `eval`, `save_model` and checkpoints `checkpoint`, device copies `transfer`, TRL's generation "rollout".
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gpuwatch.hook.loader import time_accelerate_copies
from gpuwatch.hook.torch.patches import Patches, say_once
from gpuwatch.integrations import MissingFramework
from gpuwatch.integrations.training import FrameworkCallback, TimedIterator, Training, open_watch_for_the_process

try:
    _transformers: Any = import_module("transformers")
    _Trainer: Any = _transformers.Trainer
except ImportError as error:
    raise MissingFramework("transformers", "transformers[torch]") from error

_callbacks: weakref.WeakSet[GpuWatchCallback] = weakref.WeakSet()
_patches: list[Patches] = []


class GpuWatchCallback(FrameworkCallback, _transformers.TrainerCallback):  # type: ignore[misc]
    """Measures `trainer.train`. `watch`: an open one, else one is made of the options, as in `gpuwatch.Watch`.

    A callback gets neither the trainer nor an exception, so `Trainer.train` is replaced while there is such a callback.
    """

    _trainer: Any = None

    def __new__(cls, *_: Any, **__: Any) -> GpuWatchCallback:
        made: GpuWatchCallback = super().__new__(cls)  # also where one is unpickled
        _callbacks.add(made)
        weakref.finalize(made, _restore_when_unused)
        if not _patches:
            _patches.append(Patches())
            _patches[0].wrap(_Trainer, "train", _train)
        return made

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is None:
            say_once("this trainer's train() is not transformers.Trainer's: nothing is measured")
        else:
            self._training.watch_model(self._trainer.model_wrapped)
            self._training.count_from(lambda: state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(lambda training: training.fetched([]))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(Training.end_step)


def unchanged(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Give the trainer the callback. `gpuwatch run` calls this instead of `Trainer.train`."""
    if not any(isinstance(each, GpuWatchCallback) for each in trainer.callback_handler.callbacks):
        trainer.add_callback(GpuWatchCallback())
    open_watch_for_the_process()
    return _train(original, trainer, *args, **kwargs)


def _train(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Train, watched if the trainer has the callback."""
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
    callback = next((each for each in callbacks if isinstance(each, GpuWatchCallback)), None)
    if callback is None or callback._training is not None:
        return original(trainer, *args, **kwargs)
    with closing(Training(callback._watch, **callback._options)) as training:
        callback._training, callback._trainer = training, trainer
        try:
            _follow(training, trainer)
            return original(trainer, *args, **kwargs)
        finally:
            callback._training = callback._trainer = None


def _follow(training: Training, trainer: Any) -> None:
    """Measure what one trainer does inside. `get_batch_samples` came with transformers 4.46, the others are older."""

    def fetch_step(original: Any, iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        found = original(TimedIterator(training, iterator), *args, **kwargs)
        try:
            training.fetched(found[0])
        except (TypeError, IndexError):
            say_once("get_batch_samples() returns no list of batches: samples are not counted")
        return found

    patches = training.patches
    patches.wrap(trainer, "get_batch_samples", fetch_step)
    # TRL's trainers generate in theirs; the copies of their tensors are seen all the same.
    if type(trainer)._prepare_inputs is _Trainer._prepare_inputs:
        patches.wrap(trainer, "_prepare_inputs", training.copy)
    for phase, *methods in (
        ("eval", "evaluate", "predict"),
        ("checkpoint", "_save_checkpoint", "save_model"),
        ("checkpoint_load", "_load_from_checkpoint", "_load_optimizer_and_scheduler"),
    ):
        for method in methods:
            training.wrap_phase(trainer, method, phase)
    if hasattr(trainer, "_generate_and_score_completions"):  # TRL's GRPO, RLOO and distillation
        training.wrap_phase(trainer, "_generate_and_score_completions", "rollout")
    if find_spec("accelerate") is not None:  # an old transformers does without it
        time_accelerate_copies(patches, lambda: training.session if training.is_input() else None)


def _restore_when_unused() -> None:
    if _patches and not list(_callbacks):  # its length would count those that have gone
        _patches.pop().restore()
