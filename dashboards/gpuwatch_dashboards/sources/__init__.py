"""Where the pages' numbers come from: a node's agent, or Prometheus."""

from __future__ import annotations

from gpuwatch_dashboards.sources.agent import AgentSource
from gpuwatch_dashboards.sources.prometheus import PrometheusSource
from gpuwatch_dashboards.sources.shared import SharedSource
from gpuwatch_dashboards.sources.source import Source

__all__ = ["AgentSource", "PrometheusSource", "SharedSource", "Source"]
