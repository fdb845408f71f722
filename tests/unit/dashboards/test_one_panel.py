"""One panel, one line: a panel added to a group is on every surface, and its threshold is the catalogue's."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml
from streamlit.testing.v1 import AppTest

from gpuwatch.api import Series
from gpuwatch.api.client import Reply
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.panels import GROUPS, Panel, live_panels, unit_of
from gpuwatch_dashboards.query import Span
from gpuwatch_dashboards.render import cards
from gpuwatch_dashboards.sources import AgentSource, SharedSource
from gpuwatch_dashboards.sources.prometheus import PrometheusSource
from gpuwatch_dashboards.top import Reader
from gpuwatch_dashboards.top.pages import panel_lines
from gpuwatch_dashboards.views import fleet, live
from gpuwatch_dashboards.views.site import Site
from tests.integration.dashboards.fake import FakeAgent, a_run

METRICS = {
    "run": "gpuwatch_run_resident_memory_bytes",
    "gpu": "gpuwatch_gpu_memory_used_bytes",
    "node": "gpuwatch_memory_available_bytes",
    "agent": "gpuwatch_agent_resident_memory_bytes",
}
"""By group with live readings: a gauge in bytes for the panel that is added."""
DASHBOARD = {"fleet": "fleet", "run": "run", "gpu": "node", "node": "node", "agent": "node"}
VALUE = 42.0 * 2**20


def live_panel(group: str, key: str = "added") -> Panel:
    curve = {"legend": "added line", "metric": METRICS[group]}
    return Panel.of({"key": key, "title": "Added panel", "question": "Is it shown?", "curves": [curve]})


def promql_panel(kind: str) -> Panel:
    added = {"key": "added", "title": "Added panel", "unit": "bytes", "kind": kind, "question": "Is it shown?"}
    if kind == "stat":
        return Panel.of({**added, "curves": ["sum(added_bytes)"]})
    curve = {"legend": "added line", "promql": 'sum by (instance) (added_bytes{instance=~"$instance"})'}
    return Panel.of({**added, "columns": ["instance"], "curves": [curve]})


def of_json(body: Any) -> Reply:
    return Reply(200, json.dumps(body).encode())


class Agent(FakeAgent):
    """The agent's API without a socket, with `VALUE` for the metrics of the panels that are added."""

    def reply(self, path: str, timeout_s: float) -> Reply:
        url = urlsplit(path)
        if url.path == "/api/v1/series/many":
            asked = [dict(parse_qsl(text, keep_blank_values=True)) for _, text in parse_qsl(url.query)]
            return of_json({"answers": [self.answer("/api/v1/series", one) for one in asked]})
        return of_json(self.answer(url.path, dict(parse_qsl(url.query))))

    def _series(self, query: dict[str, str]) -> dict[str, Any]:
        metric = BY_NAME[query["metric"]]
        if metric.name not in METRICS.values():
            return super()._series(query)
        points = [[float(query["end"]) - age, VALUE] for age in (9.0, 6.0, 3.0)]
        labels = {"gpu": "0", "UUID": "GPU-0"} if "gpu" in metric.labels else {}
        return {"kind": "gauge", "unit": "bytes", "series": [{"labels": labels, "points": points}]}


def prometheus_reply(path: str, timeout_s: float) -> Reply:
    """Answer any query with one series that has every label: `VALUE` of what was added, else 1."""
    query = dict(parse_qsl(urlsplit(path).query))
    labels = {
        "run": "r1", "rank": "0", "instance": "node-1:9478", "gpu": "0", "UUID": "GPU-0", "name": "resnet", "user": "alice",
        "world_size": "1", "num_workers": "0", "state": "compute", "phase": "compute", "kind": "all", "collector": "cpu",
        "cause": "input_single_process", "alertname": "GpuStarved", "severity": "warning", "device": "cpu", "mode": "user",
    }  # fmt: skip
    value = str(VALUE if "added_bytes" in query["query"] else 1.0)
    if "start" not in query:
        result: dict[str, Any] = {"metric": labels, "value": [float(query["time"]), value]}
    else:
        start, end = float(query["start"]), float(query["end"])
        step = float(query["step"])
        times = [start + n * step for n in range(int((end - start) / step) + 1)]
        result = {"metric": labels, "values": [[time_s, value] for time_s in times]}
    return of_json({"status": "success", "data": {"result": [result]}})


