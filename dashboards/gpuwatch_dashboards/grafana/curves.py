"""Charts of lines and areas: a panel of the list as Grafana's time series panel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.models import common as common_models

from gpuwatch_dashboards.grafana.looks import UNITS, overrides, thresholds
from gpuwatch_dashboards.grafana.variables import source
from gpuwatch_dashboards.panels import Threshold


class Drawn(NamedTuple):
    """One query of a panel."""

    expr: str
    legend: str
    """With labels in braces."""
    dashed: bool = False
    over_stack: bool = False
    """A line over the panel's stack, not a part of it."""


def curves(
    title: str,
    question: str,
    unit: str,
    drawn: Sequence[Drawn],
    *,
    empty: str,
    stacked: bool = False,
    maximum: float | None = None,
    limits: Sequence[Threshold] = (),
) -> timeseries.Panel:
    """Return the panel without its place on the grid."""
    built = (
        timeseries.Panel()
        .title(title)
        .description(question)
        .datasource(source())
        .unit(UNITS[unit])
        .min(0)
        .no_value(empty)
        .line_width(0 if stacked else 2)
        .fill_opacity(85 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean" if stacked else "lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if maximum is not None:
        built = built.max(maximum)
    if stacked:
        built = built.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if limits:
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
        built = built.thresholds(thresholds(limits)).thresholds_style(style)
    for number, (expr, legend, dashed, over_stack) in enumerate(drawn):
        ref_id = chr(ord("A") + number)
        built = built.with_target(
            prometheus.Dataquery().ref_id(ref_id).expr(expr).legend_format(braces(legend)).range()
        )
        for name, properties in overrides(legend).items():
            built = built.override_by_name(name, properties)
        if dashed:
            built = built.override_by_query(ref_id, [_DASHED])
        if over_stack:
            built = built.override_by_query(ref_id, _A_LINE)
    return built


_DASHED = dashboard.dashboard.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]})

_A_LINE = [
    dashboard.dashboard.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
    dashboard.dashboard.DynamicConfigValue("custom.fillOpacity", 0),
    dashboard.dashboard.DynamicConfigValue("custom.lineWidth", 2),
]


def braces(legend: str) -> str:
    """Return a legend as Grafana has it: `{gpu}` is `{{gpu}}` there."""
    return re.sub(r"\{(\w+)\}", r"{{\1}}", legend)
