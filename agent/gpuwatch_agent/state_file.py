"""A small file of what has to survive a restart, next to the history."""

import logging
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gpuwatch.wire import UNDECODABLE

logger = logging.getLogger(__name__)

State = TypeVar("State")


class StateFile(Generic[State]):
    """`state` as an earlier process saved it; a new one without a file, and after a damaged one."""

    def __init__(self, path: Path | None, kind: type[State], what: str) -> None:
        """`path` None: nothing is kept. `what` names it in the log."""
        self._path, self._what = path, what
        self._saved, self._fails = b"", False
        self.state = kind()
        if path is not None and path.exists():
            try:
                self.state = msgspec.json.decode(path.read_bytes(), type=kind)
            except (OSError, *UNDECODABLE) as error:
                logger.warning("%s cannot be read (%s): discarding previous %s", path, error, what)

    def save(self) -> None:
        """Write the state if it has changed, and again while that fails; the first failure and the next success are logged."""
        body = msgspec.json.encode(self.state)
        if self._path is None or body == self._saved:
            return
        try:
            new = self._path.with_name(self._path.name + ".new")
            new.write_bytes(body)
            new.replace(self._path)
        except OSError as error:
            if not self._fails:
                message = "the state of %s cannot be written to %s: %s; trying again"
                logger.warning(message, self._what, self._path, error.strerror)
            self._fails = True
            return
        if self._fails:
            logger.warning("the state of %s is written to %s again", self._what, self._path)
        self._saved, self._fails = body, False
