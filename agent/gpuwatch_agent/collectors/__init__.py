"""Collectors: each samples one subject of the node once a second. Add a function or a class to `node.COLLECTORS`."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

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

Collect = Callable[[], Iterable[Sample]]
"""Called from one thread, once a second; returns samples of catalogued metrics. It raises `NoData` where there is
nothing to measure on this node (logged once, at info) and anything else for a failure (counted). What was not measured
is absent, never 0."""


def build(roots: Roots, gpus: DriverCollector) -> dict[str, Collect]:
    """Return one of each collector by name, in the order in which they run. Before a call they read nothing."""
    made = {name_of(of): of(roots).collect if isinstance(of, type) else partial(of, roots) for of in node.COLLECTORS}
    return {**made, "gpu": gpus.collect}


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

    def __init__(self, collectors: Mapping[str, Collect]) -> None:
        self._collectors = collectors
        self.outcomes: list[api.Collector] = []

    def tick(self) -> list[Sample]:
        """Return the samples of all collectors, and which of them failed."""
        former = {each.name: each.message for each in self.outcomes}
        samples: list[Sample] = []
        self.outcomes = []
        for name, collect in self._collectors.items():
            begin = time.perf_counter()
            success: bool | None = True
            message: str | None = None
            try:
                samples.extend(list(collect()))
            except NoData as reason:
                success, message = None, str(reason)
            except Exception as error:
                success, message = False, f"{type(error).__name__}: {error}"
            self.outcomes.append(api.Collector(name, success, message, time.perf_counter() - begin))
            if success is not None:
                samples.append(Sample("gpuwatch_collector_failed", float(not success), (name,)))
            if message == former.get(name):
                continue
            if message is None:
                logger.info("collector %s works again", name)
            elif success is None:
                logger.info("collector %s: nothing to measure here: %s", name, message)
            else:
                logger.warning("collector %s failed: %s", name, message)
        return samples
