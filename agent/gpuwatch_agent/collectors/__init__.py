"""Collectors: each samples one subject of the node once a second. Add a function or a class to `node.COLLECTORS`."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from gpuwatch import api
from gpuwatch.config import AgentSettings
from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors import node
from gpuwatch_agent.collectors.amd import AmdCollector
from gpuwatch_agent.collectors.dcgm import DcgmCollector
from gpuwatch_agent.collectors.drivers import DriverCollector
from gpuwatch_agent.collectors.node import DEFAULTS, Roots
from gpuwatch_agent.collectors.nvml import GpuCollector

logger = logging.getLogger(__name__)


class Collector(NamedTuple):
    """One subject of the node.

    `collect` is called from one thread, once a second, and returns samples of catalogued metrics. It raises `NoData`
    where there is nothing to measure on this node (logged once, at info) and anything else for a failure (counted).
    What was not measured is absent, never 0.
    """

    name: str
    collect: Callable[[], Iterable[Sample]]


def build(roots: Roots, gpus: DriverCollector) -> list[Collector]:
    """Return one of each collector, in the order in which they run. Before `collect` they read nothing."""
    made = ((of, of(roots).collect if isinstance(of, type) else partial(of, roots)) for of in node.COLLECTORS)
    return [*(Collector(name_of(of), collect) for of, collect in made), Collector("gpu", gpus.collect)]


def name_of(collector: Callable[..., object]) -> str:
    """Return the name of a collector: that of its function, or of its class without its end."""
    return collector.__name__.removesuffix("Collector").lower()


def gpu_source(roots: Roots, settings: AgentSettings = DEFAULTS) -> DriverCollector:
    """Return the GPU collector: dcgm-exporter's if configured; amdsmi's if only AMD's driver is loaded; else NVML's."""
    if settings.dcgm is not None:
        return DcgmCollector(settings.dcgm)
    modules = roots.sysfs / "module"
    return AmdCollector() if (modules / "amdgpu").is_dir() and not (modules / "nvidia").is_dir() else GpuCollector()


class CollectorRunner:
    """Runs all collectors of the node. A collector's new message is logged, repetitions are not."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors
        self._last_message: dict[str, str | None] = {}
        self.outcomes: list[api.Collector] = []

    def tick(self) -> list[Sample]:
        """Return the samples of all collectors, with their own durations and success."""
        samples: list[Sample] = []
        self.outcomes = [self._one(collector, samples) for collector in self._collectors]
        failed = ((each.name, float(not each.success)) for each in self.outcomes if each.success is not None)
        return samples + [Sample("gpuwatch_collector_failed", value, (name,)) for name, value in failed]

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
        outcome = api.Collector(collector.name, success, message, time.perf_counter() - begin)
        if self._last_message.get(collector.name) != message:
            self._last_message[collector.name] = message
            if message is None:
                logger.info("collector %s works again", collector.name)
            elif success is None:
                logger.info("collector %s: nothing to measure here: %s", collector.name, message)
            else:
                logger.warning("collector %s failed: %s", collector.name, message)
        return outcome
