"""Time that torch spends compiling, by dynamo's own callbacks: the state `compile`.

Meanwhile what stands in place of torch's own methods steps aside, whichever thread compiles. Dynamo is imported by the
first optimizer or the first `torch.compile`: where that comes while a loop runs, the import is noticed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.torch.patches import Patches
from gpuwatch.hook.torch.tensor_patch import come_back, step_aside
from gpuwatch.ledger.states import COMPILE

_PACKAGE = __name__.partition(".")[0]
_OURS = f"{Path(__file__).parents[2]}{os.sep}"  # the folder of the whole package, as dynamo notes it
_taught: Any = None  # dynamo's rules, once they know to leave this package alone: asking them again takes a long search


class CompileWatch:
    """Books compilations of the training as a phase of their own, once torch's compiler is there at all.

    Until then it is one of Python's finders of modules: it finds none, but sees dynamo's imported.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._level = 0
        self._patches: Patches | None = None  # of dynamo's handler of callbacks, while that has ours

    def install(self) -> None:
        """Register with dynamo, now or when it is imported. Called again at every pass."""
        if _handler() is not None:
            if self in sys.meta_path:  # it was imported meanwhile, and need not have compiled anything
                sys.meta_path.remove(self)
                come_back()
            self._register()
            _leave_us_alone()
        elif "torch" in sys.modules and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Find no module. Dynamo, as it is imported, learns torch's own functions: ours step aside."""
        if name == "torch._dynamo":
            step_aside()
        elif name.startswith("torch._dynamo."):
            self._register()

    def _register(self) -> None:
        handler = _handler()
        if handler is None or self._begins in handler.start_callbacks:
            return
        handler.register_start_callback(self._begins)
        handler.register_end_callback(self._ends)
        if self._patches is None:
            self._patches = Patches()
            self._patches.wrap(handler, "clear", self._clear)

    def _clear(self, original: Callable[[], None]) -> None:
        """Clear dynamo's callbacks but ours: `torch._dynamo.reset()` does; torch may compile before the next pass."""
        try:
            original()
        finally:
            self._register()

    def remove(self) -> None:
        """Take the callbacks back."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        handler, patches, self._patches = _handler(), self._patches, None
        if handler is None or patches is None:
            return
        patches.restore()
        for remove, call in (handler.remove_start_callback, self._begins), (handler.remove_end_callback, self._ends):
            with contextlib.suppress(ValueError):  # all callbacks were cleared
                remove(call)
        come_back()  # the end of a compilation in another thread would not be reported any more

    def _begins(self, _: Any) -> None:
        step_aside()
        recorder = self._recorder
        if recorder.is_here() and not self._level:
            self._level = recorder.enter(COMPILE, recorder.clock())

    def _ends(self, _: Any) -> None:
        come_back()
        level, self._level = self._level, 0
        recorder = self._recorder
        if level and recorder.is_here():
            recorder.exit(level, recorder.clock())


def _leave_us_alone() -> None:
    """Have dynamo run this package's functions as they are, and learn torch's methods, once, while ours are away."""
    global _taught
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None or rules is _taught:
        return
    with contextlib.suppress(AttributeError):  # a torch without such rules
        if _OURS not in rules.SKIP_DIRS:
            rules.add(_PACKAGE)
            step_aside()
            rules.get_tensor_method()
            come_back()
        _taught = rules


def _handler() -> Any | None:
    """Return dynamo's callback handler; None before it was imported, or where torch has none."""
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
