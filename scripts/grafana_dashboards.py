"""Write the three dashboards of dashboards/grafana from the groups of panels, with Grafana's own SDK."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, Literal

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models
from grafana_foundation_sdk.models.dashboard import DynamicConfigValue as Property

from gpuwatch.alerting.render import RUNBOOKS
from gpuwatch.tools.reports.display import BLUE, GREY, LOOKS, ORANGE, SAND, UNITS, VERMILLION, Look
from gpuwatch_dashboards.grafana import CHECKOUT, DATASOURCE, text
from gpuwatch_dashboards.panels import GROUPS, Curve, Panel, Severity, live_panels, title_of
from gpuwatch_dashboards.query import Scope, render

FLEET, NODE, RUN = "gpuwatch-fleet", "gpuwatch-node", "gpuwatch-run"
"""The dashboards' uids, which their URLs contain. Never changed: links and bookmarks depend on them."""
TAG = "gpuwatch"
COLUMNS = 24
HEIGHTS = {"stat": 4, "table": 8, "lines": 8, "stack": 8}
REPEATED_PER_LINE = 4
TABLE_POINTS = 200
"""Intervals of a table's time range: GPU-hours are sums over them."""
OF_NODE = Scope(instance="$instance", gpu="$gpu")
OF_RUN = replace(OF_NODE, run="$run", rank="$rank")
DECIMALS: Mapping[str, int] = {"hours": 1, "money": 2, "money/h": 2}


def runbook_url(page: str) -> str:
    """Return the default URL of an alert's runbook; of `causes` that of the list of causes."""
    return f"{RUNBOOKS}/../concepts/causes.md" if page == "causes" else f"{RUNBOOKS}/{page}.md"


COLOURS: Mapping[Severity, str] = {"warning": ORANGE, "critical": VERMILLION}
_LOOKS: Mapping[str, Mapping[str, Look]] = {
    **LOOKS,
    "kind": {**LOOKS["kind"], "stalled": replace(LOOKS["kind"]["stalled"], colour=SAND)},
}
"""Grafana has no hatching to distinguish stalled from held idle."""
_OF_JOB = '__name__=~"gpuwatch_run_info|gpuwatch_job_start_timestamp_seconds"'
"""Both have `job_id` and `run`: the scheduler's job, and GPUWATCH_JOB."""
_KEEP = "${datasource:queryparam}&${__url_time_range}"
_LINKS: Mapping[str, tuple[str, str]] = {
    "instance": ("Node ${__value.text}", f"/d/{NODE}?var-instance=${{__value.text}}&{_KEEP}"),
    "run": ("Run ${__value.text}", f"/d/{RUN}?var-run=${{__value.text}}&{_KEEP}"),
    "user": ("GPUs of ${__value.text}", f"/d/{FLEET}?var-user=${{__value.text}}&{_KEEP}"),
    "job_id": ("Runs of job ${__value.text}", f"/d/{RUN}?var-job=${{__value.text}}&{_KEEP}"),
    "alertname": ("Runbook", runbook_url("${__value.text}")),
}
"""By the label of a table's column: title and target of its values' links."""
_UP = {
    "type": "value",
    "options": {"0": {"text": "no", "color": VERMILLION, "index": 0}, "1": {"text": "yes", "color": BLUE, "index": 1}},
}
_DASHED = Property("custom.lineStyle", {"fill": "dash", "dash": [10, 10]})
_NOT_STACKED = [
    Property("custom.stacking", {"mode": "none", "group": "A"}),
    Property("custom.fillOpacity", 0),
    Property("custom.lineWidth", 2),
]
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def fleet_dashboard() -> dict[str, Any]:
    about = "All GPUs of a site: what they do, whose they are, what is lost. From recorded series."
    variables = (
        _variable("instance", "Node", "label_values(gpuwatch_build_info, instance)"),
        _variable("user", "User", 'label_values(gpuwatch_gpu_owner_info{user!=""}, user)'),
        _variable("job", "Job", 'label_values(gpuwatch_gpu_owner_info{job_id!=""}, job_id)'),
    )
    rows, marks = [("All GPUs", GROUPS["fleet"])], _annotations('instance=~"$instance"')[:1]
    return _board("GPU fleet", FLEET, about, ("now-24h", "1m"), variables, rows, OF_NODE, marks)