def of_agent() -> Site:
    agent = Agent([a_run()], gpus=True)
    return Site(SharedSource(AgentSource("http://agent", agent.reply)), {})


def of_prometheus() -> Site:
    return Site(SharedSource(PrometheusSource("http://prometheus", prometheus_reply)), {})


def html(page: Any, site: Site, more: bool = False, by: str = "user") -> str:
    """Return the text of a page's HTML, drawn by Streamlit itself."""

    def draw(page, site):  # type: ignore[no-untyped-def]  # Streamlit runs its text alone: no name of this module
        page(site)

    app = AppTest.from_function(draw, args=(page, site), default_timeout=180)
    app.query_params["by"] = by
    if more:
        app.query_params["more"] = "1"
    app.run()
    assert not app.exception
    return unescape(" ".join(" ".join(each.proto.body for each in app.get("html")).split()))


def test_every_refresh_says_which_option_is_chosen() -> None:
    def draw(page, site):  # type: ignore[no-untyped-def]
        page(site)

    app = AppTest.from_function(draw, args=(live.page, of_agent()), default_timeout=180)
    app.query_params["window"] = "1 h"
    for _ in range(2):  # the browser may get the second one alone
        app.run()
        chosen = {group.label: group.options[group.proto.default[0]] for group in app.get("button_group")}
        assert chosen["Time range"] == "1 h" and chosen.get("GPUs in the charts below") == "All GPUs"


def in_grafana(group: str) -> list[dict[str, Any]]:
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_dashboards import DASHBOARDS

    drawn = DASHBOARDS[f"gpuwatch-{DASHBOARD[group]}.json"]()["panels"]
    return [panel for panel in drawn if panel["title"] == "Added panel"]


