"""Calls that may never come back, made in a thread that can be given up on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Call:
    """One function on its way through the thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.begin_s = time.monotonic()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # given on to the caller, who waits for it
            self.error = error
        self.done.set()


class DeadlineThread:
    """A daemon thread that runs one call at a time, which its caller waits for until a deadline and no longer.

    A call in a driver cannot be killed. Past the deadline it is left alone, no second one is started beside it, and
    once it has come back (to `call` its late result is nothing) the next call goes ahead. The interpreter's exit does not wait
    for it. For one calling thread.
    """

    def __init__(self, what: str, deadline_s: float) -> None:
        self._what = what
        self._deadline_s = deadline_s
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: _Call | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, or raise what it raises.

        Raises: TimeoutError if it does not come back before the deadline, and at once while an earlier call is away.
        """
        late = f"{self._what} did not answer within {self._deadline_s:g} s"
        if self._overdue is not None and not self._overdue.done.is_set():
            raise TimeoutError(late)
        self._overdue = None
        call = self._begin(function)
        if not call.done.wait(self._deadline_s):
            self._overdue = call
            raise TimeoutError(late)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def offer(self, function: Callable[[], T], wait_s: float) -> T | None:
        """Begin `function` unless an earlier one is under way, and wait a moment; return its result, None while it is not done.

        A result that came late is given at the next call. Raises: what the function raises, and TimeoutError for one
        that is away for longer than the deadline.
        """
        call = self._overdue or self._begin(function)
        if not call.done.wait(wait_s):
            self._overdue = call
            if time.monotonic() - call.begin_s > self._deadline_s:
                raise TimeoutError(f"{self._what} did not answer within {self._deadline_s:g} s")
            return None
        self._overdue = None
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def _begin(self, function: Callable[[], Any]) -> _Call:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"gpuwatch-{self._what}", daemon=True)
            self._thread.start()
        call = _Call(function)
        self._calls.put(call)
        return call

    def _run(self) -> None:
        while True:
            self._calls.get().run()
