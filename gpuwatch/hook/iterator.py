"""What a `for` loop over a watched loader holds, and the usual step of such a loop: the hot path.

In a real training loop all of this runs from cold caches, so it touches as little as it can: two readings of the clock, one tuple,
a few slots of the recorder.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import cycle
from threading import get_ident
from typing import Any, TypeVar

from gpuwatch.hook.events import USUAL
from gpuwatch.hook.loader import as_it_is
from gpuwatch.hook.loop import Loop
from gpuwatch.hook.sampling import LOOKED_AT_SELDOM

T = TypeVar("T")
_TURNS = (*(False,) * (LOOKED_AT_SELDOM - 1), True)
"""Of so many steps one is the loop's, which may look at it closely."""


class WatchedIterator(map):  # type: ignore[type-arg]  # of no parameters at run time
    """One pass over a loader, which ends when this is dropped. All but fetching is the loader's own iterator's.

    Its steps are taken by `usual_step`. `map` and `cycle` call that and count its calls without a look-up or a line of Python.
    """

    _loop: Loop[Any]

    def __new__(cls, loop: Loop[Any]) -> WatchedIterator:
        return super().__new__(cls, usual_step(loop), cycle(_TURNS))

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
        return getattr(self._loop.iterator, name)

    def __del__(self) -> None:
        # `break` and an exception in the loop's body drop the iterator: CPython calls this at once.
        try:  # noqa: SIM105  # contextlib may be gone by then
            self._loop.dropped()
        except Exception:  # the interpreter may be going down: there is nobody left to tell
            pass


def usual_step(loop: Loop[T]) -> Callable[[bool], T]:
    """Return what ends one step of the loop and fetches the next one's batch; it leaves all but the usual step to the loop."""
    recorder, owner, fetch = loop.recorder, loop.owner, loop.fetch
    clock, log = recorder.clock, recorder.log.append

    def ask(due: bool) -> T:
        if due or recorder.steady is not owner or recorder.thread != get_ident():
            return loop.ask(_take_one)
        now = clock()
        copied_ns = recorder.transfer_ns
        log((USUAL, recorder.begin_ns, now, recorder.fed_ns, copied_ns, recorder.samples))
        recorder.begin_ns = now
        recorder.fed_ns = 0
        if copied_ns:
            recorder.transfer_ns = 0
        try:
            batch = fetch()
        except BaseException as error:
            loop.nothing_came(error)
            raise
        fed = clock()
        if (
            recorder.steady is not owner
        ):  # something else went on in the fetch, or another thread has taken over meanwhile
            return loop.came(batch, fed)
        recorder.fed_ns = fed
        count = loop.samples
        if count is not None:
            try:
                recorder.samples = count(batch)
            except Exception as error:
                loop.cannot_count(error)
        return batch

    return ask


def _take_one(loop: Loop[T]) -> T:
    """Take one usual step, whosever turn it is."""
    return usual_step(loop)(False)


__all__ = ["WatchedIterator"]
