"""Keep the user's signal handlers out of gpuwatch's own work: what they raise is the user's."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
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
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        # Python hands a handler the frame that it interrupts: its caller's. Which handler is set by now says nothing.
        if any(argument is traceback.tb_frame for argument in _arguments(traceback.tb_next.tb_frame)):
            return True
        traceback = traceback.tb_next
    return False


def pass_on(error: BaseException) -> None:
    """Raise the error again if a signal handler raised it: it is the user's. Otherwise it is gpuwatch's to deal with."""
    if raised_by_signal_handler(error):
        raise error


def _arguments(frame: FrameType) -> list[Any]:
    """Return what a function was called with."""
    code, given = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    named = [given.get(name) for name in code.co_varnames[:count]]
    return [*named, *given.get(code.co_varnames[count], ())] if code.co_flags & inspect.CO_VARARGS else named
