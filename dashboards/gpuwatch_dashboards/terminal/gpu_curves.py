"""The last minutes of each GPU, by the panels' own queries, and how the chosen one's are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.text import Text

from gpuwatch.api import Points
from gpuwatch_dashboards.model import Scope, Span
from gpuwatch_dashboards.palette import BLUE, GREEN, ORANGE
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.query import Query
from gpuwatch_dashboards.sources import Source
from gpuwatch_dashboards.terminal.curve_lines import Curve, curve_lines, last
from gpuwatch_dashboards.units import display

SPAN_S, POINTS = 300.0, 100
_QUERIES = (
    BY_KEY["gpu_utilization"].curves[0].query,
    BY_KEY["gpu_memory"].curves[0].query,
    BY_KEY["gpu_power"].curves[0].query,
    Query("gpuwatch_gpu_temperature_celsius", by=("gpu", "UUID")),
)

Key = tuple[str, str]
"""A GPU's index and UUID."""


@dataclass(frozen=True)
class GpuCurves:
    """What was sampled of every GPU, by its key; empty where nothing was."""

    start_s: float = 0.0
    end_s: float = 0.0
    utilization: Mapping[Key, Points] = field(default_factory=dict)
    memory: Mapping[Key, Points] = field(default_factory=dict)
    power_watts: Mapping[Key, Points] = field(default_factory=dict)
    temperature_celsius: Mapping[Key, Points] = field(default_factory=dict)


def read_gpu_curves(source: Source, scope: Scope, now_s: float) -> GpuCurves:
    """Return the curves of all GPUs of a node. Raises SourceError."""
    span = Span(now_s - SPAN_S, now_s, POINTS)
    answers = source.evaluate(list(_QUERIES), scope, span)
    by_key = [{(t.labels.get("gpu", ""), t.labels.get("UUID", "")): t.points for t in traces} for traces in answers]
    return GpuCurves(span.start_s, span.end_s, *by_key)


def gpu_curve_lines(curves: GpuCurves, key: Key, width: int, rows: int = 1) -> list[Text]:
    """Return one GPU's curves; none where nothing was sampled."""
    utilization, memory = curves.utilization.get(key, ()), curves.memory.get(key, ())
    power, heat = curves.power_watts.get(key, ()), curves.temperature_celsius.get(key, ())
    if not (utilization or memory or power or heat):
        return []
    degrees = last(heat)
    drawn = [
        Curve("utilisation", utilization, display(last(utilization), "ratio"), BLUE),
        Curve("memory", memory, display(last(memory), "ratio"), GREEN),
        Curve("power", power, display(last(power), "watts"), ORANGE, None),
        Curve("temperature", heat, "–" if degrees is None else f"{degrees:.0f} °C", "default", 100.0),
    ]
    return curve_lines(drawn, curves.start_s, curves.end_s, width, rows)
