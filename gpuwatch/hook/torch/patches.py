"""Functions of others, replaced for as long as a training runs, and put back on any exit."""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

# takes what it replaces (bound, where it was an object's method), then the call's arguments
Wrapper = Callable[..., Any]

_ABSENT = object()
_said: set[str] = set()
# Wrappers that ended under another one's, with what they had replaced: who wrapped them puts that back.
_buried: WeakKeyDictionary[Wrapper, Any] = WeakKeyDictionary()


class Patches:
    """Replaced attributes of classes, objects and modules; none where `on` is False."""

    def __init__(self, on: bool = True) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._on = on

    def wrap(self, owner: Any, name: str, wrapper: Wrapper, *others: Any) -> None:
        """Have calls of `owner.name`, and of the same function of `others`, go through `wrapper`; it can be pickled."""
        if not self._on:
            return
        original = getattr(owner, name, None)
        if not callable(original):
            say_once(f"{_name(owner)} has no {name}(): the time that gpuwatch measures with it counts as `other`")
            return

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # Another one may have wrapped this in the meantime and keeps it: then it does nothing from the end on.
            return wrapper(original, *args, **kwargs) if self._on else original(*args, **kwargs)

        try:
            for each in (owner, *(other for other in others if getattr(other, name, None) is original)):
                before = vars(each).get(name, _ABSENT)
                setattr(each, name, wrapped)
                self._undo.append((each, name, before, wrapped))
        except (AttributeError, TypeError) as error:
            say_once(f"{_name(owner)}.{name} cannot be watched: {error!r}")

    def restore(self) -> None:
        """Put back everything that is still as it was left here. Safe to call twice."""
        self._on = False
        while self._undo:
            owner, name, before, wrapped = self._undo.pop()
            while before in _buried:
                before = _buried[before]
            if vars(owner).get(name) is not wrapped:
                _buried[wrapped] = before
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class GlobalHook:
    """A hook of all modules or optimizers that comes and goes: registered once, later put faster, by its handle."""

    def __init__(self, kind: str, call: Callable[..., None]) -> None:
        """`kind` is the middle of the name of torch's function, such as "optimizer_step_post" or "module_forward"."""
        self._register, self._call = f"register_{kind}_hook", call
        self._module = "torch.optim.optimizer" if kind.startswith("optimizer") else "torch.nn.modules.module"
        self._hooks: Any = None  # torch's own, by number
        self._id, self.is_on = 0, False

    def add(self) -> None:
        """Add it, unless torch is not loaded."""
        if self._hooks is None:
            if not self.can_be_added:
                return
            handle = getattr(sys.modules[self._module], self._register)(self._call)
            self._hooks, self._id = handle.hooks_dict_ref(), handle.id
        self._hooks[self._id] = self._call
        self.is_on = True

    @property
    def can_be_added(self) -> bool:
        """Whether torch's function is there."""
        return hasattr(sys.modules.get(self._module), self._register)

    @property
    def is_alone(self) -> bool:
        """Whether it is there, and no other hook of its kind is."""
        return self.is_on and len(self._hooks) == 1

    def remove(self) -> bool:
        """Remove it; return whether it was there."""
        was_on, self.is_on = self.is_on, False
        if was_on:
            self._hooks.pop(self._id, None)
        return was_on


def say_once(message: str) -> None:
    """Log a warning, once in this process."""
    if message not in _said:
        _said.add(message)
        logger.warning("gpuwatch: %s", message)


def _name(owner: Any) -> str:
    named = owner if isinstance(owner, type) or hasattr(owner, "__name__") else type(owner)
    return f"{named.__module__}.{named.__qualname__}" if isinstance(named, type) else str(named.__name__)
