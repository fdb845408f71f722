"""What is shipped for Prometheus and Alertmanager, checked by their own tools; promtool tests the alerts' scenarios."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwatch.alerting.render import groups, render
from gpuwatch.alerting.thresholds import AlertThresholds, Prices
from gpuwatch_dashboards.panels import BY_KEY
from tests.programs import ROOT
from tests.replay import parsed
from tests.servers import GO, require

DEPLOY = ROOT / "deploy"
RULES = sum(len(group["rules"]) for group in groups())
RULES_FILE = DEPLOY / "prometheus/rules/gpuwatch.yml"
DEADLINE_S = 1500
"""Bounds a failure only: these run at the lowest priority, beside all other tests."""
pytestmark = pytest.mark.timeout(DEADLINE_S + 100)
ENVIRONMENT = {**os.environ, **GO, "GOGC": "1600"}
SCENARIOS = sorted((DEPLOY / "prometheus/tests").glob("*.yml"))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_golden_metrics_page() -> None:
    """Every metric of the catalogue has the name, unit, kind and labels that promtool wants.

    No label is in camelCase, as dcgm-exporter's modelName is.
    """
    page = (ROOT / "tests/golden/metrics.txt").read_text()
    command = [require("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    broken = subprocess.run(
        command, input=page.replace('model="', 'modelName="'), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert "camelCase" in broken.stdout + broken.stderr and "modelName" not in page


def test_prometheus_configuration_and_the_rules_it_names() -> None:
    output = run(require("promtool"), "check", "config", str(DEPLOY / "prometheus/prometheus.yml"))
    assert "1 rule files found" in output
    assert f"{RULES} rules found" in output


def test_rules_with_short_windows(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(
        render(AlertThresholds(starved_window_s=30, starved_min_training_s=10, starved_for_s=5, keep_firing_for_s=0))
    )
    assert f"{RULES} rules found" in run(require("promtool"), "check", "rules", str(rules))


def test_rules_with_prices_by_model(tmp_path: Path) -> None:
    """What a GPU costs by its model, by whom; and the alert says so in money."""
    (tmp_path / "rules.yml").write_text(render(prices=Prices(2.0, "EUR", {"NVIDIA H200": 4.0})))
    gpu = 'job="gpuwatch",instance="n1:9478",gpu="{0}",UUID="GPU-{0}"'
    series = [
        {"series": f'gpuwatch_gpu_seconds_total{{{gpu.format(n)},state="held_idle"}}', "values": "0+30x80"}
        for n in (0, 1)
    ]
    series += [
        {"series": f"gpuwatch_gpu_ledger_watermark_timestamp_seconds{{{gpu.format(n)}}}", "values": "0+30x80"}
        for n in (0, 1)
    ]
    series += [{"series": f'gpuwatch_gpu_owner_info{{{gpu.format(n)},user="alice"}}', "values": "1x80"} for n in (0, 1)]
    series += [{"series": f'gpuwatch_gpu_info{{{gpu.format(0)},model="NVIDIA H200"}}', "values": "1x80"}]
    cost = 'owner_kind:gpuwatch_gpu_cost:per_hour{instance="n1:9478",kind="idle",user="alice"}'
    test = {
        "interval": "30s",
        "input_series": series,
        "promql_expr_test": [{"expr": cost, "eval_time": "20m", "exp_samples": [{"labels": cost, "value": 6}]}],
    }
    scenarios = {"rule_files": ["rules.yml"], "evaluation_interval": "60s", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(scenarios))
    assert "SUCCESS" in run(require("promtool"), "test", "rules", str(tmp_path / "test.yml"))


@pytest.mark.parametrize("models", [{}, {"NVIDIA H200": 4.0}], ids=["one price", "by model"])
def test_an_alert_shows_its_cost_in_money(tmp_path: Path, models: dict[str, float]) -> None:
    """Two GPUs for a day at 2 EUR an hour, which is the default where no model is known."""
    text = yaml.safe_load(render(prices=Prices(2.0, "EUR", models)))
    rules = [rule for group in text["groups"] for rule in group["rules"]]
    [condition] = [rule for rule in rules if rule.get("record") == "alert:GpuLost:value"]
    [lost] = [rule for rule in rules if rule.get("alert") == "GpuLost"]
    lost["annotations"] = {"cost": lost["annotations"]["cost"]}
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "own", "rules": [condition, lost]}]}))
    labels = {"job": "gpuwatch", "instance": "n1:9478"}
    series = [
        {"series": f"gpuwatch_gpus_{what}{{job='gpuwatch',instance='n1:9478'}}", "values": f"{count}x20"}
        for what, count in (("expected", 8), ("seen", 6))
    ]
    alert = {
        "exp_labels": {**labels, "severity": "critical", "about": "n1:9478"},
        "exp_annotations": {"cost": "48.0 GPU-hours a day (96.00 EUR)"},
    }
    expected = [{"eval_time": "5m", "alertname": "GpuLost", "exp_alerts": [alert]}]
    test = {"interval": "30s", "input_series": series, "alert_rule_test": expected}
    scenarios = {"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(scenarios))
    assert "SUCCESS" in run(require("promtool"), "test", "rules", str(tmp_path / "test.yml"))


def test_an_alert_s_cost_is_that_of_its_own_model(tmp_path: Path) -> None:
    """A site has H200s at 4 EUR and other GPUs at 2 EUR.

    An idle GPU, a run that starves and a lost GPU each cost their own price, not the mean.
    """
    text = yaml.safe_load(render(prices=Prices(2.0, "EUR", {"NVIDIA H200": 4.0})))
    for rule in (rule for group in text["groups"] for rule in group["rules"] if "alert" in rule):
        rule["annotations"] = {"cost": rule["annotations"]["cost"]}
        rule["labels"] = {}
    (tmp_path / "rules.yml").write_text(json.dumps(text))
    series, alerts = [], []
    for node, model, per_hour in (("n1:9478", "NVIDIA H200", 4), ("n2:9478", "NVIDIA A100", 2)):
        base, its_run = {"job": "gpuwatch", "instance": node}, {"run": f"run on {node}"}
        idle, busy = ({**base, "gpu": str(n), "UUID": f"GPU-{n} of {node}"} for n in (0, 1))
        values = [
            ("gpu_seconds_total", {**idle, "state": "held_idle"}, "0+30x80"),
            ("gpu_seconds_total", {**busy, "state": "compute"}, "0+30x80"),
            *(("gpu_ledger_watermark_timestamp_seconds", gpu, "0+30x80") for gpu in (idle, busy)),
            *(("gpu_info", {**gpu, "model": model}, "1x80") for gpu in (idle, busy)),
            ("gpu_owner_info", {**idle, "user": "alice"}, "1x80"),
            ("gpu_owner_info", {**busy, **its_run, "rank": "0", "user": "bob"}, "1x80"),
            ("run_info", {**base, **its_run, "rank": "0", "user": "bob"}, "1x80"),
            ("run_up", {**base, **its_run, "rank": "0"}, "1x80"),
            *(("run_seconds_total", {**base, **its_run, "rank": "0", "state": s}, "0+15x80") for s in ("input_wait", "compute")),
            ("gpus_expected", base, "4x80"),
            ("gpus_seen", base, "2x80"),
        ]  # fmt: skip
        for name, labels, numbers in values:
            selector = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            series.append({"series": f"gpuwatch_{name}{{{selector}}}", "values": numbers})
        for name, labels, hours in (
            ("GpuHeldIdle", {**idle, "user": "alice"}, 24),
            ("GpuStarved", {**base, **its_run, "user": "bob"}, 12),
            ("GpuLost", base, 48),
        ):
            cost = f"{hours}.0 GPU-hours a day ({hours * per_hour}.00 EUR)"
            alerts.append((name, {"exp_labels": labels, "exp_annotations": {"cost": cost}}))
    expected = [
        {"eval_time": "35m", "alertname": name, "exp_alerts": [alert for each, alert in alerts if each == name]}
        for name in ("GpuHeldIdle", "GpuStarved", "GpuLost")
    ]
    test = {"interval": "30s", "input_series": series, "alert_rule_test": expected}
    scenarios = {"rule_files": ["rules.yml"], "evaluation_interval": "60s", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(scenarios))
    assert "SUCCESS" in run(require("promtool"), "test", "rules", str(tmp_path / "test.yml"))


def test_agents_of_several_scrape_jobs(tmp_path: Path) -> None:
    """Of two clusters, say, in one Prometheus: the agents of each are missed."""
    (tmp_path / "rules.yml").write_text(render(AlertThresholds(job="gpuwatch-a|gpuwatch-b")))
    series = [
        {"series": f'up{{job="{job}",instance="n1:9478"}}', "values": values}
        for job, values in (("gpuwatch-a", "1x20"), ("gpuwatch-b", "1x10 0x10"), ("node", "0x20"))
    ]
    firing = 'count by (job) (ALERTS{alertname="GpuwatchAgentDown",alertstate="firing"})'
    expected = [
        {"expr": firing, "eval_time": "4m", "exp_samples": []},
        {"expr": firing, "eval_time": "9m", "exp_samples": [{"labels": '{job="gpuwatch-b"}', "value": 1}]},
    ]
    test = {"interval": "30s", "input_series": series, "promql_expr_test": expected}
    scenarios = {"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(scenarios))
    assert "SUCCESS" in run(require("promtool"), "test", "rules", str(tmp_path / "test.yml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_alert(tmp_path: Path, path: Path) -> None:
    scenarios = parsed(path.read_text())
    done = run_scenarios(tmp_path, scenarios, RULES_FILE.read_text())
    output = done.stdout + done.stderr
    assert (done.returncode, output.count("SUCCESS")) == (0, len(scenarios["tests"])), output


@pytest.mark.parametrize(
    ("old", "new", "alert", "scenario"),
    [
        (
            "or last_over_time(alert:GpuStarved:value[15m])",
            "or alert:GpuStarved:value",
            "GpuStarved",
            "stale: the agent",
        ),
        ("unless on (job, run) run:gpuwatch_run:ended", "", "GpuStarved", "fires: a 64-rank"),
        (
            "\n        unless on (job, run) run:gpuwatch_run:ended\n      )\n",
            "\n      )\n",
            "ShmForecast",
            "fires: until",
        ),
        (
            "\n        unless on (job, run) run:gpuwatch_run:ended\n      unless on (job, instance, gpu, UUID) gpu_kind",
            "\n      unless on (job, instance, gpu, UUID) gpu_kind",
            "GpuHeldIdle",
            "fires: until the run",
        ),
        (
            "\n        unless on (job, instance, gpu, UUID) gpu:gpuwatch_gpu_throttled:share5m < 0.5 / 2",
            "",
            "GpuThrottled",
            "fires: until",
        ),
        (
            "throttled:share5m > 0.5)\n      * on (job, instance, gpu, UUID) group_left (user,",
            "throttled:share5m > 0.5)\n      * on (job, instance, gpu, UUID) group_left (run, user,",
            "GpuThrottled",
            "fires: trials",
        ),
        (
            "unless on (job, job_id) (last_over_time(job_id:gpuwatch_job:ended[15m])",
            "unless on (job, job_id) (vector(1)",
            "JobGoodputLow",
            "fires: until",
        ),
        (
            "unless on (job, job_id) (last_over_time(job_id:gpuwatch_job:ended[15m])",
            "unless on (job, job_id) (vector(1)",
            "JobRestartLoop",
            "fires: until",
        ),
        ("      unless on (job, job_id) gpuwatch_job_attempts_total\n", "", "JobGoodputLow", "stale: the last"),
        ("keep_firing_for: 15m", "keep_firing_for: 0s", "RunKilled", "stale: the ended"),
        ("and on (job, run) run:gpuwatch_run_up:max == 0", "", "RunKilled", "quiet: a run"),
        ("> time() - 3600", "> time() - 60", "PhaseStuck", "quiet: an evaluation"),
        (
            ") unless on (job, instance, gpu, UUID) gpu:gpuwatch_gpu_utilization_ratio:busy_at_low_power\n",
            ")\n",
            "PhaseStuck",
            "fires: all ranks spin",
        ),
        ("max_over_time(gpuwatch_gpu_dram_bandwidth_ratio[10m])", "vector(0)", "PhaseStuck", "quiet: two hours"),
        (
            "max by (job, run) (run_rank:gpuwatch_gpu_busy:timestamp)",
            "max by (job, run) (run_rank:gpuwatch_gpu_busy:timestamp * 0)",
            "PhaseStuck",
            "quiet: two hours",
        ),
        (
            'unless on (job, instance, run, rank) gpuwatch_run_info{device="cpu"}',
            "",
            "PhaseStuck",
            "quiet: an evaluation",
        ),
        ("and owner:gpuwatch_short_runs:count >= 3", "", "ShortRunsStarved", "quiet: trials that"),
        ("unless on (job, run) run:gpuwatch_short_run:begun", "", "ShortRunsStarved", "fires: trials of"),
        (
            "+ (owner:gpuwatch_short_runs:count10m offset",
            "+ 0 * (owner:gpuwatch_short_runs:count10m offset",
            "ShortRunsStarved",
            "fires: trials of",
        ),
        (
            'last_over_time(gpuwatch_run_info{timeline="host", device=~"(jax|tensorflow).*"}[5m])',
            'gpuwatch_run_info{timeline="host", device=~"(jax|tensorflow).*"}',
            "GpuStarved",
            "quiet: the same",
        ),
        (
            "unless on (job, run) (run:gpuwatch_run_phases:increase2m > 0 or alert:RunHung:value or alert:RunStalled:value)",
            "",
            "GpuBusyNoProgress",
            "quiet: rank 0",
        ),
        ("and on (job, instance) node:gpuwatch_restarts:count1h", "", "GpuwatchTelemetryLost", "fires: the node"),
        ("_timestamp_seconds < -180", "_timestamp_seconds < -18000", "GpuwatchTelemetryLost", "fires: the node"),
        (
            'last_over_time(gpuwatch_gpu_owner_info{run!=""}[5m])',
            'gpuwatch_gpu_owner_info{run!=""}',
            "GpuXid",
            "fires: the run",
        ),
        (
            "or on (job, instance, gpu, UUID) last_over_time(gpuwatch_gpu_owner_info[2m])",
            "",
            "missed",
            "",
        ),
        ("last_over_time(gpuwatch_straggler_excess_ratio[2m])", "gpuwatch_straggler_excess_ratio", "missed", ""),
        (">= on (job, run) run:gpuwatch_run_up:count", ">= count by (job, run) (gpuwatch_run_up == 1)", "missed", ""),
        ("last_over_time(gpuwatch_run_up[10m])) == 0", "gpuwatch_run_up) == 0", "ShortRunsStarved", "stale: the agent"),
        (
            'unless on (job, run) last_over_time(gpuwatch_run_info{device="cpu"}[2m])',
            "",
            "RunInefficient",
            "quiet: a fifth",
        ),
        (
            'state=~"input_wait|transfer|compute|host_wait|comm_wait"',
            'state=~".+"',
            "GpuStarved",
            "fires: evaluations and",
        ),
        ("\n        unless run_rank:gpuwatch_steps:increase1m > 0", "", "RunStalled", "quiet: one slow"),
        ('{state=~"eval|checkpoint|compile"}[2m])', '{state="none"}[2m])', "RunHung", "quiet: two ranks"),
        (
            ">= 0.02 * count by (job) (run:gpuwatch_run_up:max",
            ">= 2 * count by (job) (run:gpuwatch_run_up:max",
            "ManyRunsStalled",
            "fires: the",
        ),
        ("        - 900\n      )", "        - 9000\n      )", "ManyRunsStalled", "quiet: eight runs stop and"),
        ('FOR_STATE{alertname="ManyRunsStalled"}', 'FOR_STATE{alertname="none"}', "ManyRunsStalled", "fires: until"),
        (
            "last_over_time(run:gpuwatch_run_stopped:timestamp[5m]) and",
            "vector(0) and",
            "ManyRunsStalled",
            "quiet: eight runs stop and",
        ),
        ("for: 30s\n", "for: 0s\n", "ManyRunsStalled", "quiet: eight runs stop for"),
        (":timestamp) >= 5\n", ":timestamp) >= 4\n", "ManyRunsStalled", "quiet: four"),
        ("gpuwatch_gpu_last_xid == 45", "gpuwatch_gpu_last_xid == 44", "GpuXid", "quiet: an XID"),
        ("time() - gpuwatch_gpu_last_xid_timestamp_seconds < 300", "gpuwatch_gpu_last_xid", "GpuXid", "fires: the run"),
        (
            "topk by (job, instance, gpu, UUID) (1,\n      gpuwatch_gpu_owner_info and",
            "sum without () (\n      gpuwatch_gpu_owner_info and",
            "GpuHeldIdle",
            "fires: an owner",
        ),
        ("for: 1m\n", "for: 0s\n", "GpuwatchAgentDown", "quiet: a restart"),
        ("max_over_time(gpuwatch_gpus_expected[1h])", "gpuwatch_gpus_expected", "GpuLost", "fires: the agent"),
        ("thermal|hardware", "thermal|hardware|power", "GpuThrottled", "quiet: a GPU"),
        ('{state="compute"}[5m]) > 0', '{state="compute"}[5m]) > 2', "GpuBusyNoProgress", "quiet: a GPU"),
        ('state="allocated_unused"}[5m]', 'state=~"free|allocated_unused"}[5m]', "GpuAllocatedUnused", "quiet: free"),
        ('state="allocated_unused"}[5m]', 'state=~"busy.*|allocated.*"}[5m]', "GpuAllocatedUnused", "quiet: free"),
        (" offset 15m", "", "GpuHeldIdle", "quiet: a server"),
        (
            "or on (job, instance, gpu, UUID) (gpu:gpuwatch_gpu_throttled:share5m > 0.5) * 0 + 1",
            "",
            "GpuThrottled",
            "stale: the GPU",
        ),
        (
            'up{job=~"gpuwatch"} == 0\n',
            'up{job=~"gpuwatch"} == 2\n',
            "GpuwatchAgentDown",
            "fires: an agent that does",
        ),
        (">= on (job, run) run:gpuwatch_run_up:count", "> 0", "RunHung", "quiet: two ranks"),
        (" offset 1h", "", "StepTimeRegressed", "quiet: a slow"),
        ("and gpuwatch_shm_used_bytes / gpuwatch_shm_size_bytes > 0.5", "", "ShmForecast", "quiet: workers that"),
        ("for: 5m\n", "for: 0s\n", "Straggler", "fires: one rank"),
        ("for: 5m\n", "for: 0s\n", "EpochPauses", "fires: epochs begin"),
        ("for: 10m\n", "for: 5m\n", "StragglerAcrossNodes", "fires: of four"),
        (
            "(count by (job, run, instance) (last_over_time(gpuwatch_run_up[2m]) == 1)) > 1",
            "(gpuwatch_run_up) > 1",
            "StragglerAcrossNodes",
            "quiet: all nodes",
        ),
        ("quantile by (job, run) (0.25,", "quantile by (job, run) (0.5,", "StragglerAcrossNodes", "fires: a slow node"),
        (
            "/ on (job, run) group_left () (\n      run:gpuwatch_run_training_seconds:max5m > 0",
            '/ on (job, run, rank) (\n      sum by (job, run, rank) (increase(gpuwatch_run_seconds_total{state=~"input_wait|compute"}[5m])) > 0',
            "StragglerAcrossNodes",
            "quiet: rank 0",
        ),
        ("< (1 + 0.1) * min by (job, run)", "< 2 * min by (job, run)", "StragglerAcrossNodes", "quiet: all nodes"),
        (
            "(0 - (",
            "-1e9 + (0 - (",
            "PhaseStuck",
            "fires: the first batch",
        ),
        ("rank) 3 * sum without (phase)", "rank) 0 * sum without (phase)", "PhaseStuck", "quiet: a first step"),
        (
            '      unless on (job, instance, run, rank) gpu:gpuwatch_gpu_owner_info:one{run!~"|shared"}\n',
            "",
            "PhaseStuck",
            "fires: the same on an idle MIG",
        ),
        (
            'gpuwatch_gpu_owner_info:one{run=""})',
            'gpuwatch_gpu_owner_info:one{run="none"})',
            "PhaseStuck",
            "quiet: a first step",
        ),
        (
            "min_over_time(run:gpuwatch_steps:increase1m[5m]) > 0",
            "vector(0) > 0",
            "RunHung",
            "fires: until it has moved",
        ),
        (
            "min_over_time(run:gpuwatch_steps:increase1m[5m]) > 0",
            "run:gpuwatch_steps:increase1m > 0",
            "RunStalled",
            "fires: a breakpoint",
        ),
        (
            'last_over_time(run:gpuwatch_run_info:one{instance=""}[5m])',
            "vector(0) > 0",
            "RunHung",
            "fires: the other node",
        ),
        ("max_over_time(run:gpuwatch_run_up:max[1m]) == 1", "vector(0) > 0", "GpuStarved", "fires: its hook"),
        (
            'increase(gpuwatch_run_seconds_total{state="startup"}[5m]) > 0',
            "vector(0) > 0",
            "GpuwatchTelemetryLost",
            "fires: a killed run is",
        ),
        (
            "and on (job, job_id) job_id:gpuwatch_job:resumed",
            "and on (job, job_id) vector(0)",
            "GpuwatchTelemetryLost",
            "fires: the job of",
        ),
        (
            "gpuwatch_job_first_step:last > 0\n",
            "gpuwatch_job_first_step:last > 1e9\n",
            "JobRestartLoop",
            "fires: each attempt of a job is",
        ),
        (
            "gpuwatch_job_first_step:last > 0\n",
            "gpuwatch_job_first_step:last >= 0\n",
            "JobRestartLoop",
            "fires: each attempt of a job is",
        ),
        (
            '{cause=~"worker_killed|training_killed"} offset 15m)',
            '{cause="none"} offset 15m)',
            "RunKilled",
            "quiet: a worker was",
        ),
        ('share5m{kind="idle"} < 0.5', 'share5m{kind="idle"} < 0', "GpuHeldIdle", "fires: until somebody"),
        (
            "gpuwatch_gpu_processes > 0\n",
            "gpuwatch_gpu_processes > 9\n",
            "GpuAllocatedUnused",
            "fires: until a process",
        ),
        ('count_over_time(up{job=~"gpuwatch"}[2m])', 'up{job=~"gpuwatch"}', "GpuwatchAgentDown", "quiet: Prometheus"),
        ("unless on () site:gpuwatch_agents:drained", "", "GpuwatchAgentDown", "quiet: an autoscaler"),
        ("or last_over_time(site:gpuwatch_agents:drained[5m])", "", "GpuwatchAgentDown", "quiet: an autoscaler"),
        ('state=~"free|allocated_unused"', 'state="none"', "GpuwatchTelemetryLost", "quiet: jobs that are cancelled"),
        ("or last_over_time(gpuwatch_run_job_over[5m])", "", "GpuwatchTelemetryLost", "quiet: no allocations"),
        (
            "gpu, UUID, job_id) gpuwatch_gpu_owner_info",
            "gpu, UUID, job_id, run) gpuwatch_gpu_owner_info",
            "GpuwatchTelemetryLost",
            "fires: a process dies",
        ),
        (
            "workload_namespace, workload_pod) gpuwatch_gpu_owner_info",
            "workload_namespace, workload_pod, run) gpuwatch_gpu_owner_info",
            "GpuwatchTelemetryLost",
            "fires: a process dies",
        ),
        ("timestamp_seconds[5m]) / 300, 0, 3)", "timestamp_seconds[5m]) / 300, -9, 3)", "recording", "is set back"),
        ("timestamp_seconds[5m]) / 300, 0, 3)", "timestamp_seconds[5m]) / 300, 0, 99)", "recording", "is set ahead"),
        (
            'or avg_over_time(up{job=~"gpuwatch"}[5m]) < 0.5',
            "or vector(0) > 1",
            "GpuwatchAgentDown",
            "fires: an agent crashes",
        ),
        (
            'resets(up{job=~"gpuwatch"}[5m]) > 1',
            'resets(up{job=~"gpuwatch"}[5m]) > 0',
            "GpuwatchAgentDown",
            "fires: an agent crashes",
        ),
        (
            "count by (job, instance, run) (gpuwatch_run_up == 1)\n",
            "count by (job, instance, run) (gpuwatch_run_up == 2)\n",
            "GpuwatchTelemetryLost",
            "fires: a job is suspended",
        ),
        (
            "unless on (UUID) (gpuwatch_gpu_processes and on (job, instance) up)",
            "",
            "GpuwatchAgentDown",
            "quiet: a node with a run",
        ),
        (
            "unless on (job, instance) up\n",
            'unless on (job, instance) up{job="gpuwatch"}\n',
            "GpuwatchAgentDown",
            "quiet: agents that",
        ),
        (
            "and predict_linear(gpuwatch_shm_used_bytes[450s] offset 450s, 3600)",
            "and predict_linear(gpuwatch_shm_used_bytes[450s], 3600)",
            "ShmForecast",
            "quiet: workers that",
        ),
        (
            "count_over_time(gpu:gpuwatch_gpu_owner_info:one[15m])",
            "gpu:gpuwatch_gpu_owner_info:one",
            "GpuHeldIdle",
            "fires: somebody else opens",
        ),
        (
            "      unless on (job, run) run:gpuwatch_run:ended\n  - alert: GpuHeldIdle",
            "  - alert: GpuHeldIdle",
            "GpuHeldIdle",
            "fires: until the run",
        ),
        (
            "(not (match `^(shared|root|0)$` $labels.user))",
            "(ne $labels.user `shared`)",
            "GpuwatchTelemetryLost",
            "fires: the scheduler",
        ),
        ('rate5m{kind="all"} == 0', 'rate5m{kind="all"} < 0', "GpuBusyNoProgress", "quiet: steps of"),
        (
            "gpuwatch_sample_timestamp_seconds > 0 - 300",
            "gpuwatch_sample_timestamp_seconds > 0",
            "GpuXid",
            "fires: on a node",
        ),
        (
            "gpuwatch_gpus_seen >= gpuwatch_gpus_expected",
            "gpuwatch_gpus_seen > gpuwatch_gpus_expected",
            "GpuLost",
            "fires: until",
        ),
    ],
)
def test_a_rule_that_is_broken_is_noticed(tmp_path: Path, old: str, new: str, alert: str, scenario: str) -> None:
    """The scenarios can fail: each of these rules lacks something that one scenario is about, which is run with it."""
    rules = RULES_FILE.read_text()
    assert old in rules
    scenarios = parsed((DEPLOY / f"prometheus/tests/{alert}.yml").read_text())
    [about_it] = [each for each in scenarios["tests"] if scenario in each.get("name", "")]
    done = run_scenarios(tmp_path, {**scenarios, "tests": [about_it]}, rules.replace(old, new))
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "FAILED" in output and "could not parse" not in output, output


def test_a_nightly_job_of_the_same_name_is_not_compared_with_last_night_s(tmp_path: Path) -> None:
    """Last night's began at 1:00, tonight's five minutes earlier. It restarted for 240 s of two hours: 3%."""
    job = 'job="gpuwatch",instance="n1:9478",job_id="nightly"'
    series = {
        f'gpuwatch_job_start_timestamp_seconds{{{job},run="a"}}': "_x12 3600x60 stale _x225 89700x60",
        f'gpuwatch_job_seconds_total{{{job},state="compute"}}': "_x12 0+300x60 stale _x225 0+300x60",
        f'gpuwatch_job_seconds_total{{{job},state="restart"}}': "_x12 60x60 stale _x225 240x60",
        f"gpuwatch_job_attempts_total{{{job}}}": "_x12 1x60 stale _x225 1x60",
    }
    share = 'round(sum(job_id:gpuwatch_job_wasted:share24h{job_id="nightly"}), 0.001)'
    firing = 'count(ALERTS{alertname="JobGoodputLow",alertstate="firing"})'
    expected = [
        {"expr": share, "eval_time": "26h55m", "exp_samples": [{"labels": "{}", "value": 0.032}]},
        {"expr": firing, "eval_time": "27h", "exp_samples": []},
    ]
    values = [{"series": name, "values": text} for name, text in series.items()]
    test = {"interval": "5m", "input_series": values, "promql_expr_test": expected}
    order = [group["name"] for group in groups()]
    scenarios = {"rule_files": ["rules.yml"], "evaluation_interval": "5m", "group_eval_order": order, "tests": [test]}
    done = run_scenarios(tmp_path, scenarios, render())
    assert (done.returncode, done.stdout.count("SUCCESS")) == (0, 1), done.stdout + done.stderr


@pytest.mark.parametrize("alert", [path.stem for path in SCENARIOS if path.stem[0].isupper()])
def test_an_alert_fires_where_recorded_series_have_a_label_of_their_store(tmp_path: Path, alert: str) -> None:
    """`vmalert -external.label` and Thanos' ruler add it to each; what agents serve has it from the scraper, or not."""
    scenarios = parsed((DEPLOY / f"prometheus/tests/{alert}.yml").read_text())
    rules = json.loads(json.dumps(parsed(render())))
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule.setdefault("labels", {})["cluster"] = "a"
    first = next(each for each in scenarios["tests"] if "alert_rule_test" in each)
    expr = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    expected = [
        {"expr": expr, "eval_time": each["eval_time"], "exp_samples": [{"value": count}] if count else []}
        for each in first["alert_rule_test"]
        for count in (len(each["exp_alerts"]),)
    ]
    tests = [
        {
            "interval": first["interval"],
            "input_series": [
                {**each, "series": each["series"].replace("{", label, 1)} for each in first["input_series"]
            ],
            "promql_expr_test": expected,
        }
        for label in ("{", '{cluster="a",')
    ]
    done = run_scenarios(tmp_path, {**scenarios, "tests": tests}, json.dumps(rules))
    assert (done.returncode, done.stdout.count("SUCCESS")) == (0, 2), done.stdout + done.stderr
    assert any(each["exp_samples"] for each in expected)


