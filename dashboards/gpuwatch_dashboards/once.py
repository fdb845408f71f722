"""A value made once for all who look at the same thing at about the same time: ten viewers cost little more than one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

HOLD_S = 1.0
T = TypeVar("T")


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    until_s: float = float("-inf")
    value: Any = None
    error: Exception | None = None


class Once:
    """Values by key, each held for a while. Any thread may ask; who asks for what is being made waits for it."""

    def __init__(self, hold_s: float = HOLD_S, now: Callable[[], float] = time.monotonic) -> None:
        self.hold_s = hold_s
        self._now = now
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}

    def get(self, key: Hashable, make: Callable[[], T], hold_s: Callable[[float], float] | None = None) -> T:
        """Return what `make` gave for this key, now or up to `hold_s` ago. Raises what it raised, for a second.

        `hold_s` turns the seconds that it took to make into those for which it is held.
        """
        with self._lock:
            if key not in self._entries:
                self._forget()
                self._entries[key] = _Entry()
            entry = self._entries[key]
        with entry.lock:
            if self._now() >= entry.until_s:
                entry.value, entry.error = None, None
                begin_s = self._now()
                try:
                    entry.value = make()
                except Exception as error:
                    entry.error = error
                end_s = self._now()
                held_s = self.hold_s if hold_s is None or entry.error is not None else hold_s(end_s - begin_s)
                entry.until_s = end_s + held_s
            if entry.error is not None:
                # without the frames of who asked before: they would pile up on it
                raise entry.error.with_traceback(None)
            made: T = entry.value
            return made

    def _forget(self) -> None:
        """Let go of what is over, so that links with times of their own do not pile up."""
        now_s = self._now()
        for key in [k for k, entry in self._entries.items() if entry.until_s < now_s and not entry.lock.locked()]:
            del self._entries[key]
