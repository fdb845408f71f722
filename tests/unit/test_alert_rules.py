"""The rules file: what is committed is what is rendered, every number comes from the thresholds, every alert is covered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwatch.alert_rules import ALERT_RULES, RECORDING_RULES, TRAINING_STATES, AlertThresholds, render
from gpuwatch.errors import ConfigError
from gpuwatch.ledger import GPU_STATES, RUN_STATES
from gpuwatch.metrics import BY_NAME

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def rules_of(text: str) -> dict[str, dict[str, Any]]:
    return {
        rule.get("alert") or rule["record"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]
    }


def test_the_committed_rules_are_what_is_rendered() -> None:
    committed = (DEPLOY / "prometheus/rules/gpuwatch.yml").read_text()
    assert committed == render(AlertThresholds()), "stale: write it again with `gpuwatch rules`"


def test_thresholds_reach_expressions_names_and_durations() -> None:
    rules = rules_of(
        render(
            AlertThresholds(
                job="agents",
                starved_ratio=0.35,
                starved_window_s=30,
                starved_min_training_s=7.5,
                starved_for_s=5,
                shm_used_ratio=0.8,
                idle_for_s=5400,
                keep_firing_for_s=0.5,
            )
        )
    )
    starved = rules["GpuStarved"]
    assert starved["expr"] == (
        'run_rank_state:gpuwatch_run_training_seconds:share30s{state="input_wait"} > 0.35\n'
        "and ignoring (state)\n"
        "run_rank:gpuwatch_run_training_seconds:increase30s >= 7.5"
    )
    assert starved["for"] == "5s"
    assert starved["keep_firing_for"] == "500ms"
    assert "run_rank_state:gpuwatch_run_training_seconds:share30s" in rules
    assert rules["ShmNearlyFull"]["expr"].endswith("> 0.8")
    assert rules["GpuHeldIdle"]["for"] == "90m"
    assert 'up{job="agents"} == 0' in rules["GpuwatchAgentDown"]["expr"]


def test_without_a_hold_alerts_resolve_at_once() -> None:
    assert "keep_firing_for" not in render(AlertThresholds(keep_firing_for_s=0))


def test_the_runbook_link_takes_a_site_s_own_address() -> None:
    rules = rules_of(render(runbooks="https://wiki.example/gpuwatch/"))
    assert rules["RunStalled"]["annotations"]["runbook_url"] == "https://wiki.example/gpuwatch/RunStalled.md"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"starved_ratio": 20}, "starved_ratio = 20: a share"),
        ({"shm_used_ratio": 0}, "shm_used_ratio = 0: a share"),
        ({"idle_window_s": 0}, "idle_window_s = 0: a duration"),
        ({"stalled_for_s": -1}, "stalled_for_s = -1: a duration"),
        ({"starved_for_s": 300}, "starved_for_s = 300: must be at most"),
    ],
)
def test_a_threshold_that_cannot_work_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        AlertThresholds(**values)


@pytest.mark.parametrize("rule", ALERT_RULES, ids=lambda rule: rule.name)
def test_every_alert_has_a_runbook_a_promtool_test_and_an_owner_of_its_numbers(rule: Any) -> None:
    assert (ROOT / f"docs/runbooks/{rule.name}.md").is_file()
    assert f"alertname: {rule.name}" in (DEPLOY / f"prometheus/tests/{rule.name}.yml").read_text()
    numbers = re.findall(r"[<>]=? ([0-9.]+)", rule.expr)
    assert set(numbers) <= {"0"}, "a threshold belongs to AlertThresholds"


def test_rules_name_only_metrics_and_states_that_exist() -> None:
    texts = [[rule.expr] for rule in RECORDING_RULES] + [[r.expr, r.summary, r.description] for r in ALERT_RULES]
    text = "\n".join(line for lines in texts for line in lines)
    metrics = set(re.findall(r"(?<!:)\bgpuwatch_\w+\b(?!:)", text))
    assert len(metrics) > 8
    assert metrics <= set(BY_NAME)
    states = set(re.findall(r'state="(\w+)"', text))
    assert states == {"input_wait", "transfer", "held_idle", "stalled", "unknown"}
    assert states | set(TRAINING_STATES) <= set(GPU_STATES)
    assert set(TRAINING_STATES) <= set(RUN_STATES)


def test_alerts_that_alertmanager_silences_exist() -> None:
    config = (DEPLOY / "alertmanager/alertmanager.yml").read_text()
    names = {name for group in re.findall(r"alertname =~? \"?([\w|]+)", config) for name in group.split("|")}
    assert len(names) == 6
    assert names == {rule.name for rule in ALERT_RULES}
