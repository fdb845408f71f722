"""A small file of what has to survive a restart, next to the history."""

import logging
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gpuwatch.wire import UNDECODABLE
from gpuwatch_agent.deadline import DeadlineThread

logger = logging.getLogger(__name__)

State = TypeVar("State")


class StateFile(Generic[State]):
    """`state` as an earlier process saved it; a new one without a file, and after a damaged one."""

    def __init__(self, path: Path | None, kind: type[State], what: str) -> None:
        """`path` None: nothing is kept. `what` names it in the log."""
        self._path, self._what = path, what
        self._saved, self._failure = b"", ""
        self._thread = DeadlineThread("the disk", 2.0)
        self.state = kind()
        if path is not None and path.exists():
            try:
                self.state = msgspec.json.decode(path.read_bytes(), type=kind)
            except (OSError, *UNDECODABLE) as error:
                logger.warning("%s cannot be read (%s): discarding previous %s", path, error, what)

    def save(self) -> None:
        """Write the state if it has changed, or that failed last time; log when a failure begins and when it ends.

        It waits two seconds for a disk that hangs, and tries again once that has responded.
        """
        body, path = msgspec.json.encode(self.state), self._path
        if path is None or body == self._saved:
            return
        new = path.with_name(path.name + ".new")
        try:
            self._thread.call(lambda: (new.write_bytes(body), new.replace(path)))
            self._saved, failure = body, ""
        except OSError as error:
            self._saved = b""  # what hangs may still be written
            failure = f"cannot be written: {error.strerror or error}; trying again"
        if failure != self._failure:
            logger.warning("%s: the state of %s %s", path, self._what, failure or "is written again")
        self._failure = failure
