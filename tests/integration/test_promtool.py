"""What is shipped for Prometheus and Alertmanager, judged by their own tools; the alerts' scenarios are promtool's tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuwatch.alert_rules import AlertThresholds, render
from tests.servers import require

DEPLOY = Path(__file__).parents[2] / "deploy"
SCENARIOS = sorted((DEPLOY / "prometheus/tests").glob("*.yml"))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_configuration_and_the_rules_it_names() -> None:
    output = run(require("promtool"), "check", "config", str(DEPLOY / "prometheus/prometheus.yml"))
    assert "1 rule files found" in output
    assert "10 rules found" in output


def test_rules_with_short_windows(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(
        render(AlertThresholds(starved_window_s=30, starved_min_training_s=10, starved_for_s=5, keep_firing_for_s=0))
    )
    assert "10 rules found" in run(require("promtool"), "check", "rules", str(rules))


@pytest.mark.parametrize("scenarios", SCENARIOS, ids=lambda path: path.stem)
def test_alert(scenarios: Path) -> None:
    assert "SUCCESS" in run(require("promtool"), "test", "rules", str(scenarios))


@pytest.mark.parametrize(
    ("old", "new", "alert"),
    [
        ("keep_firing_for: 15m", "keep_firing_for: 0s", "GpuStarved"),
        ('state=~"input_wait|transfer|compute|host_wait|comm_wait"', 'state=~".+"', "GpuStarved"),
        ("\n      unless increase(gpuwatch_steps_total[1m]) > 0", "", "RunStalled"),
        ("topk by (job, instance, gpu, UUID) (1, gpuwatch_gpu_owner_info)", "gpuwatch_gpu_owner_info", "GpuHeldIdle"),
        ("for: 1m\n", "for: 0s\n", "GpuwatchAgentDown"),
    ],
)
def test_a_rule_that_is_broken_is_noticed(tmp_path: Path, old: str, new: str, alert: str) -> None:
    """The scenarios can fail: each of these rules lacks something that one of them is about."""
    rules = (DEPLOY / "prometheus/rules/gpuwatch.yml").read_text()
    assert old in rules
    (tmp_path / "rules").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "rules/gpuwatch.yml").write_text(rules.replace(old, new))
    scenarios = tmp_path / "tests" / f"{alert}.yml"
    scenarios.write_text((DEPLOY / f"prometheus/tests/{alert}.yml").read_text())
    done = subprocess.run([require("promtool"), "test", "rules", str(scenarios)], capture_output=True, timeout=120)
    assert done.returncode == 1


def test_alertmanager_configuration() -> None:
    output = run(require("amtool"), "check-config", str(DEPLOY / "alertmanager/alertmanager.yml"))
    assert "3 inhibit rules" in output
