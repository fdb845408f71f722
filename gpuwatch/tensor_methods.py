"""What stands in place of a Tensor's own methods while loops run: put there, taken back, and out of the way while torch compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

_left: set[Any] = set()
"""What could not be taken back, because somebody else's was on top of it."""
_open: list[TensorMethods] = []
"""Those of open loops."""
_is_aside = False
"""Torch compiles: nothing of ours is in its place."""


def step_aside() -> None:
    """Torch begins to compile: whatever of ours is on top goes, until `come_back`. Said again it does nothing."""
    global _is_aside
    _is_aside = True
    while any([methods.step_aside() for methods in _open]):  # what was below another one is on top then
        pass


def come_back() -> None:
    """Torch has compiled. Said again it does nothing."""
    global _is_aside
    _is_aside = False
    for methods in _open:
        methods.come_back()


class TensorMethods:
    """Replaces methods of `torch.Tensor` while `install`ed, once for each open loop.

    `make(torch, name, original)` returns what is to stand there and calls the original; it is wrapped by `functools.wraps`.
    """

    def __init__(
        self, names: tuple[str, ...], make: Callable[[Any, str, Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._names = names
        self._make = make
        self._loops = 0
        self._ours: dict[str, Any] = {}
        self._aside: list[str] = []
        """Of what is to be in its place again once torch has compiled."""

    def install(self) -> None:
        """A loop has begun. Does nothing before torch is imported."""
        self._loops += 1
        torch = sys.modules.get("torch")
        if self._loops > 1 or torch is None or not hasattr(torch, "Tensor"):
            return
        _open.append(self)
        self._aside = list(self._names)
        if not _is_aside:
            self.come_back()

    def come_back(self) -> None:
        """Put in its place what is aside."""
        torch = sys.modules["torch"]
        names, self._aside = self._aside, []
        for name in names:
            ours = self._ours.get(name)
            if ours is not None and ours in _chain(torch.Tensor.__dict__.get(name)):
                # Somebody else has put his own over it, and calls it: a second one would time the copy twice.
                _left.discard(ours)
                continue
            self._put(torch, name, self._make(torch, name, getattr(torch.Tensor, name)))

    def step_aside(self) -> bool:
        """Take back what is on top, to be put there again; return whether there was any."""
        torch = sys.modules["torch"]
        on_top = [name for name, ours in self._ours.items() if torch.Tensor.__dict__.get(name) is ours]
        for name in on_top:
            self._take_back(torch, name)
        self._aside += on_top
        return bool(on_top)

    def remove(self) -> None:
        """A loop has ended; the last one takes the replacement back."""
        self._loops = max(0, self._loops - 1)
        if self._loops == 0:
            self.remove_all()

    def remove_all(self) -> None:
        """Take the replacement back whatever is open. What somebody else put over it stays: it calls the original through us."""
        self._loops = 0
        self._aside = []
        if self in _open:
            _open.remove(self)
        torch = sys.modules.get("torch")
        for name, ours in list(self._ours.items()):
            if torch is None or torch.Tensor.__dict__.get(name) is not ours:
                _left.add(ours)
                continue
            self._take_back(torch, name)

    def leave(self, torch: Any, name: str) -> None:
        """Leave one of them to torch until the last loop ends, if ours is on top."""
        ours = self._ours.get(name)
        if ours is not None and torch.Tensor.__dict__.get(name) is ours:
            self._take_back(torch, name)

    def _take_back(self, torch: Any, name: str) -> None:
        """Take back what is on top."""
        before = self._ours.pop(name).gpuwatch_before
        while before in _left:  # another Watch's, taken back in the meantime
            _left.discard(before)
            before = before.gpuwatch_before
        if before is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, before)

    def _put(self, torch: Any, name: str, ours: Any) -> None:
        # Tensor inherits all of them from a C base: what is deleted again leaves the original.
        ours.gpuwatch_before = torch.Tensor.__dict__.get(name)
        self._ours[name] = ours
        setattr(torch.Tensor, name, ours)


def _chain(function: Any) -> Iterator[Any]:
    """Yield what a call goes through, as far as it says so: the outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
