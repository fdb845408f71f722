"""What every collector shares: its protocol, how a kernel file is read, and how all of them are run. Collectors of GPUs have a wider protocol."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpuwatch import api
from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.options import STANDARD as STANDARD
from gpuwatch_agent.options import Choice as Choice
from gpuwatch_agent.options import Roots as Roots

Value = tuple[str, float, tuple[str, ...]]
"""A metric, its value, and the labels it has beyond gpu and UUID."""


@dataclass(frozen=True)
class GpuDevice:
    """A GPU as the driver lists it."""

    index: int
    """NVML's, in PCI order: neither CUDA's nor the minor number, and another one once a GPU before it is lost."""
    uuid: str
    name: str
    pci_bus_id: str
    """With a domain of eight digits, as in "00000000:3B:00.0"."""
    minor: int | None
    """The N of /dev/nvidiaN. None where there is none (WSL, some virtual GPUs)."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with a compute context on a GPU."""

    pid: int
    """In the node's pid namespace."""
    used_memory_bytes: int | None
    """Over all of the GPU's MIG instances. None where the driver has no figure."""


class Collector(Protocol):
    """One thing of the node.

    `collect` is called from one thread, once a second, and gives samples of catalogued metrics. It raises `NoData`
    where there is nothing to measure on this node (logged once, quietly) and anything else for a failure (counted).
    A value that the system does not give is left out, never given as 0.
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


class GpuSource(Collector, Protocol):
    """A collector of gpuwatch_gpu_* that knows which GPUs there are and which processes hold them."""

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that answered last, by index."""
        ...

    def processes(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Return the compute processes of each GPU by UUID; an absent UUID is not known."""
        ...

    def process_list_age_s(self, uuid: str) -> float:
        """Return how old a GPU's process list is, 0 where there is none."""
        ...


logger = logging.getLogger(__name__)


class CollectorRunner:
    """All collectors of the node. A new message of one is logged, its repetitions are not."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors
        self._last_message: dict[str, str | None] = {}
        self.outcomes: list[api.Collector] = []

    def tick(self) -> list[Sample]:
        """Return the samples of all collectors, with their own durations and success."""
        samples: list[Sample] = []
        outcomes = []
        for collector in self._collectors:
            outcome = self._one(collector, samples)
            outcomes.append(outcome)
            samples.append(Sample("gpuwatch_collector_duration_seconds", outcome.duration_s or 0.0, (outcome.name,)))
            if outcome.success is not None:
                samples.append(Sample("gpuwatch_collector_success", float(outcome.success), (outcome.name,)))
        self.outcomes = outcomes
        return samples

    def _one(self, collector: Collector, samples: list[Sample]) -> api.Collector:
        begin = time.perf_counter()
        success: bool | None = True
        message: str | None = None
        try:
            samples.extend(list(collector.collect()))
        except NoData as reason:
            success, message = None, str(reason)
        except Exception as error:
            success, message = False, f"{type(error).__name__}: {error}"
        self._say(collector.name, success, message)
        return api.Collector(collector.name, success, message, time.perf_counter() - begin)

    def _say(self, name: str, success: bool | None, message: str | None) -> None:
        if self._last_message.get(name) == message:
            return
        self._last_message[name] = message
        if message is None:
            logger.info("collector %s works again", name)
        elif success is None:
            logger.info("collector %s: nothing to measure here: %s", name, message)
        else:
            logger.warning("collector %s failed: %s", name, message)