def node_dashboard() -> dict[str, Any]:
    variables = (
        _variable("instance", "Node", "label_values(gpuwatch_build_info, instance)", "one"),
        _variable("gpu", "GPU", 'label_values(gpuwatch_gpu_info{instance=~"$instance"}, gpu)', "each"),
    )
    about = "One node: its GPUs, runs, limits and agent."
    rows = [("The node", GROUPS["node"]), ("GPUs", GROUPS["gpu"]), ("The agent", GROUPS["agent"])]
    marks = _annotations('instance=~"$instance"')
    return _board("GPU node", NODE, about, ("now-1h", "10s"), variables, rows, OF_NODE, marks)


def run_dashboard() -> dict[str, Any]:
    about = "Where every second of a training run goes, and why."
    variables = (
        _variable("job", "Job", f'label_values({{{_OF_JOB},job_id!=""}}, job_id)'),
        _variable("run", "Run", f'label_values({{{_OF_JOB},job_id=~"$job"}}, run)', "one"),
        _variable("rank", "Rank", 'label_values(gpuwatch_run_info{run="$run"}, rank)'),
        # "each", so that "All" is the run's own nodes and not those of the site
        _variable("instance", "Node", 'label_values(gpuwatch_run_info{run="$run"}, instance)', "each"),
        _variable("gpu", "GPU", 'label_values(gpuwatch_gpu_owner_info{run="$run"}, gpu)'),
    )
    gpus = [panel for panel in live_panels("gpu") if panel.key != "gpu_ledger"]  # the run's own GPUs are in its group
    nodes = [panel for panel in live_panels("node") if panel.kind != "stat"]
    rows = [("The run", GROUPS["run"]), ("GPUs of the run's nodes", gpus), ("The run's nodes", nodes)]
    marks = _annotations('run="$run"', findings=True)
    return _board("Training run", RUN, about, ("now-30m", "10s"), variables, rows, OF_RUN, marks)


DASHBOARDS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpuwatch-fleet.json": fleet_dashboard,
    "gpuwatch-node.json": node_dashboard,
    "gpuwatch-run.json": run_dashboard,
}


def text_of(name: str) -> str:
    return text(DASHBOARDS[name]())


def _variable(
    name: str, label: str, query: str, choice: Literal["one", "each", "any"] = "any"
) -> dashboard.QueryVariable:
    """Return a variable with the values of `query`: one, or several with "All".

    "All" is the list of values ("each": needed by repeated panels), or matches everything, later values too ("any").
    """
    built = dashboard.QueryVariable(name).label(label).query(query).datasource(_SOURCE)
    built = built.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.ALPHABETICAL_ASC)
    if choice != "one":
        everything = models.VariableOption(selected=True, text="All", value="$__all")
        built = built.multi(True).include_all(True).current(everything)
    return built.all_value(".*") if choice == "any" else built


def _annotations(selected: str, findings: bool = False) -> list[dict[str, Any]]:
    """Return a dashboard's annotations: firing alerts, starts and ends of runs and, where wanted, findings.

    `selected` are the conditions on `instance` or `run`. Plain data: the SDK's type lacks the fields of Prometheus
    annotations (documentation of Grafana's Prometheus data source, "annotations").
    """
    up = f"max by (run) (gpuwatch_run_up{{{selected}}})"
    before = f"max by (run) (gpuwatch_run_up{{{selected}}} offset 1m)"
    firing, by_alert = f'ALERTS{{alertstate="firing", {selected}}}', "severity,instance,rank,gpu"
    found = [
        ("Alerts", firing, VERMILLION, "{{alertname}}", by_alert),
        ("Run begins", f"({up} == 1) unless ({before} == 1)", BLUE, "{{run}} begins", "run"),
        ("Run ends", f"({before} == 1) unless ({up} == 1)", GREY, "{{run}} ends", "run"),
    ]
    if findings:
        active = f"max by (run, cause) (gpuwatch_finding_active{{{selected}}}) == 1"
        found.append(("Findings", active, ORANGE, "{{cause}}", "cause"))
    return [
        {
            "name": name,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "enable": True,
            "iconColor": colour,
            "expr": expr,
            "step": "15s",
            "titleFormat": title,
            "tagKeys": tags,
        }
        for name, expr, colour, title, tags in found
    ]