@pytest.mark.parametrize("group", METRICS)
def test_a_live_panel_added_to_a_group_is_on_the_page_in_grafana_and_in_the_terminal(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = live_panel(group)
    monkeypatch.setitem(GROUPS, group, (*GROUPS[group], panel))
    drawn = html(live.page, of_agent())
    assert re.search(r'<h2 title="Is it shown\?">Added panel</h2>', drawn) and "added line <b>42.0 MiB</b>" in drawn
    [built] = in_grafana(group)
    assert METRICS[group] in built["targets"][0]["expr"] and built["fieldConfig"]["defaults"]["unit"] == "bytes"
    assert panel in live_panels(group) and panel in live_panels()
    facts = Reader(of_agent().source).read(panels=True)
    listed = [line.plain.rstrip() for line in panel_lines(facts.series, 80)]
    at = next(n for n, line in enumerate(listed) if line.startswith("── Added panel"))
    assert listed[at + 1].startswith(" added line") and listed[at + 1].endswith("42.0 MiB")


@pytest.mark.parametrize(
    ("group", "kind"),
    [("node", "lines"), ("node", "stack"), ("node", "stat"), ("node", "table"), ("run", "table"), ("gpu", "lines"),
     ("agent", "stat"), ("fleet", "stat"), ("fleet", "lines"), ("fleet", "table")],
)  # fmt: skip
def test_a_panel_that_only_prometheus_answers_is_on_the_page_and_in_grafana(
    group: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = promql_panel(kind)
    monkeypatch.setitem(GROUPS, group, (*GROUPS[group], panel))
    drawn = html(fleet.page if group == "fleet" else live.page, of_prometheus(), more=True)
    wanted = {
        "stat": '<div class="gw-figure gw-figure-added" title="Is it shown?"><b>42.0 MiB</b><span>Added panel</span>',
        "table": '<a href="./?node=node-1%3A9478" target="_self">node-1:9478</a></td><td data-label="added line">42.0 MiB</td>',
    }.get(kind, "added line <b>42.0 MiB</b>")
    assert wanted in drawn
    [built] = in_grafana(group)
    assert "added_bytes" in built["targets"][0]["expr"]
    assert panel not in live_panels()
    if group != "fleet":  # an agent cannot answer it: its page is without it, and has no error
        assert "Added panel" not in html(live.page, of_agent(), more=True)


def test_every_panel_of_every_group_is_on_a_page_with_prometheus() -> None:
    drawn = html(live.page, of_prometheus(), more=True)
    drawn += "".join(html(fleet.page, of_prometheus(), by=level) for level in fleet.LEVELS)
    missing = [
        panel.key
        for group in GROUPS.values()
        for panel in group
        if f">{panel.title.replace('$gpu', 'all')}</h2>" not in drawn and f'gw-figure-{panel.key}"' not in drawn
    ]
    assert missing == []


def test_without_more_panels_the_page_has_the_live_charts_only() -> None:
    drawn = html(live.page, of_agent())
    assert ">CPU</h2>" in drawn and ">GPU temperature</h2>" not in drawn and "gw-figure-node_shm" not in drawn
    drawn = html(live.page, of_agent(), more=True)
    assert ">GPU temperature</h2>" in drawn and "gw-figure-node_shm" in drawn


def test_what_compares_or_counts_ranks_is_of_all_of_them() -> None:
    """ "Running ranks" was 1 of 8, and "Step time by rank" had one line."""
    asked: dict[str, set[str | None]] = {}

    class OfRanks(Agent):
        def _series(self, query: dict[str, str]) -> dict[str, Any]:
            asked.setdefault(query["metric"], set()).add(query.get("rank"))
            return super()._series(query)

    agent = OfRanks([a_run(), a_run(rank=1)], gpus=True)
    html(live.page, Site(SharedSource(AgentSource("http://agent", agent.reply)), {}), more=True)
    assert asked["gpuwatch_run_up"] == asked["gpuwatch_straggler_excess_ratio"] == {None}
    assert asked["gpuwatch_run_resident_memory_bytes"] == {"0"}
    assert asked["gpuwatch_run_seconds_total"] == {None, "0"}


def test_one_threshold_is_in_the_page_in_grafana_and_in_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuwatch_dashboards.panels import BY_KEY

    panel, span = BY_KEY["node_shm"], Span(0.0, 10.0)
    used = [[Series({"mount": "node"}, ((5.0, 0.75),))]]

    def marked() -> bool:
        return "border-bottom" in cards.figures([(panel, used)])

    def in_the_dashboard() -> float:
        from grafana_dashboards import node_dashboard

        [drawn] = [p for p in node_dashboard()["panels"] if p["title"] == panel.title]
        return float(drawn["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"])

    pytest.importorskip("grafana_foundation_sdk")
    assert not marked() and in_the_dashboard() == THRESHOLDS.shm_used == 0.8
    cpu = [[Series({}, ((1.0, 0.2), (5.0, 0.3)))], []]
    option = json.dumps(cards.card(BY_KEY["cpu"], cpu, span).option)
    assert f'"yAxis": {100 * THRESHOLDS.cores_exhausted}' in option
    changed = object.__new__(type(THRESHOLDS))
    changed.__dict__.update({**vars(THRESHOLDS), "shm_used": 0.7})
    monkeypatch.setattr("gpuwatch_dashboards.panels.THRESHOLDS", changed)
    assert marked() and in_the_dashboard() == 0.7


def test_the_panel_of_contributing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [source] = re.findall(r"```yaml\n(- key: run_files.*?)```", text, re.DOTALL)
    [panel] = map(Panel.of, yaml.safe_load(source))
    assert [unit_of(curve.query) for curve in panel.curves] == [panel.unit, panel.unit]
    monkeypatch.setitem(GROUPS, "run", (*GROUPS["run"], panel))
    assert f">{panel.title}</h2>" in html(live.page, of_agent()) and panel in live_panels("run")
