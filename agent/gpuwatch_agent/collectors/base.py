"""What every collector shares: its protocol, and how a kernel file is read."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.options import Roots


class Collector(Protocol):
    """One subject of the node.

    `collect` is called from one thread, once a second, and returns samples of catalogued metrics. It raises `NoData` where there is
    nothing to measure on this node (logged once, at info) and anything else for a failure (counted). What was not measured is absent,
    never 0.
    """

    name: str

    def collect(self) -> Iterable[Sample]: ...


class OfNode:
    """Base of the collectors that read the kernel's file systems."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots


def read_text(path: Path) -> str:
    """Return a kernel file's text.

    Raises: NoData where the file is absent, or is there but belongs to a feature that the kernel was booted without
    (opening /proc/pressure/* gives EOPNOTSUPP under psi=0); OSError for every other failure.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise NoData(f"{path} does not exist here") from None
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        raise NoData(f"{path}: the kernel has this switched off") from None
