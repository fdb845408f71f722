"""A loader that is watched: any iterable of batches that behaves as before.

`iter()` starts workers when the loader would, and `len()`, attributes and exceptions pass through unchanged. A watched
loader that Accelerate prepares stays watched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import cycle
from types import GeneratorType
from typing import Any, Generic, TypeVar

from gpuwatch.hook.loop import Count, Loop
from gpuwatch.hook.metering import SAMPLE_QUICK_EVERY
from gpuwatch.hook.session import Session
from gpuwatch.hook.torch.patches import Patches

T = TypeVar("T")

_TURNS = (*(False,) * (SAMPLE_QUICK_EVERY - 1), True)  # one in so many steps is left to the loop, which may sample it


class LoaderAround:
    """A loader that is iterated otherwise; everything else is its own. What is kept here is named `_gpuwatch_…`."""

    _gpuwatch_loader: Any

    def __init__(self, loader: Any, **more: Any) -> None:
        vars(self).update({f"_gpuwatch_{name}": value for name, value in (("loader", loader), *more.items())})

    def __len__(self) -> int:
        return len(self._gpuwatch_loader)

    def __getattr__(self, name: str) -> Any:
        # Special methods are not passed through: copy and pickle would copy the bare loader.
        if name.startswith(("_gpuwatch_", "__")):
            raise AttributeError(name)
        return getattr(self._gpuwatch_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._gpuwatch_loader, name, value)


class WatchedLoader(LoaderAround, Generic[T]):
    """Any iterable of batches, measured while it is iterated."""

    _gpuwatch_session: Session
    _gpuwatch_options: tuple[Any, Count | None, Count | None]
    _gpuwatch_begun: Iterator[T] | None

    def __init__(self, session: Session, loader: Iterable[T], *options: Any) -> None:
        """`options`: `to`, `samples` and `tokens` of a `Loop`."""
        super().__init__(loader, session=session, options=options, begun=None)

    def __iter__(self) -> Iterator[T]:
        loop = Loop(self._gpuwatch_session, self._gpuwatch_loader, *self._gpuwatch_options)
        iterator: Iterator[T] = WatchedIterator(loop)
        return iterator

    def __next__(self) -> T:
        """Return the next batch of a generator or another iterator, as it would itself."""
        if not isinstance(self._gpuwatch_loader, Iterator):
            raise TypeError(f"{type(self._gpuwatch_loader).__name__!r} object is not an iterator")
        begun = self._gpuwatch_begun
        if begun is None:
            begun = vars(self)["_gpuwatch_begun"] = iter(self)
        return next(begun)

    def __bool__(self) -> bool:
        return bool(self._gpuwatch_loader)

    def __delattr__(self, name: str) -> None:
        delattr(self._gpuwatch_loader, name)

    def __dir__(self) -> Iterable[str]:
        return dir(self._gpuwatch_loader)

    def __getitem__(self, index: Any) -> Any:
        return self._gpuwatch_loader[index]

    def __copy__(self) -> WatchedLoader[T]:
        return self._gpuwatch_around(copy.copy(self._gpuwatch_loader))

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedLoader[T]:
        return self._gpuwatch_around(copy.deepcopy(self._gpuwatch_loader, memo))

    def _gpuwatch_around(self, loader: Iterable[T]) -> WatchedLoader[T]:
        return WatchedLoader(self._gpuwatch_session, loader, *self._gpuwatch_options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the bare loader: another process (a spawned worker) is not this run's and must not report."""
        return as_it_is, (self._gpuwatch_loader,)

    def __repr__(self) -> str:
        return f"gpuwatch.watch({self._gpuwatch_loader!r})"


class WatchedIterator(map):  # type: ignore[type-arg]  # not generic at run time
    """One pass over a loader, until this is dropped. `map` and `cycle` call the fast path without a line of Python."""

    _loop: Loop[Any]

    def __new__(cls, loop: Loop[Any]) -> WatchedIterator:
        return super().__new__(cls, loop.recorder.fast_path(loop), cycle(_TURNS))

    def __init__(self, loop: Loop[Any]) -> None:
        self._loop = loop

    def __len__(self) -> int:
        return len(self._loop.iterator)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._loop.iterator)

    def __copy__(self) -> Any:
        return copy.copy(self._loop.iterator)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy deeply and pickle as the loader's own iterator, if that can."""
        return as_it_is, (self._loop.iterator,)

    def __getattr__(self, name: str) -> Any:
        if name == "_loop":
            raise AttributeError(name)
        found, loop = getattr(self._loop.iterator, name), self._loop
        is_sent = name == "send" and isinstance(loop.iterator, GeneratorType) and loop.is_open
        return partial(self._send, found) if is_sent else found

    def _send(self, send: Callable[[Any], Any], value: Any) -> Any:
        """Send a value to a generator, which yields the next batch."""
        loop = self._loop
        loop.fetch, fetch = partial(send, value), loop.fetch
        try:
            return next(self)
        finally:
            loop.fetch = fetch

    def __del__(self) -> None:
        # `break` and an exception in the loop's body drop the iterator: CPython calls this at once.
        try:  # noqa: SIM105  # contextlib may be gone by then
            self._loop.dropped()
        except Exception:  # the interpreter may be shutting down
            pass


def as_it_is(loader: T) -> T:
    """Return the argument: how something watched is unpickled."""
    return loader


class PreparedLoader(LoaderAround):
    """A loader that Accelerate prepared, its copies to the device timed; `session` returns the innermost Watch's."""

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self._gpuwatch_loader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        def iterate(original: Any, loader: Any) -> Any:
            """Make the iterator of the DataLoader inside, and note its workers."""
            iterator, session = original(loader), self._gpuwatch_session()
            if session is not None:
                session.note_loader(loader, iterator)
            return iterator

        patches = Patches()
        time_accelerate_copies(patches, self._gpuwatch_session)
        patches.wrap(import_module("torch.utils.data").DataLoader, "__iter__", iterate)
        try:
            yield from batches
        finally:
            patches.restore()


def time_accelerate_copies(patches: Patches, session: Callable[[], Session | None]) -> None:
    """Count the copies that Accelerate's loaders make in their fetch as `transfer` of the session that is returned."""

    def send(original: Any, *args: Any, **kwargs: Any) -> Any:
        current = session()
        with nullcontext() if current is None else current.transfer:
            return original(*args, **kwargs)

    patches.wrap(import_module("accelerate.data_loader"), "send_to_device", send)


def watch_prepared_loaders(session: Callable[[], Session | None]) -> Patches:
    """Return patches by which `accelerator.prepare` and `skip_first_batches` take and return a watched loader."""
    accelerator = import_module("accelerate.accelerator").Accelerator

    def prepare(original: Any, self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(given, WatchedLoader):
            return original(self, given, *args, **kwargs)
        bare = given._gpuwatch_loader
        bare = bare._gpuwatch_loader if isinstance(bare, PreparedLoader) else bare
        prepared = original(self, bare, *args, **kwargs)
        return given if prepared is bare else given._gpuwatch_around(PreparedLoader(prepared, session=session))

    patches = Patches()
    patches.wrap(accelerator, "_prepare_one", prepare)
    patches.wrap(accelerator, "skip_first_batches", prepare)
    return patches