def test_a_label_that_targets_get_while_a_run_starves_makes_no_rule_fail(tmp_path: Path) -> None:
    """For five minutes both of a rank's series have an increase: GpuStarved failed so long, for the whole site."""
    scenarios = parsed((DEPLOY / "prometheus/tests/GpuStarved.yml").read_text())
    name, labels = "gpuwatch_run_seconds_total", 'job="gpuwatch",instance="n1:9478",run="r1",rank="0"'
    series = [
        {"series": f'{name}{{{labels},state="{state}"{more}}}', "values": values.format(per_step, 21 * per_step)}
        for state, per_step in (("input_wait", 6), ("compute", 9))
        for more, values in (("", "0+{0}x20 stale"), (',rack="a"', "_x21 {1}+{0}x40"))
    ]
    starves = {"expr": "count(alert:GpuStarved:value)", "exp_samples": [{"value": 1}]}
    asked = [{**starves, "eval_time": when} for when in ("4m", "6m", "8m", "14m")]
    asked.append(
        {"expr": "round(sum(alert:GpuStarved:value), 0.1)", "exp_samples": [{"value": 0.4}], "eval_time": "8m"}
    )
    done = run_scenarios(
        tmp_path,
        {**scenarios, "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": asked}]},
        RULES_FILE.read_text(),
    )
    assert (done.returncode, done.stdout.count("SUCCESS")) == (0, 1), done.stdout + done.stderr


