"""The rules file: what is committed is what is rendered, every number comes from the thresholds, every alert is covered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwatch.alert_rules import ALERT_RULES, RECORDING_RULES, TRAINING_STATES, AlertThresholds, Prices, render
from gpuwatch.alerting.recording import KINDS, LEVELS
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
    assert 'run_rank_state:gpuwatch_run_training_seconds:share30s{state="input_wait"} > 0.35\n' in starved["expr"]
    assert "run_rank:gpuwatch_run_training_seconds:increase30s >= 7.5\n" in starved["expr"]
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


def test_every_kind_of_gpu_time_is_recorded_at_every_level() -> None:
    rules = [rule for group in yaml.safe_load(render())["groups"] for rule in group["rules"] if "record" in rule]
    kinds = {rule["labels"]["kind"] for rule in rules if rule["record"] == "gpu_kind:gpuwatch_gpu_seconds:rate5m"}
    assert kinds == {"useful", "starved", "idle", "stalled", "all"} == {*KINDS, "all"}
    shares = {rule["record"] for rule in rules if rule["record"].endswith("gpuwatch_gpu_seconds:share5m")}
    levels = ("gpu_kind", *("kind" if level == "fleet" else f"{level}_kind" for level in LEVELS))
    assert shares == {f"{level}:gpuwatch_gpu_seconds:share5m" for level in levels}
    assert len(shares) == 6


def test_without_a_price_cost_is_told_in_gpu_hours_and_none_is_recorded() -> None:
    text = render()
    assert "GPU-hours a day" in text
    assert "USD" not in text and "cost:per_hour" not in text


def test_a_price_is_recorded_by_model_and_level_and_told_in_its_currency() -> None:
    rules = rules_of(render(prices=Prices(2.5, "EUR", {"NVIDIA H200": 4})))
    price = rules["gpu:gpuwatch_gpu_price:per_hour"]["expr"]
    assert 'gpuwatch_gpu_info{model="NVIDIA H200"}) * 4\nor\n' in price
    assert price.endswith("* 0 + 2.5")
    costs = {name for name in rules if name.endswith("gpuwatch_gpu_cost:per_hour")}
    assert costs == {f"{level}:gpuwatch_gpu_cost:per_hour" for level in
                     ("owner_kind", "node_kind", "run_kind", "job_kind", "user_kind", "kind")}  # fmt: skip
    assert rules["GpuStarved"]["annotations"]["cost"].endswith("EUR){{ end }}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"starved_ratio": 20}, "starved_ratio = 20: a share"),
        ({"shm_used_ratio": 0}, "shm_used_ratio = 0: a share"),
        ({"idle_window_s": 0}, "idle_window_s = 0: a duration"),
        ({"stalled_for_s": -1}, "stalled_for_s = -1: a duration"),
        ({"starved_for_s": 300}, "starved_for_s = 300: must be at most"),
        ({"keep_firing_for_s": 7200}, "keep_firing_for_s = 7200: at most 3600"),
        ({"step_slower_factor": 1}, "step_slower_factor = 1: a factor"),
        ({"job": 'x"} or vector(1)'}, "job = "),
        ({"starved_ratio": "0.2"}, "starved_ratio = '0.2': must be a number"),
        ({"starved_ratio": True}, "starved_ratio = True: must be a number"),
    ],
)
def test_a_threshold_that_cannot_work_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        AlertThresholds(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu_hour": 0}, "gpu_hour = 0: a price"),
        ({"models": {"NVIDIA H200": 4}}, "gpu_hour is missing"),
        ({"gpu_hour": 1, "models": {"H200": -1}}, "H200 = -1: a price"),
        ({"gpu_hour": 1, "models": {'x"y': 1}}, "models: "),
        ({"currency": "{{ end }}"}, "currency = "),
    ],
)
def test_a_price_that_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Prices(**values)


@pytest.mark.parametrize("rule", ALERT_RULES, ids=lambda rule: rule.name)
def test_every_alert_has_a_runbook_and_its_numbers_in_the_thresholds(rule: Any) -> None:
    runbook = (ROOT / f"docs/runbooks/{rule.name}.md").read_text()
    assert runbook.startswith(f"# {rule.name}\n")
    assert "**Meaning.**" in runbook and "**Confirm.**" in runbook and "**Do.**" in runbook
    numbers = re.findall(r"[<>]=? ([0-9.]+)", rule.expr)
    assert set(numbers) <= {"0", "1"}, "a threshold belongs to AlertThresholds"


def test_every_runbook_belongs_to_an_alert_and_its_links_lead_somewhere() -> None:
    runbooks = sorted((ROOT / "docs/runbooks").glob("*.md"))
    assert {path.stem for path in runbooks} == {rule.name for rule in ALERT_RULES}
    for path in runbooks:
        for target in re.findall(r"\]\((?!https:)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


def test_every_alert_says_number_owner_cause_advice_cost_and_runbook() -> None:
    rules = rules_of(render())
    for rule in ALERT_RULES:
        annotations = rules[rule.name]["annotations"]
        assert list(annotations) == ["summary", "description", "owner", "cause", "advice", "cost", "runbook_url"]
        assert all(annotations.values()), rule.name
        assert rules[rule.name]["labels"]["severity"] in ("critical", "warning")


def test_rules_name_only_metrics_and_states_that_exist() -> None:
    texts = [[rule.expr] for rule in RECORDING_RULES] + [
        [r.expr, r.summary, r.description, r.owner, r.cause, r.lost_gpus or ""] for r in ALERT_RULES
    ]
    text = "\n".join(line for lines in texts for line in lines)
    metrics = {
        re.sub(r"(gpuwatch_step_seconds)_(sum|count)$", r"\1", name)
        for name in re.findall(r"(?<!:)\bgpuwatch_\w+\b(?!:)", text)
    }
    assert len(metrics) > 20
    assert metrics <= set(BY_NAME)
    states = set(re.findall(r'state="(\w+)"', text))
    assert states == set(GPU_STATES)
    assert set(TRAINING_STATES) <= set(RUN_STATES)


def test_recorded_names_in_alerts_are_recorded() -> None:
    recorded = {rule.record for rule in RECORDING_RULES}
    used = set()
    for rule in ALERT_RULES:
        for text in (rule.expr, rule.summary, rule.description):
            used |= set(re.findall(r"\b\w+:gpuwatch_\w+:[\w<>]+", text))
    assert len(used) > 8
    assert used <= recorded


def test_alerts_that_alertmanager_silences_exist() -> None:
    config = (DEPLOY / "alertmanager/alertmanager.yml").read_text()
    names = {name for group in re.findall(r"alertname =~? \"?([\w|]+)", config) for name in group.split("|")}
    assert len(names) > 10
    assert names <= {rule.name for rule in ALERT_RULES}
