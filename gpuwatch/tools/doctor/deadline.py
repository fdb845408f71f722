"""Call what may hang or crash, and come back in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A call in a thread of its own. One that hangs is left behind; as a daemon it does not hold up the program's end."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._result = call()
        except BaseException as error:  # whatever it is, it is the caller's to hear of
            self._error = error

    def result(self, timeout_s: float) -> T:
        """Return what the call returned, waiting at most `timeout_s`. Raises: TimeoutError; what the call raised."""
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # the call has ended without an error


class Once(Generic[T]):
    """A reading that several checks share: taken at the first call, by whichever thread comes first."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._taken: list[T] = []

    def __call__(self) -> T:
        with self._lock:
            if not self._taken:
                self._taken.append(self._read())
        return self._taken[0]