def _board(
    title: str,
    uid: str,
    about: str,
    times: tuple[str, str],
    variables: Sequence[Any],
    rows: Sequence[tuple[str, Sequence[Panel]]],
    scope: Scope,
    annotations: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return a dashboard as plain data, its panels placed and numbered; `times`: its range and refresh interval."""
    current = models.VariableOption(selected=True, text="gpuwatch", value=DATASOURCE)
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus").current(current)
    others = dashboard.DashboardLink("gpuwatch").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(f"{about} Generated from gpuwatch's list of panels.")
        .tags([TAG])
        .timezone("browser")
        .time(times[0], "now")
        .refresh(times[1])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(others.icon("external link").include_vars(True).keep_time(True))
    )
    for variable in (source, *variables):
        built = built.with_variable(variable)
    number, y = 0, 0
    for name, panels in rows:
        number += 1
        built = built.with_row(dashboard.Row(name).id(number).grid_pos(models.GridPos(x=0, y=y, w=COLUMNS, h=1)))
        y += 1
        for line in lines(panels):
            x, height = 0, max(HEIGHTS[panel.kind] for panel in line)
            for panel, width in zip(line, widths(line), strict=True):
                number += 1
                place = models.GridPos(x=x, y=y, w=width, h=height)
                built = built.with_panel(_panel(panel, scope).id(number).grid_pos(place))
                x += width
            y += height
    plain: dict[str, Any] = json.loads(json.dumps(built.build(), cls=JSONEncoder, sort_keys=True))
    plain["annotations"] = {"list": list(annotations)}
    for variable in plain["templating"]["list"]:
        for name in ("auto", "auto_min", "auto_count"):  # of interval variables only, by Grafana's schema
            variable.pop(name, None)
    return plain


def lines(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Yield the panels line by line: stats on their own lines, others by width, in the fewest and most even lines."""
    for _, same in groupby(panels, key=lambda panel: panel.kind == "stat"):
        group = list(same)
        # for each number of panels: lines, unevenness, last line's start
        best: list[tuple[int, int, int]] = [(0, 0, 0)]
        for end in range(1, len(group) + 1):
            sums = [(begin, sum(panel.width for panel in group[begin:end])) for begin in range(end)]
            fitting = [each for each in sums if each[1] <= COLUMNS] or [(end - 1, COLUMNS)]
            best.append(min((best[b][0] + 1, best[b][1] + (COLUMNS - used) ** 2, b) for b, used in fitting))
        starts = [len(group)]
        while starts[0]:
            starts.insert(0, best[starts[0]][2])
        yield from (group[begin:end] for begin, end in pairwise(starts))


def widths(line: Sequence[Panel]) -> list[int]:
    """Return whole widths whose sum is 24, in proportion to the panels'; the first panels get the remainder."""
    whole = [COLUMNS * panel.width // sum(each.width for each in line) for panel in line]
    for number in range(COLUMNS - sum(whole)):
        whole[number] += 1
    return whole


def _panel(panel: Panel, scope: Scope) -> Any:
    """Return the builder of a panel without its place on the grid."""
    if panel.kind == "stat":
        built: Any = _stat(panel, scope)
    else:
        built = _table(panel) if panel.kind == "table" else _chart(panel, scope)
    built = built.title(panel.title).description(panel.question).datasource(_SOURCE)
    built = built.no_value(panel.empty).unit(UNITS[panel.unit].grafana)
    if panel.repeat:
        built = built.repeat(panel.repeat).max_per_row(REPEATED_PER_LINE)
    if panel.runbook:
        link = dashboard.DashboardLink("Runbook").type(models.DashboardLinkType.LINK)
        built = built.links([link.url(runbook_url(panel.runbook)).icon("doc").tooltip("What to do")])
    return built


def _chart(panel: Panel, scope: Scope) -> timeseries.Panel:
    stacked = panel.kind == "stack"
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(True)
    legend = legend.placement(common_models.LegendPlacement.BOTTOM).calcs(["mean" if stacked else "lastNotNull"])
    built = (
        timeseries.Panel()
        .min(0)
        .line_width(0 if stacked else 2)
        .fill_opacity(85 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if panel.maximum is not None:
        built = built.max(panel.maximum)
    if stacked:
        built = built.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if panel.thresholds():
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        built = built.thresholds(_thresholds(panel, "transparent")).thresholds_style(style)
    for number, curve in enumerate(panel.curves):
        built = built.with_target(_target(curve, scope, number).legend_format(_legend(curve)).range())
        for value, look in _LOOKS.get(curve.legend.strip("{}"), {}).items():
            colour = {"mode": "fixed", "fixedColor": look.colour}
            name = f"{look.name}, USD/h" if panel.unit == "money/h" else look.name
            built = built.override_by_name(value, [Property("displayName", name), Property("color", colour)])
        if curve.dashed:
            built = built.override_by_query(_ref_id(number), [_DASHED])
        if curve.over_stack:
            built = built.override_by_query(_ref_id(number), _NOT_STACKED)
    return built


def _legend(curve: Curve) -> str:
    """Return a legend in Grafana's syntax, `{{gpu}}` for `{gpu}`, with the node where the metric is a node's.

    Values that have a look are found by their bare name: they are of panels about one node.
    """
    of_node = curve.metric and not curve.query.of_a_run and curve.legend.strip("{}") not in _LOOKS
    return re.sub(r"\{(\w+)\}", r"{{\1}}", f"{curve.legend} · {{instance}}" if of_node else curve.legend)


def _stat(panel: Panel, scope: Scope) -> stat.Panel:
    coloured = common_models.BigValueColorMode.VALUE if panel.thresholds() else common_models.BigValueColorMode.NONE
    built = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(coloured)
        .thresholds(_thresholds(panel, "text"))
        .max_data_points(TABLE_POINTS)
    )
    if panel.unit in DECIMALS:
        built = built.decimals(DECIMALS[panel.unit])
    query = _target(panel.curves[0], scope, 0).instant()
    return built.with_target(query.format(prometheus_models.PromQueryFormat.TIME_SERIES))


def _table(panel: Panel) -> table.Panel:
    limits = _thresholds(panel, "text")
    built = table.Panel().show_header(True).thresholds(limits).max_data_points(TABLE_POINTS)
    for number, curve in enumerate(panel.curves):
        query = _target(curve, OF_NODE, number).instant()
        built = built.with_target(query.format(prometheus_models.PromQueryFormat.TABLE))
        if curve.legend:
            built = built.override_by_name(curve.legend, list(_value_properties(curve, panel)))
    for label in panel.columns:
        if label in _LINKS:
            title, url = _LINKS[label]
            built = built.override_by_name(title_of(label), [Property("links", [{"title": title, "url": url}])])
    if len(panel.curves) > 1:
        built = built.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    built = built.with_transformation(models.DataTransformerConfig(id_val="organize", options=_columns(panel)))
    if panel.sort:
        built = built.sort_by([common.TableSortByFieldState().display_name(panel.sort).desc(True)])
    return built


def _value_properties(curve: Curve, panel: Panel) -> Iterator[Property]:
    unit = curve.unit or panel.unit
    yield Property("unit", UNITS[unit].grafana)
    if unit in DECIMALS:
        yield Property("decimals", DECIMALS[unit])
    if unit == "up":
        yield Property("mappings", [_UP])
    if unit == "up" or panel.thresholds():
        yield Property("custom.cellOptions", {"type": "color-text"})


def _columns(panel: Panel) -> dict[str, Any]:
    """Return the options of Grafana's `organize`: labels first, then values, by their titles.

    Grafana names a table's only value column "Value", and several ones "Value #A", "Value #B" … after their queries.
    """
    names = {label: title_of(label) for label in panel.columns}
    hidden = {"Time": True}
    for number, curve in enumerate(panel.curves):
        value = f"Value #{_ref_id(number)}"
        for name in (value, "Value") if len(panel.curves) == 1 else (value,):
            if curve.legend:
                names[name] = curve.legend
            else:
                hidden[name] = True
    places = {name: place for place, name in enumerate(names)}
    return {"excludeByName": hidden, "renameByName": names, "indexByName": places}


def _target(curve: Curve, scope: Scope, number: int) -> prometheus.Dataquery:
    expr = curve.promql.replace("$nodes", "$instance") or render(curve.query, scope, "$__rate_interval")
    return prometheus.Dataquery().ref_id(_ref_id(number)).expr(expr)


def _ref_id(number: int) -> str:
    return chr(ord("A") + number)


def _thresholds(panel: Panel, below: str) -> dashboard.ThresholdsConfig:
    """Return a panel's thresholds; `below` is the colour of values under all of them."""
    steps = [models.Threshold(value=None, color=below)]
    steps += [models.Threshold(value=value, color=COLOURS[severity]) for value, severity in panel.thresholds()]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


if __name__ == "__main__":
    for name in DASHBOARDS:
        (CHECKOUT / name).write_text(text_of(name), encoding="utf-8")
