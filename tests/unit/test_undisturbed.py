"""torch's handler of SIGCHLD raises in the main thread, whatever it does: not while gpuwatch works, but right afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpuwatch.undisturbed import undisturbed


def raises(*_: Any) -> None:
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")


@pytest.fixture
def handler() -> Iterator[Any]:
    before = signal.signal(signal.SIGCHLD, raises)
    yield raises
    signal.signal(signal.SIGCHLD, before)


def test_what_a_handler_raises_comes_afterwards(handler: Any) -> None:
    done = []
    with pytest.raises(RuntimeError, match="killed by signal"), undisturbed():
        os.kill(os.getpid(), signal.SIGCHLD)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_a_quiet_stretch_changes_nothing(handler: Any) -> None:
    with undisturbed():
        pass
    assert signal.getsignal(signal.SIGCHLD) is handler
    with pytest.raises(RuntimeError):
        os.kill(os.getpid(), signal.SIGCHLD)


def test_without_a_handler_or_outside_of_the_main_thread_it_is_nothing(handler: Any) -> None:
    seen = []

    def other_thread() -> None:
        with undisturbed():
            seen.append(signal.getsignal(signal.SIGCHLD))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with undisturbed():
        seen.append(signal.getsignal(signal.SIGCHLD))
    assert seen == [handler, signal.SIG_DFL]
