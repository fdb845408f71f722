"""Panels over a site as Grafana's: numbers, tables, charts."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import common, prometheus, stat, table
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from gpuwatch_dashboards.grafana.curves import Drawn, curves
from gpuwatch_dashboards.grafana.looks import DECIMALS, UNITS, UP, cell_link, prop, thresholds
from gpuwatch_dashboards.grafana.uids import PAGES, page_id
from gpuwatch_dashboards.grafana.variables import source
from gpuwatch_dashboards.panels.site_panel import SiteCurve, SitePanel

TABLE_POINTS = 200
"""Steps into which a table's range is cut: GPU-hours are sums over them."""


def site_panel(panel: SitePanel) -> Any:
    """Return the builder of a panel without its place on the grid."""
    if panel.shape in ("lines", "stack"):
        return curves(
            panel.title,
            panel.question,
            panel.unit,
            [Drawn(curve.expr, curve.legend) for curve in panel.curves],
            empty=panel.empty,
            stacked=panel.shape == "stack",
            maximum=panel.maximum,
            limits=panel.thresholds,
        )
    built = _number(panel) if panel.shape == "number" else _table(panel)
    built = built.title(panel.title).description(panel.question).datasource(source()).no_value(panel.empty)
    return built.unit(UNITS[panel.unit])


def _number(panel: SitePanel) -> stat.Panel:
    built = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(common_models.BigValueColorMode.VALUE if panel.thresholds else common_models.BigValueColorMode.NONE)
        .thresholds(thresholds(panel.thresholds, "text"))
        .max_data_points(TABLE_POINTS)
    )
    if panel.unit in DECIMALS:
        built = built.decimals(DECIMALS[panel.unit])
    return built.with_target(_instant(panel.curves[0], 0, prometheus_models.PromQueryFormat.TIME_SERIES))


def _table(panel: SitePanel) -> table.Panel:
    linked = any(column.link == "runbook" for column in panel.columns)
    built = (
        table.Panel().show_header(True).thresholds(thresholds(panel.thresholds, "text")).max_data_points(TABLE_POINTS)
    )
    for number, curve in enumerate(panel.curves):
        wanted = SiteCurve(with_runbook(curve.expr), curve.legend, curve.unit) if linked else curve
        built = built.with_target(_instant(wanted, number, prometheus_models.PromQueryFormat.TABLE))
    if len(panel.curves) > 1:
        built = built.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    built = built.with_transformation(models.DataTransformerConfig(id_val="organize", options=_columns(panel)))
    for column in panel.columns:
        if column.link is not None:
            built = built.override_by_name(column.title, [cell_link(column.link)])
    for curve in panel.curves:
        properties = _value_properties(curve, panel)
        if curve.legend and properties:
            built = built.override_by_name(curve.legend, properties)
    if linked:
        built = built.override_by_name("runbook", [prop("custom.hidden", True)])
    if panel.sort:
        built = built.sort_by([common.TableSortByFieldState().display_name(panel.sort).desc(True)])
    return built


def _value_properties(curve: SiteCurve, panel: SitePanel) -> list[models.DynamicConfigValue]:
    unit = curve.unit or panel.unit
    found = [prop("unit", UNITS[unit])]
    if unit in DECIMALS:
        found.append(prop("decimals", DECIMALS[unit]))
    if unit == "up":
        found += [prop("mappings", UP), prop("custom.cellOptions", {"type": "color-text"})]
    elif panel.thresholds:
        found.append(prop("custom.cellOptions", {"type": "color-text"}))
    return found


def _columns(panel: SitePanel) -> dict[str, Any]:
    """Return the options of Grafana's `organize`: labels first, then values, by the names that people read.

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


def _instant(curve: SiteCurve, number: int, form: Any) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(curve.expr).instant().format(form)


def with_runbook(expr: str) -> str:
    """Return an expression of alerts with a label `runbook`: the id of the panel that a link leads to."""
    for page in PAGES[:-1]:
        expr = f"label_replace({expr}, {json.dumps('runbook')}, {json.dumps(str(page_id(page)))}, "
        expr += f"{json.dumps('alertname')}, {json.dumps(page)})"
    return expr
