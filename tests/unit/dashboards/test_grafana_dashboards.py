"""The Grafana dashboards: fresh, complete, and consistent with the catalogue, Grafana's own schema, and themselves."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuwatch.alerting.render import alerts as alert_rules
from gpuwatch.alerting.render import groups, template
from gpuwatch.alerting.thresholds import AlertThresholds, Prices
from gpuwatch.config import Config
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports.display import LOOKS
from gpuwatch_dashboards import grafana
from gpuwatch_dashboards.panels import BY_KEY, PANELS
from tests.programs import ROOT

NAMES = ("gpuwatch-fleet", "gpuwatch-node", "gpuwatch-run")
SCHEMA = json.loads((ROOT / "tests/fixtures/grafana/schema.json").read_text())["schemas"]
OF_PROMETHEUS_ANNOTATIONS = {"expr", "step", "tagKeys", "titleFormat"}
"""Fields of the data source's annotations, which the dashboard's schema leaves to data sources without saying so."""
NOT_OURS = {"up", "ALERTS"}
BUILT_IN = {"__rate_interval", "__interval", "__interval_ms", "__range"}


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / f"dashboards/grafana/{name}.json").read_text(encoding="utf-8"))
    return loaded


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in load(name)["panels"] if panel["type"] != "row"]


def expressions(name: str) -> Iterator[str]:
    for panel in panels(name):
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (mark["expr"] for mark in load(name)["annotations"]["list"] if "expr" in mark)
    for variable in load(name).get("templating", {}).get("list", []):
        if variable["type"] == "query":
            yield re.sub(r"label_values\((.+), \w+\)", r"\1", variable["query"])


def test_committed_dashboards_are_fresh() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_dashboards import DASHBOARDS, text_of

    folder = ROOT / "dashboards/grafana"
    assert {path.name for path in folder.glob("*.json")} == set(DASHBOARDS) == {f"{name}.json" for name in NAMES}
    for name in DASHBOARDS:
        assert (folder / name).read_text(encoding="utf-8") == text_of(name), f"{name} is stale: run `make golden`"


def faults(name: str, value: Any) -> list[str]:
    """Return where a value disagrees with a schema, and how."""
    errors = jsonschema.Draft7Validator(SCHEMA[name]).iter_errors({"value": value})
    return [f"{name} {'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in errors]


def schema_faults(dashboard: dict[str, Any]) -> list[str]:
    checked = copy.deepcopy(dashboard)
    for mark in checked["annotations"]["list"]:
        if mark["datasource"]["type"] == "prometheus":
            for key in OF_PROMETHEUS_ANNOTATIONS:
                mark.pop(key, None)
    found = faults("dashboard", checked)
    for panel in checked["panels"]:
        if panel["type"] == "row":
            continue
        found += faults(f"{panel['type']}.options", panel.get("options"))
        custom = panel["fieldConfig"]["defaults"].get("custom")
        if custom is not None:
            found += faults(f"{panel['type']}.custom", custom)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_dashboard_agrees_with_the_schema_that_grafana_publishes(name: str) -> None:
    assert schema_faults(load(name)) == []


def test_what_disagrees_with_the_schema_is_noticed() -> None:
    broken = load("gpuwatch-run")
    broken["panels"][1]["options"]["graphMode"] = "pie"
    chart = next(panel for panel in broken["panels"] if panel["type"] == "timeseries")
    chart["fieldConfig"]["defaults"]["custom"]["lineWidth"] = "thick"
    broken["panels"][10]["gridPos"]["w"] = "8"
    broken["templating"]["list"][1]["refresh"] = 7
    found = schema_faults(broken)
    assert len(found) >= 4 and any("'pie'" in each for each in found)


@pytest.mark.parametrize("name", NAMES)
def test_panels_fill_the_grid_and_none_lies_on_another(name: str) -> None:
    taken: dict[int, list[str]] = {}
    for panel in load(name)["panels"]:
        place = panel["gridPos"]
        assert place["w"] > 0 and place["h"] > 0 and place["x"] >= 0 and place["x"] + place["w"] <= 24
        for y in range(place["y"], place["y"] + place["h"]):
            taken.setdefault(y, []).extend([panel["title"]] * place["w"])
    assert sorted(taken) == list(range(len(taken)))
    assert {len(cells) for cells in taken.values()} == {24}
    ids = [panel["id"] for panel in load(name)["panels"]]
    assert len(set(ids)) == len(ids)


def test_a_line_of_panels_is_shared_out_to_the_last_column() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_dashboards import lines, widths

    chart, wide, number = BY_KEY["cpu"], BY_KEY["ledger"], BY_KEY["seen"]
    assert widths([number] * 5) == [5, 5, 5, 5, 4]
    assert widths([wide, chart]) == [16, 8]
    assert [len(line) for line in lines([chart] * 4)] == [2, 2]
    assert sorted(len(line) for line in lines([chart] * 8)) == [2, 3, 3]
    assert [len(line) for line in lines([number, number, wide, chart, chart])] == [2, 1, 2]
    assert [len(line) for line in lines([replace(wide, width=30), chart])] == [1, 1]


def test_every_panel_is_on_a_dashboard_with_its_question() -> None:
    drawn = {(p["title"], p["description"]): p for name in NAMES for p in panels(name)}
    assert len(PANELS) > 60
    for panel in PANELS:
        assert (panel.title, panel.question) in drawn, f"{panel.key} is on no dashboard: run `make golden`"
        built = drawn[panel.title, panel.question]
        assert len(built["targets"]) == len(panel.curves)
        assert built["fieldConfig"]["defaults"]["noValue"] == panel.empty


def test_a_site_s_own_threshold_is_in_its_dashboards() -> None:
    def steps(config: Config | None) -> list[float | None]:
        [shm] = [p for p in grafana.load(config)["gpuwatch-node.json"]["panels"] if p["title"] == "/dev/shm used"]
        return [step["value"] for step in shm["fieldConfig"]["defaults"]["thresholds"]["steps"]]

    assert steps(None) == [None, THRESHOLDS.shm_used]
    assert steps(Config(thresholds=Thresholds(shm_used=0.65))) == [None, 0.65]


def test_pages_and_top_warn_from_a_site_s_own_threshold_on(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("[thresholds]\nshm_used = 0.65\n")
    script = """
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.top import sections
print(BY_KEY["node_shm"].thresholds()[0][0], sections.THRESHOLDS.shm_used)
"""
    own = {**os.environ, "GPUWATCH_CONFIG": str(tmp_path / "site.toml")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["0.65", "0.65"]
    (tmp_path / "site.toml").write_text("[thresholds]\nshm_usd = 0.65\n")
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)
    assert "did you mean shm_used?" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_an_expression_is_a_metric_a_recorded_series_or_a_variable(name: str) -> None:
    config = Config(prices=Prices(1.0))
    recorded = {r["record"] for g in groups(config.alerts, config.prices) for r in g["rules"] if "record" in r}
    variables = {variable["name"] for variable in load(name)["templating"]["list"]} | BUILT_IN
    read = set()
    for expr in expressions(name):
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', re.sub(r'__name__=~"([\w|]+)"', r"\1", expr))
        names = set(re.findall(r"(?<![\w:$])((?:\w+:)?gpuwatch_\w+(?::\w+)?|up(?=\{)|ALERTS)", bare))
        assert names, expr
        for each in names:
            assert each in BY_NAME or each in recorded or each in NOT_OURS, each
        assert set(re.findall(r"\$\{?(\w+)", expr)) <= variables, expr
        read |= names
    assert len(read) > 10


def test_what_pages_reports_and_digests_read_is_recorded_under_the_same_name_whatever_a_site_s_windows_are() -> None:
    """They do not know the site's windows.

    With the window in a name, the page "Fleet", `digest` and `report --job` found nothing.
    """
    windows = {each.name: getattr(AlertThresholds(), each.name) for each in fields(AlertThresholds)}
    longer = {name: 2 * value for name, value in windows.items() if name.endswith(("_window_s", "_baseline_s"))}
    (usual, own) = (
        {rule["record"] for group in groups(alerts, Prices(1.0)) for rule in group["rules"] if "record" in rule}
        for alerts in (AlertThresholds(), AlertThresholds(**longer))
    )
    assert "run:gpuwatch_step_seconds:median12h" in own - usual
    asked = [curve.promql for panel in PANELS for curve in panel.curves]
    asked += [str(ledgers).replace("$metric", each) for ledgers in [template("ledgers.yml")] for each in METRICS]
    read = {name for text in asked for name in re.findall(r"\b[a-z_]+:gpuwatch_\w+:\w+", text)}
    assert len(read) > 15 and read - (usual & own) == set()


METRICS = ("hours", "cost", "energy_joules")
"""What `ledgers.yml` fills in for `$metric`."""
OF_THE_WHOLE_RUN = {"Step time, long term", "Goodput of the job", "Alerts"}
"""Over all ranks and nodes, recorded or fired so: none has a label of its node."""


@pytest.mark.parametrize(
    ("name", "selections"),
    [
        ("gpuwatch-fleet", ("instance", "user", "job")),
        ("gpuwatch-node", ("instance",)),
        ("gpuwatch-run", ("instance",)),  # the job's choice narrows that of the run
    ],
)
def test_every_selection_applies_to_every_panel(name: str, selections: tuple[str, ...]) -> None:
    for panel in panels(name):
        for target in panel.get("targets", ()):
            chosen = set(re.findall(r'=~?"\$(\w+)"', target["expr"]))
            needed = set() if name == "gpuwatch-run" and panel["title"] in OF_THE_WHOLE_RUN else set(selections)
            assert needed <= chosen, (panel["title"], target["expr"])
            if name == "gpuwatch-run":
                assert chosen & {"run", "instance"}, panel["title"]
            for metric in re.findall(r"(?<!:)gpuwatch_gpu_\w+(?=\{)", target["expr"]):
                assert name == "gpuwatch-fleet" or "gpu" in chosen, (panel["title"], metric)


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_to_a_dashboard_and_a_variable_that_exist(name: str) -> None:
    uids = {load(each)["uid"]: load(each) for each in NAMES}
    urls = re.findall(r"/d/([\w-]+)\?([^\")\s]*)", json.dumps(load(name)))
    assert urls
    for uid, query in urls:
        for key, _ in re.findall(r"([\w-]+)=([^&]*)", query):
            assert key.removeprefix("var-") in {v["name"] for v in uids[uid]["templating"]["list"]}, (uid, query)


def test_every_link_to_a_runbook_leads_to_a_file_of_the_docs() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_dashboards import runbook_url

    pages = {panel.runbook for panel in PANELS if panel.runbook}
    assert {"GpuStarved", "ShmNearlyFull", "causes"} <= pages
    for page in pages | set(alert_rules()):
        assert (ROOT / runbook_url(page).removeprefix("http://127.0.0.1:9478/")).is_file(), page
    links = [
        url
        for name in NAMES
        for url in re.findall(r'"url": "(http://127.0.0.1:9478/docs/[^"]+)"', json.dumps(load(name)))
    ]
    assert {runbook_url(page) for page in pages} | {runbook_url("${__value.text}")} == set(links)
    [fleet] = [
        d
        for d in grafana.load(Config(alerts=AlertThresholds(runbooks="https://wiki/run/"))).values()
        if d["uid"] == "gpuwatch-fleet"
    ]
    assert "https://wiki/run/GpuStarved.md" in grafana.text(fleet) and "docs/runbooks" not in grafana.text(fleet)


def test_tables_show_each_of_their_columns_by_its_title() -> None:
    [table] = [panel for panel in panels("gpuwatch-fleet") if panel["title"] == "By user"]
    [organize] = [t["options"] for t in table["transformations"] if t["id"] == "organize"]
    titles = ["User", "GPU-hours", "Useful", "Starved", "Held idle", "Stalled", "Lost", "Lost money", "GPUs now"]
    in_order = sorted(organize["indexByName"], key=organize["indexByName"].__getitem__)
    assert [organize["renameByName"][column] for column in in_order] == titles
    units = {
        o["matcher"]["options"]: p["value"]
        for o in table["fieldConfig"]["overrides"]
        for p in o["properties"]
        if p["id"] == "unit"
    }
    assert (units["GPU-hours"], units["Useful"], units["Lost money"]) == ("h", "percentunit", "currency:USD")


@pytest.mark.parametrize("name", NAMES)
def test_values_with_a_look_are_shown_by_its_name(name: str) -> None:
    """Their overrides find a line by its legend: it has to be the bare value."""
    shown = 0
    for panel in panels(name):
        looks = {o["matcher"]["options"] for o in panel["fieldConfig"]["overrides"] if o["matcher"]["id"] == "byName"}
        for target in panel["targets"] if panel["type"] == "timeseries" and looks else ():
            shown += target["legendFormat"] in [f"{{{{{label}}}}}" for label in LOOKS]
            assert not re.search(r"\{\{(state|phase|percentile|kind)\}\}.", target["legendFormat"]), panel["title"]
    assert shown >= 2


def test_dashboards_fit_a_site_s_scrape_job_and_currency() -> None:
    config = Config(alerts=AlertThresholds(job="agents"), prices=Prices(2.0, "EUR"))
    fitted = {name: grafana.text(dashboard) for name, dashboard in grafana.load(config).items()}
    text = fitted["gpuwatch-fleet.json"]
    assert "USD" not in text and '"currency:EUR"' in text and '"computing, EUR/h"' in text
    assert 'up{job=~\\"agents\\"' in text
    assert (
        grafana.text(grafana.load()["gpuwatch-fleet.json"])
        == (ROOT / "dashboards/grafana/gpuwatch-fleet.json").read_text()
    )


def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool in PATH")
    found = [expr for name in NAMES for expr in expressions(name)]
    filled = [
        re.sub(r"\$__interval_ms", "5000", re.sub(r"\$__(rate_interval|interval|range)\b", "1m", e)) for e in found
    ]
    rules = [{"record": f"x:{n}", "expr": expr} for n, expr in enumerate(filled)]
    file = tmp_path / "rules.json"  # YAML is a superset of JSON
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout and len(rules) > 100
