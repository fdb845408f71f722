"""torch's handler of SIGCHLD raises in the main thread, whatever that does: not in gpuwatch's work, but right after."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from gpuwatch.errors import pass_on
from gpuwatch.hook.session import sigchld_held


def raises(*_: Any) -> None:
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")


@pytest.fixture
def handler() -> Iterator[Any]:
    before = signal.signal(signal.SIGCHLD, raises)
    yield raises
    signal.signal(signal.SIGCHLD, before)


def test_what_a_handler_raises_comes_afterwards(handler: Any) -> None:
    done = []
    with pytest.raises(RuntimeError, match="killed by signal"), sigchld_held():
        os.kill(os.getpid(), signal.SIGCHLD)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_a_quiet_stretch_changes_nothing(handler: Any) -> None:
    with sigchld_held():
        pass
    assert signal.getsignal(signal.SIGCHLD) is handler
    with pytest.raises(RuntimeError):
        os.kill(os.getpid(), signal.SIGCHLD)


def test_without_a_handler_or_outside_of_the_main_thread_it_is_nothing(handler: Any) -> None:
    seen = []

    def other_thread() -> None:
        with sigchld_held():
            seen.append(signal.getsignal(signal.SIGCHLD))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with sigchld_held():
        seen.append(signal.getsignal(signal.SIGCHLD))
    assert seen == [handler, signal.SIG_DFL]


def passed_on_by(call: Callable[[], object]) -> bool:
    """Whether what a call raises is raised again."""
    with pytest.raises(Exception) as raised:
        call()
    try:
        pass_on(raised.value)
    except Exception as again:
        assert again is raised.value
        return True
    return False


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGCHLD)
    time.sleep(1)


class Handler:
    def method(self, _number: int, _frame: object) -> None:
        raises()

    __call__ = method


def gone(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise RuntimeError


@pytest.mark.parametrize(
    "of_the_user", [raises, Handler(), Handler().method, partial(raises, 1), gone, lambda *what: raises(*what)]
)
def test_what_a_handler_raises_is_distinguished_from_a_failure_of_ours(handler: Any, of_the_user: Any) -> None:
    signal.signal(signal.SIGCHLD, of_the_user)
    assert passed_on_by(interrupted)


@pytest.mark.parametrize("ours", [raises, lambda: [][0], lambda: int("x")])
def test_a_failure_of_ours_is_none_of_a_handler_even_where_both_call_the_same(handler: Any, ours: Any) -> None:
    assert not passed_on_by(ours)
