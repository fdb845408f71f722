"""The four dashboards, from the list of panels: which panels, in which order, with which variables and links."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grafana_foundation_sdk.builders import dashboard, text
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import text as text_models

from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.grafana import files
from gpuwatch_dashboards.grafana.annotations import marks, pushed
from gpuwatch_dashboards.grafana.curves import Drawn, curves
from gpuwatch_dashboards.grafana.layout import AnyPanel, Line, Place, Row, in_lines, places
from gpuwatch_dashboards.grafana.runbooks import runbook_text
from gpuwatch_dashboards.grafana.runbooks import title as runbook_title
from gpuwatch_dashboards.grafana.schema import to_schema
from gpuwatch_dashboards.grafana.site_panels import site_panel
from gpuwatch_dashboards.grafana.uids import FLEET, NODE, PAGES, RUN, RUNBOOKS, TAG, page_id, runbook_url
from gpuwatch_dashboards.grafana.variables import (
    FLEET_VARIABLES,
    NODE_VARIABLES,
    RUN_VARIABLES,
    datasource_variable,
)
from gpuwatch_dashboards.model import Scope
from gpuwatch_dashboards.panels import BY_KEY, GPU_PANELS, NODE_PANELS, RUN_PANELS, Panel
from gpuwatch_dashboards.panels.alerts import FLEET_ALERTS, NODE_ALERTS, RUN_ALERTS
from gpuwatch_dashboards.panels.fleet import FLEET_NOW, FLEET_OVER_TIME, FLEET_WHO, FLEET_WORST
from gpuwatch_dashboards.panels.site_agent import AGENT
from gpuwatch_dashboards.panels.site_node import (
    NODE_GPUS,
    NODE_HARDWARE,
    NODE_LEDGER,
    NODE_MORE,
    NODE_NOW,
    NODE_RUNS,
)
from gpuwatch_dashboards.panels.site_panel import SitePanel
from gpuwatch_dashboards.panels.site_run import RUN_GPUS, RUN_NOW, RUN_RANKS, RUN_STEPS, RUN_WHO
from gpuwatch_dashboards.promql import render
from gpuwatch_dashboards.query import Match, Query

WINDOW = "$__rate_interval"
SCOPE = Scope(run="$run", rank="$rank", instance="$instance")
_LEDGER, _FINDINGS = BY_KEY["ledger"], BY_KEY["findings"]

FLEET_ROWS = (
    Row(
        "Now",
        (
            Line(FLEET_NOW, 4),
            Line((FLEET_OVER_TIME[0], FLEET_ALERTS), 9, (3, 2)),
            Line((*FLEET_WORST, FLEET_OVER_TIME[2]), 9, (3, 2)),
            Line((FLEET_OVER_TIME[1],), 8),
        ),
    ),
    Row("Who used what, over the time range", in_lines(FLEET_WHO, 2, 9)),
)
NODE_ROWS = (
    Row("Now", (Line(NODE_NOW, 4), Line((*NODE_RUNS, NODE_ALERTS), 7, (2, 1)))),
    Row("GPUs", (Line((NODE_LEDGER,), 7), Line(NODE_GPUS, 7), *in_lines(GPU_PANELS), *in_lines(NODE_HARDWARE, 4))),
    Row("The node", in_lines((*NODE_PANELS, *NODE_MORE))),
    Row("The agent", (Line(AGENT, 7),)),
)
RUN_ROWS = (
    Row(
        "The run",
        (
            Line(RUN_NOW, 4),
            Line((_LEDGER, _FINDINGS), 10, (2, 1)),
            *in_lines([panel for panel in RUN_PANELS if panel not in (_LEDGER, _FINDINGS)]),
            Line((*RUN_WHO, RUN_ALERTS), 7, (2, 1, 1)),
        ),
    ),
    Row("Steps and ranks", (Line(RUN_STEPS), Line(RUN_RANKS))),
    Row("GPUs of the run's nodes", in_lines((*RUN_GPUS, *(p for p in GPU_PANELS if p.key != "gpu_ledger")), 4)),
    Row("The run's nodes", in_lines(NODE_PANELS)),
)


def fleet_dashboard() -> dict[str, Any]:
    """Return "GPU fleet": all GPUs of a site, who uses them, what is lost."""
    about = "All GPUs of a site: what they do, whose they are, what is lost. From recorded series."
    built = _dashboard("GPU fleet", FLEET, about, "now-24h", "1m", FLEET_VARIABLES)
    return _plain(built, FLEET_ROWS, marks('instance=~"$instance"')[:1])


def node_dashboard() -> dict[str, Any]:
    """Return "GPU node": one node, each of its GPUs, its runs and its agent."""
    built = _dashboard("GPU node", NODE, "One node: its GPUs, runs, limits and agent.", "now-1h", "10s", NODE_VARIABLES)
    return _plain(built, NODE_ROWS, marks('instance=~"$instance"'))


def run_dashboard() -> dict[str, Any]:
    """Return "Training run": where every second of a run goes, and why."""
    about = "Where every second of a training run goes, and why."
    built = _dashboard("Training run", RUN, about, "now-30m", "10s", RUN_VARIABLES)
    return _plain(built, RUN_ROWS, [*marks('run="$run"'), pushed("run:$run")])


def runbooks_dashboard() -> dict[str, Any]:
    """Return "gpuwatch runbooks": what to do about each alert, and the list of causes."""
    built = _dashboard("gpuwatch runbooks", RUNBOOKS, "What to do about each alert.", "now-1h", "", ())
    for page in PAGES:
        place = Place(0 if page_id(page) % 2 else 12, (page_id(page) - 1) // 2 * 14, 12, 14)
        if page == PAGES[-2] and len(PAGES) % 2 == 0:  # an odd number of runbooks: the last has no neighbour
            place = replace(place, w=24)
        if page == "causes":
            place = replace(place, x=0, w=24, y=(len(PAGES) // 2) * 14, h=26)
        panel = text.Panel().mode(text_models.TextMode.MARKDOWN).content(runbook_text(page)).title(runbook_title(page))
        built = built.with_panel(panel.id(page_id(page)).grid_pos(_grid(place)))
    return _plain(built, (), [])


DASHBOARDS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpuwatch-fleet.json": fleet_dashboard,
    "gpuwatch-node.json": node_dashboard,
    "gpuwatch-run.json": run_dashboard,
    "gpuwatch-runbooks.json": runbooks_dashboard,
}


def text_of(name: str) -> str:
    """Return a dashboard file's content: the same for the same panels."""
    return files.text(DASHBOARDS[name]())


