"""A loader that is watched: any iterable of batches that keeps behaving as it did.

`iter()` starts workers when the loader would, and `len()`, attributes and exceptions pass through unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from gpuwatch.hook.watch import Watch

T = TypeVar("T")
Samples = Callable[[Any], int]


class WatchedLoader(Generic[T]):
    """Any iterable of batches, measured while it is iterated. Everything else is the loader's own."""

    _gpuwatch_watch: Watch
    _gpuwatch_loader: Iterable[T]
    _gpuwatch_to: Any
    _gpuwatch_samples: Samples | None
    _gpuwatch_tokens: Samples | None
    _gpuwatch_pass: Iterator[T] | None

    def __init__(
        self,
        watch: Watch,
        loader: Iterable[T],
        to: Any = None,
        samples: Samples | None = None,
        tokens: Samples | None = None,
    ) -> None:
        vars(self).update(
            _gpuwatch_watch=watch,
            _gpuwatch_loader=loader,
            _gpuwatch_to=to,
            _gpuwatch_samples=samples,
            _gpuwatch_tokens=tokens,
            _gpuwatch_pass=None,
        )

    def __iter__(self) -> Iterator[T]:
        return self._gpuwatch_begin()

    def _gpuwatch_begin(self) -> Iterator[T]:
        return self._gpuwatch_watch._loop(
            self._gpuwatch_loader, self._gpuwatch_to, self._gpuwatch_samples, self._gpuwatch_tokens
        )

    def __next__(self) -> T:
        """Return the next batch of a generator or another iterator, as it would itself."""
        if not isinstance(self._gpuwatch_loader, Iterator):
            raise TypeError(f"{type(self._gpuwatch_loader).__name__!r} object is not an iterator")
        if self._gpuwatch_pass is None:
            self._gpuwatch_pass = self._gpuwatch_begin()
        return next(self._gpuwatch_pass)

    def __len__(self) -> int:
        return len(self._gpuwatch_loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._gpuwatch_loader)

    def __getattr__(self, name: str) -> Any:
        # Special methods are not handed on: copy and pickle would then copy the loader in this object's place.
        if name.startswith(("_gpuwatch_", "__")):
            raise AttributeError(name)
        return getattr(self._gpuwatch_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_gpuwatch_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._gpuwatch_loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._gpuwatch_loader, name)

    def __dir__(self) -> Iterable[str]:
        return dir(self._gpuwatch_loader)

    def __getitem__(self, index: Any) -> Any:
        return self._gpuwatch_loader[index]  # type: ignore[index]

    def __copy__(self) -> WatchedLoader[T]:
        return self._gpuwatch_around(copy.copy(self._gpuwatch_loader))

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedLoader[T]:
        return self._gpuwatch_around(copy.deepcopy(self._gpuwatch_loader, memo))

    def _gpuwatch_around(self, loader: Iterable[T]) -> WatchedLoader[T]:
        return WatchedLoader(
            self._gpuwatch_watch, loader, self._gpuwatch_to, self._gpuwatch_samples, self._gpuwatch_tokens
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the bare loader: another process (a spawned worker) is not this run's and must not report."""
        return as_it_is, (self._gpuwatch_loader,)

    def __repr__(self) -> str:
        return f"gpuwatch.watch({self._gpuwatch_loader!r})"


def as_it_is(loader: T) -> T:
    """Return what it is given: what a pickle of something watched is made of."""
    return loader
