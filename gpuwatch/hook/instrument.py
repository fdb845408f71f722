"""What `gpuwatch run` does inside an unmodified script: its loaders are watched, its framework gets the integration.

Each function is called by `gpuwatch/startup/sitecustomize.py` with a module that has just been imported. They stay for the process's life.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import ModuleType
from typing import Any

from gpuwatch.hook.torch.patches import Patches, say_once
from gpuwatch.hook.watch import watch
from gpuwatch.integrations.training import is_watched_already, open_watch

_ITERATE_FOR_OTHERS = {
    "gpuwatch.hook.loop",
    "accelerate.data_loader",
    "torchdata.stateful_dataloader.stateful_dataloader",
}
"""Modules whose own iteration over a loader is a part of one that is watched already."""


def watch_torch(module: ModuleType) -> None:
    """Watch every DataLoader that the main thread iterates."""
    _watch_iteration(module.DataLoader)


def watch_torchdata(module: ModuleType) -> None:
    """Watch StatefulDataLoader, whose iteration is its own."""
    _watch_iteration(module.StatefulDataLoader)


def watch_accelerate(module: ModuleType) -> None:
    """Watch what `accelerator.prepare` returns: it is a batch ahead of the DataLoader inside."""
    from gpuwatch.integrations.accelerate import time_copies

    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        _watch_iteration(getattr(module, name))
    time_copies(Patches(), open_watch)


def watch_transformers(module: ModuleType) -> None:
    """Give every Trainer the callback."""
    from gpuwatch.integrations.transformers import GpuWatchCallback

    callback = GpuWatchCallback()

    def train(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(each, GpuWatchCallback) for each in trainer.callback_handler.callbacks):
            trainer.add_callback(callback)
        _open_watch_for_the_process()
        return original(trainer, *args, **kwargs)

    Patches().wrap(module.Trainer, "train", train)


def watch_lightning(module: ModuleType) -> None:
    """Give every Trainer the callback when it fits."""

    def fit(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        from gpuwatch.integrations.lightning import GpuWatchCallback

        if not any(isinstance(each, GpuWatchCallback) for each in trainer.callbacks):
            trainer.callbacks.append(GpuWatchCallback())
        _open_watch_for_the_process()
        return original(trainer, *args, **kwargs)

    Patches().wrap(module.Trainer, "fit", fit)


def watch_ignite(module: ModuleType) -> None:
    """Attach to the outermost engine that runs; those inside its run are evaluators."""

    def run(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if is_watched_already() or not _trains_here():
            return original(engine, *args, **kwargs)
        from gpuwatch.integrations.ignite import GpuWatchHandler

        _open_watch_for_the_process()
        handler = GpuWatchHandler().attach(engine)
        try:
            return engine.run(*args, **kwargs)
        finally:
            handler.detach()

    Patches().wrap(module.Engine, "run", run)


def _watch_iteration(loader_class: Any) -> None:
    original = loader_class.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller in _ITERATE_FOR_OTHERS or is_watched_already() or not _trains_here():
            return original(self)
        try:
            watched = watch(_Bare(self, original))
        except Exception as error:
            say_once(f"{loader_class.__name__} is not watched: {error!r}")
            return original(self)
        return iter(watched)

    loader_class.__iter__ = __iter__


class _Bare:
    """A loader whose iteration is the class's own, and all else the loader's."""

    def __init__(self, loader: Any, iterate: Any) -> None:
        self._bare = loader, iterate

    def __iter__(self) -> Any:
        loader, iterate = self._bare
        return iterate(loader)

    def __len__(self) -> int:
        return len(self._bare[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bare[0], name)


def _trains_here() -> bool:
    """Whether this is the main thread of a process that is no loader's worker."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and torch_data.get_worker_info() is not None:
        return False
    return threading.current_thread() is threading.main_thread()


def _open_watch_for_the_process() -> None:
    """Open the Watch that ends with the process, if none is open: several trainings are one run."""
    watch(())