def run_scenarios(directory: Path, scenarios: Mapping[str, Any], rules: str) -> subprocess.CompletedProcess[str]:
    """Run a file of scenarios, each with only the rules that it mentions and those that they read.

    All rules would take ten times as long. A scenario that asks for all alerts gets all rules. One that does not read
    annotations gets alerts without them: their queries run at each evaluation of each alert that fires.
    """
    groups = parsed(rules)["groups"]
    files = []
    for number, scenario in enumerate(scenarios["tests"]):
        rule_file, file = f"rules-{number}.yml", directory / f"{number}.yml"
        needed = _needed(groups, set(_texts(scenario)))
        if "alert_rule_test" not in scenario:
            for rule in (rule for group in needed for rule in group["rules"]):
                rule.pop("annotations", None)
        (directory / rule_file).write_text(json.dumps({"groups": needed}))
        file.write_text(json.dumps({**scenarios, "rule_files": [rule_file], "tests": [scenario]}))
        files.append(str(file))
    command = [require("promtool"), "test", "rules", *files]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=ENVIRONMENT)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in what YAML or JSON may hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _needed(groups: Sequence[Mapping[str, Any]], texts: Collection[str]) -> list[dict[str, Any]]:
    """Return the groups with the rules that these texts mention."""
    made = [
        (rule.get("alert") or rule["record"], f"{rule['expr']} {rule.get('annotations', '')}")
        for group in groups
        for rule in group["rules"]
    ]
    needed = {word for text in texts for word in re.findall(r"[\w:]+", text)}
    patterns = [pattern for text in texts for pattern in re.findall(r'__name__=~"([^"]+)"', text)]
    needed = new = needed | {name for name, _ in made for pattern in patterns if re.fullmatch(pattern, name)}
    if any(re.search(r'ALERTS\{(?![^}]*alertname=~?"\w)', text) for text in texts):  # Of whatever alert.
        needed = new = {name for name, _ in made}
    while new:
        new = {word for name, expr in made if name in new for word in re.findall(r"[\w:]+", expr)} - needed
        needed |= new
    return [
        {**group, "rules": [{**rule} for rule in group["rules"] if (rule.get("alert") or rule["record"]) in needed]}
        for group in groups
    ]


