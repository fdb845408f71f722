"""A value made once for all who ask for the same at about the same time: ten viewers cost little more than one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

HOLD_S = 1.0
T = TypeVar("T")


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.until_s = float("-inf")
        self.value: Any = None
        self.error: Exception | None = None


class Once:
    """Values by key, each held for a while. Thread-safe: a second caller waits for the value that is being made."""

    def __init__(self, hold_s: float = HOLD_S, now: Callable[[], float] = time.monotonic) -> None:
        self.hold_s = hold_s
        self._now = now
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}

    def get(self, key: Hashable, make: Callable[[], T], hold_s: Callable[[float], float] | None = None) -> T:
        """Return what `make` returned for this key, now or up to `hold_s` ago. Raises what it raised, for a second.

        `hold_s` turns the seconds that it took to make into those for which it is held.
        """
        with self._lock:
            if key not in self._entries:
                now_s = self._now()  # links with fixed times would pile up
                for old in [k for k, e in self._entries.items() if e.until_s < now_s and not e.lock.locked()]:
                    del self._entries[old]
                self._entries[key] = _Entry()
            entry = self._entries[key]
        with entry.lock:
            begin_s = self._now()
            if begin_s >= entry.until_s:
                entry.value, entry.error = None, None
                try:
                    entry.value = make()
                except Exception as error:
                    entry.error = error
                end_s = self._now()
                held_s = self.hold_s if hold_s is None or entry.error is not None else hold_s(end_s - begin_s)
                entry.until_s = end_s + held_s
            if entry.error is not None:
                # without the frames of an earlier caller: they would pile up on it
                raise entry.error.with_traceback(None)
            made: T = entry.value
            return made
