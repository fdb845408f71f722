"""The fixture node: a directory tree as the kernel would show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.node import Roots

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def node() -> Roots:
    """A node with four cores (one offline), an NVMe disk, a SATA disk, Ethernet and InfiniBand."""
    return Roots(procfs=FIXTURES / "node" / "proc", sysfs=FIXTURES / "node" / "sys", shm=FIXTURES)


@pytest.fixture
def bare(tmp_path: Path) -> Roots:
    """A node whose kernel shows nothing at all."""
    return Roots(procfs=tmp_path / "proc", sysfs=tmp_path / "sys", shm=tmp_path / "shm")


@pytest.fixture
def values():
    """Values by (metric, labels) of one turn of a collector."""

    def values(collect: Callable[[], Iterable[Sample]]) -> dict[tuple[str, ...], float]:
        return {(sample.metric, *sample.labels): sample.value for sample in collect()}

    return values
