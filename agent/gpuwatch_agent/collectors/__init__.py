"""Collectors: each reads one thing of the node once a second. Adding one is a file here and a line in `build`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpuwatch.metrics import Sample


@dataclass(frozen=True)
class Roots:
    """Where the kernel's file systems are: other places in a container or a test."""

    procfs: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    shm: Path = Path("/dev/shm")


class Collector(Protocol):
    """One thing of the node.

    `collect` is called from one thread, once a second, and gives samples of catalogued metrics. It raises `NoData`
    where there is nothing to measure on this node (said once, quietly) and anything else for a failure (counted).
    A value that the system does not tell is left out, never given as 0.
    """

    name: str

    def collect(self) -> Iterable[Sample]: ...
