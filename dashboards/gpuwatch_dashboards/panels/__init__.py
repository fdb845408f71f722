"""The panels by group, for the Streamlit pages, the Grafana dashboards and `gpuwatch top`.

To add a panel, add it to a group's list (run.py, gpu.py, node.py, fleet.py). To add a group, add its list here.
"""

from collections.abc import Iterator

from gpuwatch_dashboards.panels.fleet import FLEET
from gpuwatch_dashboards.panels.gpu import GPU
from gpuwatch_dashboards.panels.node import AGENT, NODE
from gpuwatch_dashboards.panels.panel import Curve, Panel
from gpuwatch_dashboards.panels.run import RUN

GROUPS: dict[str, tuple[Panel, ...]] = {"fleet": FLEET, "run": RUN, "gpu": GPU, "node": NODE, "agent": AGENT}
PANELS: tuple[Panel, ...] = tuple(panel for group in GROUPS.values() for panel in group)
BY_KEY: dict[str, Panel] = {panel.key: panel for panel in PANELS}


def live_panels(*groups: str) -> Iterator[Panel]:
    """Yield the panels of these groups (default: all) that an agent can answer: those of `gpuwatch top`."""
    for name in groups or GROUPS:
        yield from (panel for panel in GROUPS[name] if panel.is_live)


__all__ = ["BY_KEY", "GROUPS", "PANELS", "Curve", "Panel", "live_panels"]
