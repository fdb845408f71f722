"""A program of the diagnosis benchmark, and what all of them share: a clock that ends them, work of a known cost."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

HEALTHY: tuple[str, ...] = ()
_BLOB = zlib.compress(bytes(range(256)) * 64, 1)


@dataclass(frozen=True)
class Program:
    """A training with a known truth."""

    name: str
    main: Callable[[Clock], None]
    causes: tuple[str, ...]
    """What is wrong with it, the strongest first; HEALTHY: nothing is."""
    seconds: float = 20.0
    also: tuple[str, ...] = ()
    """What may be reported besides the causes, because it is true as well."""
    node: str = "real"
    """If "alone", the node whose CPUs the agent sees has 16 cores, on which nothing else runs (see `alone`)."""
    gpu: bool = False
    """The node has a GPU: a fake NVML, whose readings the program's own fake device makes."""
    cuda: bool = False
    """It trains on a real GPU, whose own driver the agent reads."""
    shm_mib: int | None = None
    """Size of its own /dev/shm."""
    ranks: int = 1
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Of the agent's configuration file, so that what takes minutes to prove takes seconds."""
    cpu_bound: bool = False
    """Runs alone, after the others."""
    hook_sees: bool = True
    """The hook's own verdict is to name the cause as well; else it takes an agent."""
    mixed: bool = False
    """Its causes do not follow from each other."""


class Clock:
    """How long a program has."""

    def __init__(self, seconds: float) -> None:
        self.begin = time.monotonic()
        self.seconds = seconds

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.begin

    @property
    def over(self) -> bool:
        return self.passed_s >= self.seconds


def decode(cpu_s: float) -> None:
    """Unpack compressed bytes until it has cost so much CPU time."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        zlib.decompress(_BLOB)
