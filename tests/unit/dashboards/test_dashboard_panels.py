"""The list of panels against the catalogue, and as PromQL (which the real promtool must accept)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.errors import ConfigError
from gpuwatch.ledger.states import GPU_STATES
from gpuwatch.metrics import BY_NAME, CATALOGUE
from gpuwatch.tables import fill
from gpuwatch.tools.reports.display import PHASES, STATES
from gpuwatch_dashboards.panels import BY_KEY, PANELS, Kind, Panel, live_panels, unit_of
from gpuwatch_dashboards.query import Match, Query, Scope, Span, filled, render


def parts(query: Query) -> list[Query]:
    return [query, *(parts(query.over) if query.over else [])]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.key)
def test_panel_asks_for_what_the_catalogue_has(panel: Panel) -> None:
    for curve in panel.curves:
        assert curve.metric or curve.promql, "a curve without a query"
        if not curve.metric:
            with pytest.raises(TypeError, match="only Prometheus"):
                curve.query  # noqa: B018
            continue
        for query in parts(curve.query):
            metric = BY_NAME[query.metric]
            assert metric.kind in ("counter", "gauge")
            assert {*query.by, *(match.label for match in query.where)} <= set(metric.labels)
        assert set(re.findall(r"\{(\w+)\}", curve.legend)) <= set(curve.query.by)
        assert curve.promql or unit_of(curve.query) == panel.unit
        if curve.query.over:
            assert set(curve.query.over.by) <= set(curve.query.by)
            assert curve.query.of_a_run == curve.query.over.of_a_run


def test_keys_are_unique_and_most_panels_have_a_live_reading() -> None:
    assert len(BY_KEY) == len(PANELS)
    live = {panel.key for panel in live_panels()}
    assert len(live) > 25 and {"ledger", "shm", "gpu_temperature", "memory", "agent_cost", "node_shm"} <= live
    assert {"agent_cost", "agent_memory", "agent_failures"} <= {panel.key for panel in live_panels("agent")}
    assert not live & {"by_user", "fleet_states", "owners"}


def test_every_metric_is_read_by_a_rule_a_panel_a_page_or_a_command() -> None:
    """Those of `--series full` are details for a site's own queries; all others would be paid for and never seen."""
    root = Path(__file__).parents[3]
    files = [
        p
        for folder in ("gpuwatch", "dashboards", "scripts")
        for p in (root / folder).rglob("*")
        if p.suffix in (".py", ".yml")
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in files if path != root / "gpuwatch/metrics.yml")
    read = {
        *re.findall(r"gpuwatch_\w+", text),
        *(part.metric for panel in live_panels() for c in panel.curves for part in parts(c.query)),
    }
    unread = [
        metric.name
        for metric in CATALOGUE
        if metric.when not in ("full", "history")
        and read.isdisjoint({metric.name, *(f"{metric.name}_{end}" for end in ("bucket", "sum"))})
    ]
    assert not unread, (
        f"nothing reads {', '.join(unread)}: add a panel, a rule or a command that does, "
        "or give the metric `when: history` or `when: full` in gpuwatch/metrics.yml"
    )


def test_a_threshold_is_a_name_of_the_catalogue() -> None:
    assert BY_KEY["node_shm"].thresholds() == [(THRESHOLDS.shm_used, "warning")] == [(0.8, "warning")]
    assert BY_KEY["node_shm"].thresholds(Thresholds(shm_used=0.7)) == [(0.7, "warning")]
    assert all(isinstance(value, float) for panel in PANELS for value, _ in panel.thresholds())
    with pytest.raises(AttributeError, match="shm_usde"):
        replace(BY_KEY["node_shm"], warning="shm_usde").thresholds()


def test_an_entry_with_a_wrong_field_text_or_kind_is_noticed() -> None:
    entry = {"key": "a", "title": "A", "question": "Is it?", "curves": [{"metric": "gpuwatch_load1"}]}
    assert Panel.of(entry).unit == "1" and Panel.of(entry).is_live
    with pytest.raises(TypeError, match="heigth"):
        Panel.of({**entry, "heigth": 3})
    with pytest.raises(TypeError, match="metrik"):
        Panel.of({**entry, "curves": [{"metrik": "gpuwatch_load1"}]})
    with pytest.raises(ConfigError, match="of_nodes"):
        fill({"question": "${of_nodes}"}, {"of_node": "node"})
    assert {panel.kind for panel in PANELS} == set(get_args(Kind))


def test_every_state_and_phase_has_a_look_of_its_own() -> None:
    assert set(STATES) == set(GPU_STATES)
    assert set(PHASES) == {"data_wait", "transfer", "compute"}
    looks = [(look.colour, look.pattern) for look in STATES.values()]
    assert len({look.name for look in STATES.values()}) == len(STATES)
    assert len(set(looks)) == len(looks)


def test_ledger_as_promql() -> None:
    query, selected = BY_KEY["ledger"].curves[0].query, 'run="r1", rank=~"0", instance=~"n:1"'
    assert render(query, Scope("r1", "0", "n:1"), "1m") == (
        f"sum by (state) (rate(gpuwatch_run_seconds_total{{{selected}}}[1m]))"
        f" / on () group_left () (sum(rate(gpuwatch_run_seconds_total{{{selected}}}[1m])) > 0)"
    )


def test_node_metric_keeps_nodes_apart_and_ignores_the_run() -> None:
    query = Query("gpuwatch_cpu_seconds_total", where=(Match("mode", "!=", "idle"),))
    assert render(query, Scope("r1", "0", "n:1"), "30s") == (
        'sum by (instance) (rate(gpuwatch_cpu_seconds_total{instance=~"n:1", mode!="idle"}[30s]))'
    )


def test_values_are_quoted() -> None:
    expr = render(Query("gpuwatch_steps_total"), Scope(run='a"b\\c\nd'), "1m")
    assert expr == 'sum(rate(gpuwatch_steps_total{run="a\\"b\\\\c\\nd"}[1m]))'


def test_grafana_s_variables_are_the_scope_s_values_and_what_is_open_matches_anything() -> None:
    promql = (
        'sum(rate(x{run="$run", rank=~"$rank", user=~"$user"}[$__rate_interval])) + y[$__range] + up{job=~"gpuwatch"}'
    )
    expr = filled(promql, Scope(run='a"b'), Span(0.0, 900.0), "20s")
    assert expr == ('sum(rate(x{run="a\\"b", rank=~".*", user=~".*"}[20s])) + y[900s] + up{job=~".*gpuwatch.*"}')


def promtool_accepts(expressions: list[str], folder: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool in PATH")
    rules = [{"record": f"x:{n}", "expr": expr} for n, expr in enumerate(expressions)]
    file = folder / "rules.json"  # YAML is a superset of JSON
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_promtool_accepts_every_panel(tmp_path: Path) -> None:
    scope = Scope("a run", "0|1", "node-17:9478")
    span = Span(0.0, 3600.0)
    found = [
        filled(curve.promql, scope, span, "1m") if curve.promql else render(curve.query, scope, "1m")
        for panel in PANELS
        for curve in panel.curves
    ]
    assert not any("$" in expr for expr in found)
    promtool_accepts(found, tmp_path)
