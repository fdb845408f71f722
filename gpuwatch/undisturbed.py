"""Keep the user's signal handlers out of gpuwatch's own work: what they raise is the user's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold Python's handler of SIGCHLD back for as long as this is open, and call it afterwards if it was due: what it raises is the user's.

    torch's handler raises "DataLoader worker (pid …) is killed by signal" (torch.utils.data._utils.signal_handling). Within gpuwatch, where
    nothing is ever raised into the training, it would be taken for a failure of gpuwatch's, at the very moment at which it has most to tell.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGCHLD, lambda *what: held.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if held:
            handler(*held[-1])


def raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether a Python signal handler raised this, so that it only happened to interrupt gpuwatch."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _code(handler: Any) -> Any:
    """Return the code that runs when a handler is called; None for one that is not of Python."""
    while not hasattr(handler, "__code__"):
        inner = getattr(handler, "func", None) or getattr(handler, "__func__", None)
        if inner is None:
            return getattr(vars(type(handler)).get("__call__"), "__code__", None)
        handler = inner
    return handler.__code__
