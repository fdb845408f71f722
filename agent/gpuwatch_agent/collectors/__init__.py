"""Collectors: each reads one thing of the node once a second. Adding one is a file here and a line in `build`."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch_agent.collectors.amd import AmdCollector
from gpuwatch_agent.collectors.base import STANDARD, Choice, Collector, GpuDevice, GpuProcess, GpuSource, Roots
from gpuwatch_agent.collectors.dcgm import DcgmCollector
from gpuwatch_agent.collectors.gpu import GpuCollector
from gpuwatch_agent.collectors.infiniband import InfinibandCollector
from gpuwatch_agent.collectors.node import (
    AgentProcessCollector,
    CpuCollector,
    DiskCollector,
    LoadCollector,
    MemoryCollector,
    NetworkCollector,
    PressureCollector,
    ShmCollector,
)

__all__ = [
    "STANDARD",
    "Choice",
    "Collector",
    "GpuCollector",
    "GpuDevice",
    "GpuProcess",
    "GpuSource",
    "Roots",
    "build",
    "gpu_source",
]


def build(roots: Roots, choice: Choice = STANDARD) -> list[Collector]:
    """Return one of each collector, in the order in which they run. Before `collect` they read nothing."""
    return [
        CpuCollector(roots, cores=choice.full),
        LoadCollector(roots),
        PressureCollector(roots),
        MemoryCollector(roots),
        ShmCollector(roots),
        DiskCollector(roots),
        NetworkCollector(roots),
        InfinibandCollector(roots),
        AgentProcessCollector(roots),
        _gpus(roots, choice),
    ]


def _gpus(roots: Roots, choice: Choice) -> GpuSource:
    """Return what tells of GPUs: the dcgm-exporter that was named; amdsmi where AMD's driver is loaded and NVIDIA's is not; else NVML."""
    if choice.dcgm_url is not None:
        return DcgmCollector(choice.dcgm_url)
    modules = roots.sysfs / "module"
    return AmdCollector() if (modules / "amdgpu").is_dir() and not (modules / "nvidia").is_dir() else GpuCollector()


def gpu_source(collectors: Sequence[Collector]) -> GpuSource | None:
    """Return the one of these collectors that knows the GPUs."""
    return next((c for c in collectors if isinstance(c, GpuCollector | DcgmCollector | AmdCollector)), None)
