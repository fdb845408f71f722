"""Threads of the agent: work in the background, calls that may hang (a driver, a disk) with a deadline, rare logs."""

import queue
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from threading import Event, Thread
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Background:
    """Work in a daemon thread of its own: a subclass's `_run`, which returns when `_stop` is set."""

    def __init__(self, name: str, end_s: float) -> None:
        """`end_s`: for so long `stop` waits for the work in progress."""
        self._stop, self._end_s = Event(), end_s
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the work in progress."""
        self._stop.set()
        self._thread.join(self._end_s)

    def _run(self) -> None:
        raise NotImplementedError


class Rarely:
    """Says whether a kind of message may be logged: each once in `every_s`. Beyond 100 kinds all are forgotten."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._logged_s: dict[str, float] = {}

    def __call__(self, kind: str) -> bool:
        now_s = self._clock()
        if kind in self._logged_s and now_s - self._logged_s[kind] < self._every_s:
            return False
        if len(self._logged_s) > 100:
            self._logged_s.clear()
        self._logged_s[kind] = now_s
        return True


class DeadlineThread:
    """A daemon thread that runs one call at a time, for which its caller waits until a deadline.

    A driver's call cannot be killed. Past the deadline it is abandoned: no other starts until it returns (`call` drops
    its late result), and the interpreter exits without it. The thread ends with its object. For one calling thread.
    """

    def __init__(self, what: str, deadline_s: float) -> None:
        self._what = what
        self._deadline_s = deadline_s
        self._calls: queue.SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: Thread | None = None
        self.pending: futures.Future[Any] | None = None  # a call whose result was not taken yet
        self._begin_s = 0.0

    def call(self, function: Callable[[], T]) -> T:
        """Return its result. Raises: its error; TimeoutError past the deadline, at once if an earlier call overruns."""
        if self.pending is not None and not self.pending.done():
            raise self._late()
        self.pending = None
        return cast(T, self.offer(function, self._deadline_s))

    def offer(self, function: Callable[[], T], wait_s: float) -> T | None:
        """Start `function` unless an earlier one runs, and wait `wait_s`; return its result, None while it is not done.

        A late result is returned by the next call. Raises: what the function raises; TimeoutError past the deadline.
        """
        future = self.pending = self.pending or self._begin(function)
        try:
            with suppress(futures.TimeoutError):
                future.exception(wait_s)
            if future.done():
                self.pending = None
                result: T = future.result()
                return result
            if time.monotonic() - self._begin_s >= self._deadline_s:
                raise self._late()
            return None
        finally:
            del future  # with an exception's traceback it would keep the caller's frames

    def _begin(self, function: Callable[[], Any]) -> futures.Future[Any]:
        if self._thread is None:
            self._thread = Thread(target=_run, args=(self._calls,), name=f"gpuwatch-{self._what}", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.put, None).atexit = False
        self._begin_s = time.monotonic()
        future: futures.Future[Any] = futures.Future()
        self._calls.put((future, function))
        return future

    def _late(self) -> TimeoutError:
        return TimeoutError(f"{self._what} did not answer within {self._deadline_s:g} s")


def _run(calls: "queue.SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]] | None]") -> None:
    while (call := calls.get()) is not None:
        future, function = call
        try:
            future.set_result(function())
        except BaseException as error:  # raised again in the calling thread
            future.set_exception(error)
        del call, future, function  # while this thread waits, they would keep what they refer to
