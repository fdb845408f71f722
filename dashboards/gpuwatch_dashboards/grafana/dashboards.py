"""The three dashboards, from the groups of panels: their rows, places, variables, annotations and links."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from gpuwatch.tools.reports.display import BLUE, GREY, VERMILLION
from gpuwatch_dashboards.grafana import files
from gpuwatch_dashboards.grafana.build import build, source
from gpuwatch_dashboards.grafana.files import DATASOURCE, FLEET, NODE, RUN, TAG
from gpuwatch_dashboards.panels import GROUPS, Panel, live_panels

COLUMNS = 24
HEIGHTS = {"stat": 4, "table": 8, "lines": 8, "stack": 8}
EVERYTHING = ".*"
"""The value of "All". Not the list of values: a node or rank that appears later is in it too."""
PER_LINE = 4
"""Repeated panels in a line."""
Row = tuple[str, Sequence[Panel]]


def fleet_dashboard() -> dict[str, Any]:
    """Return "GPU fleet": all GPUs of a site, who uses them, what is lost."""
    about = "All GPUs of a site: what they do, whose they are, what is lost. From recorded series."
    variables = (
        _some_of("instance", "Node", "label_values(gpuwatch_build_info, instance)"),
        _some_of("user", "User", 'label_values(gpuwatch_gpu_owner_info{user!=""}, user)'),
        _some_of("job", "Job", 'label_values(gpuwatch_gpu_owner_info{job_id!=""}, job_id)'),
    )
    built = _dashboard("GPU fleet", FLEET, about, "now-24h", "1m", variables)
    return _plain(built, [("All GPUs", GROUPS["fleet"])], _marks('instance=~"$instance"')[:1])


def node_dashboard() -> dict[str, Any]:
    """Return "GPU node": one node, each of its GPUs, its runs and its agent."""
    variables = (
        _one_of("instance", "Node", "label_values(gpuwatch_build_info, instance)"),
        _each_of("gpu", "GPU", 'label_values(gpuwatch_gpu_info{instance=~"$instance"}, gpu)'),
    )
    built = _dashboard("GPU node", NODE, "One node: its GPUs, runs, limits and agent.", "now-1h", "10s", variables)
    rows = [("The node", GROUPS["node"]), ("GPUs", GROUPS["gpu"]), ("The agent", GROUPS["agent"])]
    return _plain(built, rows, _marks('instance=~"$instance"'))


def run_dashboard() -> dict[str, Any]:
    """Return "Training run": where every second of a run goes, and why."""
    about = "Where every second of a training run goes, and why."
    variables = (
        _some_of("job", "Job", 'label_values(gpuwatch_run_info{job_id!=""}, job_id)'),
        _one_of("run", "Run", 'label_values(gpuwatch_run_info{job_id=~"$job"}, run)'),
        _some_of("rank", "Rank", 'label_values(gpuwatch_run_info{run="$run"}, rank)'),
        # of nodes and GPUs, only the run's own
        _each_of("instance", "Node", 'label_values(gpuwatch_run_info{run="$run"}, instance)'),
        _some_of("gpu", "GPU", 'label_values(gpuwatch_gpu_owner_info{run="$run"}, gpu)'),
    )
    built = _dashboard("Training run", RUN, about, "now-30m", "10s", variables)
    gpus = [panel for panel in live_panels("gpu") if panel.key != "gpu_ledger"]  # the run's own GPUs are in its group
    nodes = [panel for panel in live_panels("node") if panel.kind != "stat"]
    rows: list[Row] = [("The run", GROUPS["run"]), ("GPUs of the run's nodes", gpus), ("The run's nodes", nodes)]
    return _plain(built, rows, [*_marks('run="$run"'), _pushed("run:$run")])


DASHBOARDS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpuwatch-fleet.json": fleet_dashboard,
    "gpuwatch-node.json": node_dashboard,
    "gpuwatch-run.json": run_dashboard,
}


def text_of(name: str) -> str:
    """Return a dashboard file's content: the same for the same panels."""
    return files.text(DASHBOARDS[name]())


