"""One panel of the list as Grafana's: charts, numbers, tables, with units, thresholds, colours and links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports.display import BLUE, LOOKS, ORANGE, SAND, VERMILLION, Look
from gpuwatch_dashboards.grafana.files import FLEET, MONEY, NODE, RUN, runbook_url
from gpuwatch_dashboards.model import Scope
from gpuwatch_dashboards.panels.panel import Curve, Link, Panel, Severity, Threshold
from gpuwatch_dashboards.query.evaluate import Match, Query
from gpuwatch_dashboards.query.promql import of_a_run, render

TABLE_POINTS = 200
"""Steps into which a table's range is cut: GPU-hours are sums over them."""
WINDOW = "$__rate_interval"
UNITS: Mapping[str, str] = {
    "s": "s",
    "ratio": "percentunit",
    "bytes": "bytes",
    "bytes/s": "binBps",
    "1/s": "ops",
    "watts": "watt",
    "celsius": "celsius",
    "hertz": "hertz",
    "hours": "h",
    "money": MONEY,
    "money/h": MONEY,
    "1": "short",
    "up": "short",
}
DECIMALS: Mapping[str, int] = {"hours": 1, "money": 2, "money/h": 2}
COLOURS: Mapping[Severity, str] = {"warning": ORANGE, "critical": VERMILLION}
_LOOKS: Mapping[str, Mapping[str, Look]] = {
    **LOOKS,
    "kind": {**LOOKS["kind"], "stalled": replace(LOOKS["kind"]["stalled"], colour=SAND)},
}
"""Grafana has no hatching to tell stalled from held idle."""
_KEEP = "${datasource:queryparam}&${__url_time_range}"
_TARGETS: Mapping[Link, tuple[str, str]] = {
    "fleet": ("Fleet", f"/d/{FLEET}?{_KEEP}"),
    "node": ("Node ${__value.text}", f"/d/{NODE}?var-instance=${{__value.text}}&{_KEEP}"),
    "run": ("Run ${__value.text}", f"/d/{RUN}?var-run=${{__value.text}}&{_KEEP}"),
    "user": ("GPUs of ${__value.text}", f"/d/{FLEET}?var-user=${{__value.text}}&{_KEEP}"),
    "job": ("Runs of job ${__value.text}", f"/d/{RUN}?var-job=${{__value.text}}&{_KEEP}"),
    "runbook": ("Runbook", runbook_url("${__value.text}")),
}
_UP: list[dict[str, Any]] = [
    {
        "type": "value",
        "options": {
            "0": {"text": "no", "color": VERMILLION, "index": 0},
            "1": {"text": "yes", "color": BLUE, "index": 1},
        },
    }
]
_DASHED = models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]})
_A_LINE = [
    models.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
    models.DynamicConfigValue("custom.fillOpacity", 0),
    models.DynamicConfigValue("custom.lineWidth", 2),
]


def source() -> models.DataSourceRef:
    """Return the reference to the datasource that the reader selected."""
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def build(panel: Panel, of_a_run_page: bool) -> Any:
    """Return the builder of a panel without its place on the grid."""
    if panel.kind == "stat":
        built: Any = _stat(panel, of_a_run_page)
    else:
        built = _table(panel) if panel.kind == "table" else _chart(panel, of_a_run_page)
    built = built.title(panel.title).description(panel.question).datasource(source())
    built = built.no_value(panel.empty).unit(UNITS[panel.unit])
    if panel.repeat:
        built = built.repeat(panel.repeat).repeat_direction("h")
    if panel.runbook:
        link = dashboard.DashboardLink("Runbook").type(models.DashboardLinkType.LINK)
        built = built.links([link.url(runbook_url(panel.runbook)).icon("doc").tooltip("What to do")])
    return built


def expression(curve: Curve, of_a_run_page: bool) -> str:
    """Return the PromQL of a curve with Grafana's variables, limited to the GPUs that are selected."""
    if curve.promql:
        return curve.promql
    scope = Scope(run="$run", rank="$rank", instance="$instance") if of_a_run_page else Scope(instance="$instance")
    return render(_of_gpus(curve.query), scope, WINDOW)


def _of_gpus(query: Query) -> Query:
    over = _of_gpus(query.over) if query.over else None
    chosen = (Match("gpu", "=~", "$gpu"),) if "gpu" in BY_NAME[query.metric].labels else ()
    return replace(query, where=(*query.where, *chosen), over=over)


def _legend(curve: Curve) -> str:
    """Return a legend as Grafana has it (`{gpu}` is `{{gpu}}` there), with the node where the metric is a node's."""
    of_node = curve.live is not None and not of_a_run(curve.live.metric)
    legend = f"{curve.legend} · {{instance}}" if of_node else curve.legend
    return re.sub(r"\{(\w+)\}", r"{{\1}}", legend)


