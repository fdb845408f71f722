"""The list of panels: the one source of the Streamlit pages and of the Grafana dashboards.

To add a panel, add it to one of these files (or add a file, and its name here).
"""

from __future__ import annotations

from gpuwatch_dashboards.panels.gpu import GPU_PANELS
from gpuwatch_dashboards.panels.node import NODE_PANELS
from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold
from gpuwatch_dashboards.panels.run import RUN_PANELS

PANELS: tuple[Panel, ...] = (*RUN_PANELS, *GPU_PANELS, *NODE_PANELS)

BY_KEY: dict[str, Panel] = {panel.key: panel for panel in PANELS}

__all__ = ["BY_KEY", "GPU_PANELS", "NODE_PANELS", "PANELS", "RUN_PANELS", "Curve", "Panel", "Threshold"]