def lines(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Yield the panels in their order, line by line: stats by themselves, others by their widths, none much emptier.

    Of all ways to break them into the fewest lines, the one whose lines are the most even.
    """
    for _, same in groupby(panels, key=lambda panel: panel.kind == "stat"):
        group = list(same)
        best: list[tuple[int, int, int]] = [
            (0, 0, 0)
        ]  # by number of panels placed: lines, unevenness, begin of the last
        for end in range(1, len(group) + 1):
            sums = [(begin, sum(panel.width for panel in group[begin:end])) for begin in range(end)]
            fitting = [each for each in sums if each[1] <= COLUMNS] or [(end - 1, COLUMNS)]
            best.append(min((best[b][0] + 1, best[b][1] + (COLUMNS - used) ** 2, b) for b, used in fitting))
        ends, end = [], len(group)
        while end:
            ends.append((best[end][2], end))
            end = best[end][2]
        yield from (group[begin:end] for begin, end in reversed(ends))


def widths(line: Sequence[Panel]) -> list[int]:
    """Return whole widths whose sum is 24, in proportion to the panels'. What is left over goes to the first panels."""
    whole = [COLUMNS * panel.width // sum(each.width for each in line) for panel in line]
    for number in range(COLUMNS - sum(whole)):
        whole[number] += 1
    return whole


def _plain(built: Any, rows: Sequence[Row], marked: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the dashboard as plain data, its rows placed and its panels numbered."""
    of_a_run_page = any(panels is GROUPS["run"] for _, panels in rows)
    number, y = 0, 0
    for title, panels in rows:
        number += 1
        built = built.with_row(dashboard.Row(title).id(number).grid_pos(models.GridPos(x=0, y=y, w=COLUMNS, h=1)))
        y += 1
        for line in lines(panels):
            x, height = 0, max(HEIGHTS[panel.kind] for panel in line)
            for panel, width in zip(line, widths(line), strict=True):
                number += 1
                place = models.GridPos(x=x, y=y, w=width, h=height)
                built = built.with_panel(build(panel, of_a_run_page).id(number).grid_pos(place))
                x += width
            y += height
    plain: dict[str, Any] = json.loads(json.dumps(built.build(), cls=JSONEncoder, sort_keys=True))
    plain["annotations"] = {"list": list(marked)}
    return _to_schema(plain)


def _to_schema(plain: dict[str, Any]) -> dict[str, Any]:
    """Return what the SDK (of 10.1) writes in agreement with the schema that Grafana 11 publishes."""
    plain.pop("style", None)
    for variable in plain["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min", "id"):
            variable.pop(name, None)
    for panel in plain["panels"]:
        if panel["type"] == "stat":
            panel["options"] |= {"percentChangeColorMode": "standard", "showPercentChange": False, "wideLayout": True}
        if panel.get("repeat"):
            panel["maxPerRow"] = PER_LINE
        else:
            panel.pop("repeatDirection", None)
    return plain


def _dashboard(title: str, uid: str, about: str, since: str, refresh: str, variables: Sequence[Any]) -> Any:
    current = models.VariableOption(selected=True, text="gpuwatch", value=DATASOURCE)
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(f"{about} Generated from gpuwatch's list of panels.")
        .tags([TAG])
        .timezone("browser")
        .time(since, "now")
        .refresh(refresh)
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus").current(current)
        )
    )
    for variable in variables:
        built = built.with_variable(variable)
    others = dashboard.DashboardLink("gpuwatch").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return built.link(others.icon("external link").include_vars(True).keep_time(True))


def _one_of(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable with one value at a time; `query` is `label_values(…)`."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(source())
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _each_of(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable of which several values can be selected; "All" is the list, for panels drawn once for each."""
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return _one_of(name, label, query).multi(True).include_all(True).current(everything)


def _some_of(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return the same, but "All" is everything, also what appears later."""
    return _each_of(name, label, query).all_value(EVERYTHING)


def _marks(selected: str) -> list[dict[str, Any]]:
    """Return a dashboard's annotations: alerts while they fire, runs that begin and end.

    `selected` are the conditions on `instance` or `run` that its variables stand for. Plain data: the SDK's type lacks
    what Prometheus' annotations are made of (documentation of Grafana's Prometheus data source, "annotations").
    """
    up = f"max by (run) (gpuwatch_run_up{{{selected}}})"
    before = f"max by (run) (gpuwatch_run_up{{{selected}}} offset 1m)"
    firing, by_alert = f'ALERTS{{alertstate="firing", {selected}}}', "severity,instance,rank,gpu"
    found = (
        ("Alerts", firing, VERMILLION, "{{alertname}}", by_alert),
        ("Run begins", f"({up} == 1) unless ({before} == 1)", BLUE, "{{run}} begins", "run"),
        ("Run ends", f"({before} == 1) unless ({up} == 1)", GREY, "{{run}} ends", "run"),
    )
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


def _pushed(*tags: str) -> dict[str, Any]:
    """Return the annotation of what `gpuwatch grafana push` marked with all of these tags and ours."""
    return {
        "name": "Pushed by gpuwatch",
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "iconColor": BLUE,
        "target": {"type": "tags", "tags": [TAG, *tags], "matchAny": False, "limit": 200},
    }
