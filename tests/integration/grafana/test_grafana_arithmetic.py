"""What the dashboards' longest expressions give on series whose truth is known, by promtool."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.alerting.render import groups, render
from gpuwatch.alerting.thresholds import Prices
from tests.grafana_variables import load
from tests.servers import require

FILLED = {"$__range": "2h", "$__rate_interval": "2m"}
EVERYTHING = {"$instance": ".*", "$user": ".*", "$job": ".*", "$run": "r1"}


def expression(dashboard: str, panel: str, ref_id: str) -> str:
    """Return a panel's query over the last two hours of everything."""
    [found] = [p for p in load(f"gpuwatch-{dashboard}")["panels"] if p["title"] == panel]
    [expr] = [target["expr"] for target in found["targets"] if target["refId"] == ref_id]
    return filled(expr)


def filled(expr: str) -> str:
    for name, value in {**FILLED, **EVERYTHING}.items():
        expr = expr.replace(name, value)
    return expr


def check(
    folder: Path, series: list[dict[str, str]], expected: dict[str, dict[str, float]], at: str, evaluated: str = "5m"
) -> None:
    """Have promtool compare: expressions, each with its values by labels, at a time."""
    (folder / "rules.yml").write_text(render(prices=Prices(2.0)))
    tests = [
        {"expr": expr, "eval_time": at, "exp_samples": [{"labels": k, "value": v} for k, v in samples.items()]}
        for expr, samples in expected.items()
    ]
    test: dict[str, Any] = {"interval": "30s", "input_series": series, "promql_expr_test": tests}
    # promtool evaluates all groups alike: unless asked otherwise as often as the one that records hours
    order = [group["name"] for group in groups(prices=Prices(2.0))]
    scenarios = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": evaluated,
        "group_eval_order": order,
        "tests": [test],
    }
    (folder / "test.yml").write_text(json.dumps(scenarios))
    command = [require("promtool"), "test", "rules", str(folder / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_gpu_hours_and_money_by_user_over_two_hours_of_three(tmp_path: Path) -> None:
    """Alice's two GPUs compute half of the time and wait for the rest; Bob's is held idle, for the last hour only."""
    gpu = 'job="gpuwatch",instance="n1:9478",gpu="{0}",UUID="GPU-{0}"'

    def ledger(number: int, state: str, values: str) -> dict[str, str]:
        return {"series": f'gpuwatch_gpu_seconds_total{{{gpu.format(number)},state="{state}"}}', "values": values}

    def about(metric: str, number: int, more: str, values: str) -> dict[str, str]:
        return {"series": f"{metric}{{{gpu.format(number)}{more}}}", "values": values}

    late = "_x240"
    series = []
    for n in (0, 1):
        series += [ledger(n, "compute", "0+15x360"), ledger(n, "input_wait", "0+15x360")]
        series += [about("gpuwatch_gpu_owner_info", n, ',user="alice",run="r1"', "1x360")]
        series += [about("gpuwatch_gpu_ledger_watermark_timestamp_seconds", n, "", "0+30x360")]
    series += [ledger(2, "held_idle", f"{late} 0+30x119")]
    series += [about("gpuwatch_gpu_owner_info", 2, ',user="bob"', f"{late} 1x119")]
    series += [about("gpuwatch_gpu_ledger_watermark_timestamp_seconds", 2, "", f"{late} 0+30x119")]
    # to half an hour: the recorded rate is a mean of five minutes, so that a part of Bob's first five is not in it
    bobs = {("A", 1.0), ("D", 1.0), ("F", 1.0), ("G", 2.0)}
    alices = {("A", 4.0), ("C", 2.0), ("F", 2.0), ("G", 4.0)}
    expected: dict[str, dict[str, float]] = {}
    for ref in "ACDFG":
        hours = expression("fleet", "By user", ref)
        values = {'{user="alice"}': dict(alices).get(ref, 0.0), '{user="bob"}': dict(bobs).get(ref, 0.0)}
        if ref in "CD":  # no series of a kind that a user never had is wanted, 0 is
            values = {k: v for k, v in values.items() if v}
            hours = f"({hours}) > 0"
        expected[f"round({hours}, 0.5)"] = values
    check(tmp_path, series, expected, "3h")


def test_counts_of_gpus_are_counts_a_minute_after_the_start_of_prometheus(tmp_path: Path) -> None:
    """Of Alice's eight GPUs the half waits for data; of Bob's two none does."""
    series = []
    for n in range(10):
        gpu, user = f'job="gpuwatch",instance="n1:9478",gpu="{n}",UUID="GPU-{n}"', "alice" if n < 8 else "bob"
        state = "input_wait" if n < 4 else "compute"
        series += [
            {"series": f'gpuwatch_gpu_seconds_total{{{gpu},state="{state}"}}', "values": "9000+30x3"},
            {"series": f"gpuwatch_gpu_ledger_watermark_timestamp_seconds{{{gpu}}}", "values": "9000+30x3"},
            {"series": f'gpuwatch_gpu_owner_info{{{gpu},user="{user}"}}', "values": "1x3"},
        ]
    expected = {
        expression("fleet", "GPUs", "A"): {"{}": 10.0},
        expression("fleet", "GPUs lost", "A"): {"{}": 4.0},
        expression("fleet", "By user", "H"): {'{user="alice"}': 8.0, '{user="bob"}': 2.0},
        expression("fleet", "GPU time lost now", "A"): {'{instance="n1:9478",kind="starved",user="alice"}': 4.0},
    }
    check(tmp_path, series, expected, "60s", "30s")


def test_an_alert_about_a_run_on_several_nodes_is_on_the_board_of_each(tmp_path: Path) -> None:
    info = 'gpuwatch_run_info{{job="gpuwatch",instance="{}",run="r1",rank="{}",user="alice",job_id="7"}}'
    alert = 'ALERTS{alertname="GpuStarved",alertstate="firing",severity="warning",run="r1",user="alice",job_id="7"}'
    series = [{"series": each, "values": "1x10"} for each in (info.format("n1", 0), info.format("n2", 1), alert)]
    [board] = [p for p in load("gpuwatch-fleet")["panels"] if p["title"] == "Alerts"]
    expected = {
        filled(board["targets"][0]["expr"].replace("$instance", instance)): {
            '{alertname="GpuStarved", severity="warning", run="r1", user="alice", job_id="7"}': 1.0
        }
        if shown
        else {}
        for instance, shown in ((".*", True), ("n2", True), ("n3", False))
    }
    check(tmp_path, series, expected, "3m")


@pytest.mark.parametrize(
    ("at", "begins", "ends"),
    [("10m30s", True, False), ("15m", False, False), ("20m30s", False, True), ("25m", False, False)],
)
def test_a_run_is_marked_where_it_begins_and_where_it_ends(tmp_path: Path, at: str, begins: bool, ends: bool) -> None:
    up = 'gpuwatch_run_up{job="gpuwatch",instance="n1:9478",run="r1",rank="0"}'
    series = [{"series": up, "values": "_x20 1x19 0x20"}]
    marks = {
        mark["name"]: filled(mark["expr"]) for mark in load("gpuwatch-run")["annotations"]["list"] if "expr" in mark
    }
    here = {'{run="r1"}': 1.0}
    check(tmp_path, series, {marks["Run begins"]: here if begins else {}, marks["Run ends"]: here if ends else {}}, at)
