"""Ignite: `GpuWatchHandler().attach(trainer)`.

A step is one iteration of that engine. Another engine that runs inside its run, an evaluator, is `eval`; a `Checkpoint`
handler's save is `checkpoint`.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module
from typing import Any

from gpuwatch.hook.torch.patches import Patches
from gpuwatch.hook.watch import Watch
from gpuwatch.integrations import MissingFramework
from gpuwatch.integrations.training import (
    FrameworkCallback,
    TimedIterator,
    Training,
    is_watched_already,
    open_watch_for_the_process,
    trains_here,
)

try:
    _engine: Any = import_module("ignite.engine")
    _handlers: Any = import_module("ignite.handlers")
except ImportError as error:
    raise MissingFramework("ignite", "pytorch-ignite") from error


class GpuWatchHandler(FrameworkCallback):
    """Measures an engine's `run`. `watch`: an open one, else one is made of the options, as in `gpuwatch.Watch`."""

    def __init__(self, watch: Watch | None = None, **options: Any) -> None:
        super().__init__(watch, **options)
        self._attached = Patches()
        self._handlers = ExitStack()  # removes them

    def attach(self, engine: Any) -> GpuWatchHandler:
        """Watch this engine's runs, until `detach`. Adds no EXCEPTION handler: with one, Ignite swallows exceptions."""
        self._attached.wrap(engine, "run", partial(self.measure, engine))
        events = _engine.Events
        for event, note in (
            (events.STARTED, lambda training: training.count_from(lambda: engine.state.iteration)),
            (events.GET_BATCH_STARTED, lambda training: self._time_fetches(training, engine)),
            (events.ITERATION_STARTED, lambda training: training.fetched([engine.state.batch])),
            (events.EPOCH_COMPLETED, Training.end_step),
        ):
            self._handlers.callback(engine.add_event_handler(event, self._note, note).remove)
        return self

    __call__ = attach

    def detach(self) -> None:
        """Leave the engine as it was."""
        self._attached.restore()
        self._attached = Patches()
        self._handlers.close()

    def measure(self, engine: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what runs the engine, and measure it."""
        if self._training is not None:
            return original(*args, **kwargs)
        with closing(Training(self._watch, **self._options)) as training:
            self._training = training
            try:
                self._follow(training, engine)
                return original(*args, **kwargs)
            finally:
                self._training = None
                iterator = getattr(engine, "_dataloader_iter", None)
                if isinstance(iterator, TimedIterator):  # an interrupted run keeps its iterator
                    engine._dataloader_iter = iterator.iterator

    def _follow(self, training: Training, trainer: Any) -> None:
        """Measure what the engine does inside: its iterator, other engines' runs, checkpoints."""

        def run(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine is trainer:
                return original(engine, *args, **kwargs)
            return training.in_phase("eval", original, engine, *args, **kwargs)

        def make_iterator(original: Any, *args: Any, **kwargs: Any) -> Any:
            made = training.wait(original, *args, **kwargs)
            self._time_fetches(training, trainer)
            return made

        training.patches.wrap(_engine.Engine, "run", run)
        training.wrap_phase(_handlers.Checkpoint, "__call__", "checkpoint")
        training.patches.wrap(trainer, "_setup_dataloader_iter", make_iterator)

    @staticmethod
    def _time_fetches(training: Training, engine: Any) -> None:
        """Measure the engine's waits where they happen. Private to Ignite, unchanged from 0.4 to 0.5."""
        iterator = getattr(engine, "_dataloader_iter", None)
        if iterator is not None and not isinstance(iterator, TimedIterator):
            engine._dataloader_iter = TimedIterator(training, iterator)


GpuWatchCallback = GpuWatchHandler


def unchanged(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach to the outermost engine; inner ones are evaluators. `gpuwatch run` calls this instead of `Engine.run`."""
    if is_watched_already() or not trains_here():
        return original(engine, *args, **kwargs)
    open_watch_for_the_process()
    handler = GpuWatchHandler().attach(engine)
    try:
        return handler.measure(engine, original, engine, *args, **kwargs)  # not by a subclass's own run, as MONAI's
    finally:
        handler.detach()
