"""Collectors: each reads one thing of the node once a second. Adding one is a file here and a line in `build`."""

from __future__ import annotations

from gpuwatch_agent.collectors.agent_process import AgentProcessCollector
from gpuwatch_agent.collectors.base import Collector, Roots
from gpuwatch_agent.collectors.cpu import CpuCollector
from gpuwatch_agent.collectors.disk import DiskCollector
from gpuwatch_agent.collectors.gpu import GpuCollector
from gpuwatch_agent.collectors.load import LoadCollector
from gpuwatch_agent.collectors.memory import MemoryCollector
from gpuwatch_agent.collectors.network import NetworkCollector
from gpuwatch_agent.collectors.nvml import GpuDevice, GpuProcess
from gpuwatch_agent.collectors.pressure import PressureCollector
from gpuwatch_agent.collectors.shm import ShmCollector

__all__ = ["Collector", "GpuCollector", "GpuDevice", "GpuProcess", "Roots", "build"]


def build(roots: Roots) -> list[Collector]:
    """Return one of each collector, in the order in which they run. Nothing is read before `collect`."""
    return [
        CpuCollector(roots),
        LoadCollector(roots),
        PressureCollector(roots),
        MemoryCollector(roots),
        ShmCollector(roots),
        DiskCollector(roots),
        NetworkCollector(roots),
        AgentProcessCollector(roots),
        GpuCollector(),
    ]
