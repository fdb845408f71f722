"""What `gpuwatch run` does inside an unmodified script: it watches the loaders, and adds the framework's integration.

`gpuwatch/startup/sitecustomize.py` calls the functions that `instrumented.py` names with a module that has just been
imported. The patches stay for the process's life.
"""

import functools
import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import Any

from gpuwatch.hook.loader import LoaderAround, time_accelerate_copies
from gpuwatch.hook.torch.install import PHASES
from gpuwatch.hook.torch.patches import Patches, say_once
from gpuwatch.hook.watch import open_session, records_here, watch
from gpuwatch.integrations.training import is_watched_already, open_watch_for_the_process, training_threads, trains_here
from gpuwatch.ledger.states import CHECKPOINT
from gpuwatch.startup.instrumented import FRAMEWORKS

# Modules whose iteration over a loader is a part of one that is watched already.
_FOR_OTHERS = "gpuwatch.hook.loop", "accelerate.data_loader", "torchdata.stateful_dataloader.stateful_dataloader"


def watch_loaders(module: ModuleType) -> None:
    """Watch this module's loaders in training threads. Accelerate's fetch a batch ahead of the DataLoader inside."""
    for name in ("DataLoader", "_BaseDataLoaderIter", "StatefulDataLoader", "DataLoaderShard", "DataLoaderDispatcher"):
        found = getattr(module, name, None)
        if found is not None and found.__module__ == module.__name__:
            _watch_iteration(found)
    if module.__name__ == "accelerate.data_loader":
        time_accelerate_copies(Patches(), open_session)


def watch_set_up(module: ModuleType) -> None:
    """Open the Watch when the process loads a checkpoint or waits for other ranks: from then on these are phases."""

    def begin(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if open_session() is None and trains_here():
            open_watch_for_the_process()
            if open_session() is not None:
                return getattr(module, name)(*args, **kwargs)
        return original(*args, **kwargs)

    for name, phase in PHASES[module.__name__][1].items():
        if phase != CHECKPOINT:
            Patches().wrap(module, name, functools.partial(begin, name))


def watch_optimizers(module: ModuleType) -> None:
    """Note which threads train, and bound the steps of a loop without a DataLoader by its optimizer's."""

    def make(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        training_threads.add(threading.current_thread())
        return original(optimizer, *args, **kwargs)

    def stepped(optimizer: Any, *_: Any) -> None:
        session = open_session()
        if session is None and records_here() and not is_watched_already():
            if isinstance(thread := threading.current_thread(), threading._DummyThread):  # one of autograd's
                return
            training_threads.add(thread)
            open_watch_for_the_process()
            session = open_session()
        if session is not None and not session.torch_hooks.optimizer.is_installed and not is_watched_already():
            session.torch_hooks.optimizer.stepped(optimizer)

    Patches().wrap(module.Optimizer, "__init__", make)
    module.register_optimizer_step_post_hook(stepped)


def watch_framework(module: ModuleType) -> None:
    """Have the framework's method that trains called by its integration."""
    integration, place = FRAMEWORKS[module.__name__]
    owner, method = place.split(".")

    def train(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            unchanged = import_module(f"gpuwatch.integrations.{integration}").unchanged
        except Exception as error:
            say_once(f"{integration} is not watched: {error!r}")
            return original(trainer, *args, **kwargs)
        return unchanged(original, trainer, *args, **kwargs)

    Patches().wrap(getattr(module, owner), method, train)


def _watch_iteration(loader_class: Any) -> None:
    original = loader_class.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller in _FOR_OTHERS or is_watched_already() or not trains_here():
            return original(self)
        try:
            watched = watch(_Original(self, iterate=original))
        except Exception as error:
            say_once(f"{loader_class.__name__} is not watched: {error!r}")
            return original(self)
        return iter(watched)

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        super(loader_class, cls).__init_subclass__(**kwargs)
        if cls.__module__ not in _FOR_OTHERS and not hasattr(vars(cls).get("__iter__", __iter__), "__wrapped__"):
            _watch_iteration(cls)  # what its own `__iter__` does to a batch is a part of the wait

    loader_class.__iter__ = __iter__
    if "__init_subclass__" not in vars(loader_class):
        loader_class.__init_subclass__ = classmethod(__init_subclass__)


class _Original(LoaderAround):
    """A loader that is iterated by its class's original `__iter__`."""

    def __iter__(self) -> Any:
        return self._gpuwatch_iterate(self._gpuwatch_loader)
