"""Time that torch spends compiling, told by dynamo's own callbacks: the state `compile`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from gpuwatch.ledger import COMPILE
from gpuwatch.recorder import Recorder


class CompileWatch:
    """Books compilations of the training thread as a phase of their own, once torch's compiler is there at all."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._level = 0
        self._callbacks: tuple[Callable[[Any], None], Callable[[Any], None]] | None = None

    def install(self) -> None:
        """Register with dynamo if it has been imported; called again at every pass, for it is imported late."""
        handler = _handler()
        if self._callbacks is not None or handler is None:
            return
        self._callbacks = (self._begins, self._ends)
        handler.register_start_callback(self._begins)
        handler.register_end_callback(self._ends)

    def remove(self) -> None:
        """Take the callbacks back."""
        callbacks, self._callbacks = self._callbacks, None
        handler = _handler()
        if callbacks is None or handler is None:
            return
        with contextlib.suppress(ValueError):  # somebody has cleared all callbacks
            handler.remove_start_callback(callbacks[0])
        with contextlib.suppress(ValueError):
            handler.remove_end_callback(callbacks[1])

    def _begins(self, _: Any) -> None:
        recorder = self._recorder
        if recorder.thread == get_ident() and not self._level:
            self._level = recorder.enter(COMPILE, recorder.clock())

    def _ends(self, _: Any) -> None:
        level, self._level = self._level, 0
        recorder = self._recorder
        if level and recorder.thread == get_ident():
            recorder.exit(level, recorder.clock())


def _handler() -> Any | None:
    """Return dynamo's callback handler; None before it was imported, or where torch has none."""
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