@pytest.mark.parametrize(("others", "fires"), [(200, True), (300, False)])
def test_five_runs_that_stop_are_many_on_a_site_of_some_size_only(tmp_path: Path, others: int, fires: bool) -> None:
    scenarios = parsed((DEPLOY / "prometheus/tests/ManyRunsStalled.yml").read_text())
    [five] = [each for each in scenarios["tests"] if each["name"].startswith("stale: the agents of five")]
    up = 'gpuwatch_run_up{{job="gpuwatch",instance="m{0}:9478",run="well-{0}",rank="0"}}'
    series = [*five["input_series"], *({"series": up.format(n), "values": "1x60"} for n in range(others))]
    expected = [{"labels": "{}", "value": 1}] if fires else []
    expr = 'count(ALERTS{alertname="ManyRunsStalled",alertstate="firing"})'
    asked = [{"expr": expr, "eval_time": "12m", "exp_samples": expected}]
    done = run_scenarios(
        tmp_path,
        {**scenarios, "tests": [{**five, "input_series": series, "promql_expr_test": asked}]},
        RULES_FILE.read_text(),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alertmanager_configuration() -> None:
    output = run(require("amtool"), "check-config", str(DEPLOY / "alertmanager/alertmanager.yml"))
    assert "15 inhibit rules" in output
    assert "5 receivers" in output


def test_a_run_s_goodput_is_its_job_s_where_the_scheduler_calls_that_otherwise(tmp_path: Path) -> None:
    """GPUWATCH_JOB=llm-7 in Slurm's job 4711."""
    panel = BY_KEY["run_goodput"]
    [curve] = panel.curves
    series = [
        {"series": 'job_id:gpuwatch_job_goodput:ratio{job="gpuwatch",job_id="llm-7"}', "values": "0.3x5"},
        {"series": 'job_id:gpuwatch_job_goodput:ratio{job="gpuwatch",job_id="other"}', "values": "0.9x5"},
        {
            "series": 'gpuwatch_job_start_timestamp_seconds{job="gpuwatch",job_id="llm-7",run="slurm-4711.0"}',
            "values": "1x5",
        },
        {"series": 'gpuwatch_run_info{job="gpuwatch",run="slurm-4711.0",rank="0",job_id="4711"}', "values": "1x5"},
    ]
    asked = {"expr": curve.promql.replace("$run", "slurm-4711.0"), "eval_time": "3m", "exp_samples": [{"value": 0.3}]}
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": []}))
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [test]}))
    assert "SUCCESS" in run(require("promtool"), "test", "rules", str(tmp_path / "test.yml"))