def _dashboard(title: str, uid: str, about: str, since: str, refresh: str, variables: Sequence[Any]) -> Any:
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
    )
    if variables:
        built = built.with_variable(datasource_variable())
    for variable in variables:
        built = built.with_variable(variable)
    others = dashboard.DashboardLink("gpuwatch").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return built.link(others.icon("external link").include_vars(True).keep_time(True))


def _plain(built: Any, rows: Sequence[Row], marked: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the dashboard as plain data, its rows placed and its panels numbered."""
    number, y = 0, 0
    for row in rows:
        number += 1
        built = built.with_row(dashboard.Row(row.title).id(number).grid_pos(_grid(Place(0, y, 24, 1))))
        y += 1
        for panel, place in places(row.lines, y):
            number += 1
            built = built.with_panel(_panel(panel, rows is RUN_ROWS).id(number).grid_pos(_grid(place)))
            y = place.y + place.h
    plain: dict[str, Any] = json.loads(json.dumps(built.build(), cls=JSONEncoder, sort_keys=True))
    plain["annotations"] = {"list": list(marked)}
    return to_schema(plain)


def _panel(panel: AnyPanel, of_run: bool) -> Any:
    if isinstance(panel, SitePanel):
        built = site_panel(panel)
        if panel.repeat:
            built = built.repeat(panel.repeat).repeat_direction("h")
        if panel.runbook:
            link = dashboard.DashboardLink("What to do").type(models.DashboardLinkType.LINK)
            built = built.links([link.url(runbook_url(panel.runbook)).icon("doc").tooltip("Runbook")])
        return built
    drawn = [
        Drawn(_expr(curve.query, of_run), _legend(panel, curve.legend), curve.dashed, curve.over_stack)
        for curve in panel.curves
    ]
    return curves(
        panel.title,
        panel.question,
        panel.unit,
        drawn,
        empty=panel.empty,
        stacked=panel.stacked,
        maximum=panel.maximum,
        limits=panel.thresholds,
    )


def _expr(query: Query, of_run: bool) -> str:
    """Return the PromQL of a panel's query, kept to the GPUs that are chosen."""
    return render(_of_gpus(query), SCOPE if of_run else replace(SCOPE, run=None, rank=None), WINDOW)


def _of_gpus(query: Query) -> Query:
    over = _of_gpus(query.over) if query.over else None
    where = query.where
    if "gpu" in BY_NAME[query.metric].labels:
        where = (*where, Match("gpu", "=~", "$gpu"))
    return replace(query, where=where, over=over)


def _legend(panel: Panel, legend: str) -> str:
    return legend if panel in RUN_PANELS else f"{legend} · {{instance}}"


def _grid(place: Place) -> models.GridPos:
    return models.GridPos(x=place.x, y=place.y, w=place.w, h=place.h)
