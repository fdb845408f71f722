"""What replaces functions of torch while a `Watch` needs it: installed, removed, and put aside while torch compiles.

Since Python 3.13 a class whose attributes have changed a thousand times has no attribute cache, and every access to a
Tensor's attribute takes twice as long. So these change a bounded number of times in a run, however many passes it has.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

REMOVED_AFTER = 4  # passes; from the next one on the replacement stays until the run is closed
COMPILED_AROUND = 100  # compilations of a run; after any more the next pass installs it again

_left: set[Any] = set()  # what could not be removed, because a replacement of another package was on top of it
_open: list[TorchMethods] = []  # those that are in use
_is_aside = False  # torch compiles: nothing of ours is in its place


def step_aside() -> None:
    """Torch begins to compile: whatever of ours is on top goes, until `come_back`. A second call does nothing."""
    global _is_aside
    _is_aside = True
    while any([methods.step_aside() for methods in _open]):  # what was below another one is on top then
        pass


def come_back() -> None:
    """Torch has compiled. A second call does nothing."""
    global _is_aside
    _is_aside = False
    for methods in _open:
        methods.come_back()


class TorchMethods:
    """Replaces methods of `torch.Tensor`, or of what else `owner` names in torch, for the loops of one run.

    `make(torch, name, original)` returns the replacement, put back at once after up to `compiled_around` compilations.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        make: Callable[[Any, str, Callable[..., Any]], Callable[..., Any]],
        owner: str = "Tensor",
        compiled_around: float = COMPILED_AROUND,
    ) -> None:
        self._names = names
        self._make = make
        self._owner = operator.attrgetter(owner)
        self._compiled_around = compiled_around
        self.loops = 0  # loops that are open; while there is none, a replacement only calls the original
        self._passes = 0
        self._compilations = 0
        self._ours: dict[str, Any] = {}
        self._aside: list[str] = []  # of what is to be installed again once torch has compiled

    def install(self) -> None:
        """A loop has begun. Does nothing before torch is imported."""
        self.loops += 1
        torch = sys.modules.get("torch")
        if self.loops > 1 or torch is None or not hasattr(torch, "Tensor"):
            return
        self._passes += 1
        if self not in _open:
            _open.append(self)
            self._aside = list(self._names)
        self._put()

    def also(self, names: tuple[str, ...]) -> None:
        """Replace these methods too from now on."""
        new = [name for name in names if name not in self._names]
        self._names += tuple(new)
        if self in _open:
            self._aside += new
            self._put()

    def come_back(self) -> None:
        """Install again what is aside, unless torch has compiled too often in this run: then the next pass does it."""
        if self._aside and self.loops:
            self._compilations += 1
            if self._compilations <= self._compiled_around:
                self._put()

    def step_aside(self) -> bool:
        """Remove what is on top, to be installed again; return whether there was any."""
        on_top = self._on_top()
        self._take_back(on_top)
        self._aside += on_top
        return bool(on_top)

    def remove(self) -> None:
        """A loop has ended; the last one removes the replacement, unless that has been done often enough."""
        self.loops = max(0, self.loops - 1)
        if self.loops == 0 and self._passes <= REMOVED_AFTER:
            self.remove_all()

    def remove_all(self) -> None:
        """Remove ours, whatever is open. What another package put over it stays: it calls the original through us."""
        self.loops = 0
        self._aside = []
        if self in _open:
            _open.remove(self)
        self._take_back(self._on_top())
        _left.update(self._ours.values())

    def leave(self, name: str) -> None:
        """Leave one of them to torch until this is installed the next time, or for good if it stays installed."""
        if name in self._on_top():
            self._take_back([name])

    def _on_top(self) -> list[str]:
        """Return the names under which ours is the outermost."""
        torch = sys.modules.get("torch")
        return [name for name, ours in self._ours.items() if torch and vars(self._owner(torch)).get(name) is ours]

    def _take_back(self, names: list[str]) -> None:
        """Remove what is on top under these names, with no class lookup between: Python counts all as one change."""
        owner = self._owner(sys.modules["torch"]) if names else None
        for name in names:
            before = self._ours.pop(name).gpuwatch_before
            while before in _left:  # another Watch's, removed in the meantime
                _left.discard(before)
                before = before.gpuwatch_before
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _put(self) -> None:
        """Install what is aside and is not there, as `_take_back` removes it; while torch compiles, later."""
        if _is_aside:
            return
        torch = sys.modules["torch"]
        owner = self._owner(torch)
        names, self._aside, made = self._aside, [], dict[str, Any]()
        for name in names:
            before = vars(owner).get(name)
            ours = self._ours.get(name)
            if ours is not None and inspect.unwrap(before, stop=partial(operator.is_, ours)) is ours:
                # Another package has put its own over it, and calls it: a second one would time the copy twice.
                _left.discard(ours)
                continue
            # Tensor inherits all of them from a C base: what is deleted again leaves the original.
            ours = self._make(torch, name, getattr(owner, name))
            vars(ours)["gpuwatch_before"] = before
            made[name] = ours
        self._ours.update(made)
        for name, ours in made.items():
            setattr(owner, name, ours)
