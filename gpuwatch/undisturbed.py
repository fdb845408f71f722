"""Keep torch's answer to a dead loader worker out of gpuwatch's own work: it is raised wherever the main thread happens to be."""

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