def _chart(panel: Panel, of_a_run_page: bool) -> timeseries.Panel:
    built = (
        timeseries.Panel()
        .min(0)
        .line_width(0 if panel.stacked else 2)
        .fill_opacity(85 if panel.stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean" if panel.stacked else "lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if panel.maximum is not None:
        built = built.max(panel.maximum)
    if panel.stacked:
        built = built.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if panel.thresholds:
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
        built = built.thresholds(_thresholds(panel.thresholds, "transparent")).thresholds_style(style)
    for number, curve in enumerate(panel.curves):
        ref_id = chr(ord("A") + number)
        query = prometheus.Dataquery().ref_id(ref_id).expr(expression(curve, of_a_run_page))
        built = built.with_target(query.legend_format(_legend(curve)).range())
        for name, properties in _overrides(curve.legend):
            built = built.override_by_name(name, properties)
        if curve.dashed:
            built = built.override_by_query(ref_id, [_DASHED])
        if curve.over_stack:
            built = built.override_by_query(ref_id, _A_LINE)
    return built


def _stat(panel: Panel, of_a_run_page: bool) -> stat.Panel:
    coloured = common_models.BigValueColorMode.VALUE if panel.thresholds else common_models.BigValueColorMode.NONE
    built = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(coloured)
        .thresholds(_thresholds(panel.thresholds, "text"))
        .max_data_points(TABLE_POINTS)
    )
    if panel.unit in DECIMALS:
        built = built.decimals(DECIMALS[panel.unit])
    form = prometheus_models.PromQueryFormat.TIME_SERIES
    return built.with_target(_instant(expression(panel.curves[0], of_a_run_page), 0, form))


def _table(panel: Panel) -> table.Panel:
    limits = _thresholds(panel.thresholds, "text")
    built = table.Panel().show_header(True).thresholds(limits).max_data_points(TABLE_POINTS)
    for number, curve in enumerate(panel.curves):
        built = built.with_target(_instant(curve.promql, number, prometheus_models.PromQueryFormat.TABLE))
    if len(panel.curves) > 1:
        built = built.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    built = built.with_transformation(models.DataTransformerConfig(id_val="organize", options=_columns(panel)))
    for column in panel.columns:
        if column.link is not None:
            title, url = _TARGETS[column.link]
            built = built.override_by_name(column.title, [_property("links", [{"title": title, "url": url}])])
    for curve in panel.curves:
        if curve.legend:
            built = built.override_by_name(curve.legend, list(_value_properties(curve, panel)))
    if panel.sort:
        built = built.sort_by([common.TableSortByFieldState().display_name(panel.sort).desc(True)])
    return built


def _value_properties(curve: Curve, panel: Panel) -> Iterator[models.DynamicConfigValue]:
    unit = curve.unit or panel.unit
    yield _property("unit", UNITS[unit])
    if unit in DECIMALS:
        yield _property("decimals", DECIMALS[unit])
    if unit == "up":
        yield _property("mappings", _UP)
    if unit == "up" or panel.thresholds:
        yield _property("custom.cellOptions", {"type": "color-text"})


def _columns(panel: Panel) -> dict[str, Any]:
    """Return the options of Grafana's `organize`: labels first, then values, by their titles.

    A table's only value column is called "Value", one of several "Value #A", "Value #B" … by their queries.
    """
    values = [f"Value #{chr(ord('A') + n)}" for n in range(len(panel.curves))]
    names = {column.label: column.title for column in panel.columns}
    hidden = {"Time": True}
    for value, curve in zip(values, panel.curves, strict=True):
        for name in (value, "Value") if len(values) == 1 else (value,):
            if curve.legend:
                names[name] = curve.legend
            else:
                hidden[name] = True
    return {
        "excludeByName": hidden,
        "renameByName": names,
        "indexByName": {name: place for place, name in enumerate(names)},
    }


def _instant(expr: str, number: int, form: Any) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(expr).instant().format(form)


def _thresholds(limits: Sequence[Threshold], below: str) -> dashboard.ThresholdsConfig:
    """Return a panel's thresholds; `below` is the colour of values under all of them."""
    steps = [models.Threshold(value=None, color=below)]
    steps += [models.Threshold(value=limit.value, color=COLOURS[limit.severity]) for limit in limits]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _property(name: str, value: Any) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(name, value)


def _overrides(legend: str) -> Iterator[tuple[str, list[models.DynamicConfigValue]]]:
    """Yield colour and name of each state, phase or kind, by the name that the legend format gives it."""
    for value, look in _LOOKS.get(legend.strip("{}"), {}).items():
        colour = {"mode": "fixed", "fixedColor": look.colour}
        yield value, [_property("displayName", look.name), _property("color", colour)]
