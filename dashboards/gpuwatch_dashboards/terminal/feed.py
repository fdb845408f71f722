"""Reads facts once a second in a thread of its own, so that keys answer at once even while an agent is slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from gpuwatch.errors import SourceError
from gpuwatch_dashboards.terminal.facts import Facts
from gpuwatch_dashboards.terminal.reader import Reader

REFRESH_S = 1.0


class Feed:
    """The latest facts, or why there are none. `changed` is called, in the feed's thread, when there is something new."""

    def __init__(self, reader: Reader, changed: Callable[[], None], every_s: float = REFRESH_S) -> None:
        self._reader, self._changed, self._every_s = reader, changed, every_s
        self.latest: Facts | SourceError | None = None
        self._wanted: str | None = None
        self._again = threading.Event()
        self._ended = False
        # a daemon: an agent that hangs must not keep the terminal from being given back
        self._thread = threading.Thread(target=self._run, name="gpuwatch-top", daemon=True)

    def want(self, run: str | None) -> None:
        """Choose the run in detail; it is read at once."""
        if run != self._wanted:
            self._wanted = run
            self._again.set()

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended = True
        self._again.set()

    def _run(self) -> None:
        while not self._ended:
            begun = time.monotonic()
            self._again.clear()
            try:
                self.latest = self._reader.read(self._wanted)
            except SourceError as error:
                self.latest = error
            self._changed()
            self._again.wait(max(0.05, self._every_s - (time.monotonic() - begun)))
