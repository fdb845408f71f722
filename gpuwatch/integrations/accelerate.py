"""Accelerate: the loop is the user's, so `gpuwatch.watch` around the prepared loader is all that is needed.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in watch(loader):

`accelerator.prepare(model, optimizer, watch(loader))` is the same: what is watched stays watched, around what Accelerate made of it.

`watch` from here, and a loader that is prepared while it is watched, also tell Accelerate's own copies to the device apart from the wait for
data; `gpuwatch.watch` around a prepared loader counts both as `input_wait`, because the copy happens inside the fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from gpuwatch.hook.loader import WatchedLoader
from gpuwatch.hook.torch.patches import Patches
from gpuwatch.hook.watch import Watch
from gpuwatch.hook.watch import watch as watch_loader
from gpuwatch.integrations import MissingFramework
from gpuwatch.integrations.training import is_disabled, note_loader, open_watch

if find_spec("accelerate") is None:
    raise MissingFramework("accelerate", "accelerate")

T = TypeVar("T")


def watch(loader: Iterable[T], *, samples: Callable[[Any], int] | None = None) -> Iterable[T]:
    """Return a prepared loader, watched as by `gpuwatch.watch`, its copies to the device as `transfer`."""
    if is_disabled():
        return loader
    return watch_loader(_Prepared(loader), samples=samples)


def time_copies(patches: Patches, current: Callable[[], Watch | None]) -> None:
    """Have Accelerate's loaders tell their copies to the device as `transfer`.

    They move a batch inside their fetch, by a function of their module: there is no public place between.
    """

    def send(original: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current()
        if watch is None:
            return original(*args, **kwargs)
        with watch.transfer():
            return original(*args, **kwargs)

    patches.wrap(import_module("accelerate.data_loader"), "send_to_device", send)


def watched_loaders_prepared() -> Patches:
    """Return the patches by which `accelerator.prepare` and `skip_first_batches` take a watched loader for the loader it is.

    What they return is watched again. `prepare` itself is looked up before its argument `watch(loader)` is made, so it is what `prepare` calls for each object that is wrapped.
    """
    accelerator = import_module("accelerate.accelerator").Accelerator

    def as_loader(original: Any, self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        return _watched_like(given, original(self, _bare(given), *args, **kwargs))

    patches = Patches()
    patches.wrap(accelerator, "_prepare_one", as_loader)
    patches.wrap(accelerator, "skip_first_batches", as_loader)
    return patches


def _bare(each: Any) -> Any:
    """Return the loader inside of what watches it; anything else as it is."""
    loader = each._gpuwatch_loader if isinstance(each, WatchedLoader) else each
    return loader._loader if isinstance(loader, _Prepared) else loader


def _watched_like(before: Any, after: Any) -> Any:
    """Return a loader watched as the one that it was made of."""
    if not isinstance(before, WatchedLoader) or after is _bare(before):
        return before if isinstance(before, WatchedLoader) else after
    return before._gpuwatch_around(_Prepared(after))


class _Prepared:
    """A loader that Accelerate prepared; everything but its iteration is its own."""

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_loader", loader)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self._loader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        patches = Patches()
        time_copies(patches, open_watch)
        patches.wrap(import_module("torch.utils.data").DataLoader, "__iter__", _iterate)
        try:
            yield from batches
        finally:
            patches.restore()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def _iterate(original: Any, loader: Any) -> Any:
    """Make the iterator of the DataLoader inside, and tell of its workers."""
    iterator, watch = original(loader), open_watch()
    if watch is not None:
        note_loader(watch, loader, iterator)
    return iterator
