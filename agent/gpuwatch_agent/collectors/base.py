"""What every collector shares: its protocol, where the kernel's file systems are, and how a file of theirs is read."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.options import STANDARD as STANDARD
from gpuwatch_agent.options import Choice as Choice
from gpuwatch_agent.options import Roots as Roots


class Collector(Protocol):
    """One thing of the node.

    `collect` is called from one thread, once a second, and gives samples of catalogued metrics. It raises `NoData`
    where there is nothing to measure on this node (said once, quietly) and anything else for a failure (counted).
    A value that the system does not tell is left out, never given as 0.
    """

    name: str

    def collect(self) -> Iterable[Sample]: ...


@contextmanager
def psutil_at(procfs: Path) -> Iterator[None]:
    """Have psutil read this /proc: it keeps the place in a variable of its module. For one thread.

    Raises: NoData where the file that it wants is absent.
    """
    before = psutil.PROCFS_PATH
    psutil.PROCFS_PATH = str(procfs)
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoData(f"{error.filename} does not exist here") from None
    finally:
        psutil.PROCFS_PATH = before


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
