"""The rules file: it is what is rendered, every number comes from the thresholds, and every alert is covered."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import Field, asdict, fields
from typing import Any

import pytest
import yaml

from gpuwatch.alerting.render import TEMPLATES, alerts, filled, groups, hold_s, names, render, template
from gpuwatch.alerting.thresholds import XIDS_OF_PROGRAMS, AlertThresholds, Prices
from gpuwatch.diagnosis.finding import SEVERITIES, Rule
from gpuwatch.diagnosis.rules import RULES
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.errors import ConfigError
from gpuwatch.ledger.states import COMM_WAIT, COMPUTE, GPU_STATES, HELD_IDLE, HOST_WAIT, INPUT_WAIT, STALLED, TRANSFER
from gpuwatch.ledger.timeline import STALL_FLOOR_NS, STALL_MEDIANS
from gpuwatch.metrics import BY_NAME
from tests.programs import ROOT

DEPLOY = ROOT / "deploy"


def rules_of(text: str) -> dict[str, dict[str, Any]]:
    return {
        rule.get("alert") or rule["record"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]
    }


def test_the_committed_rules_are_what_is_rendered() -> None:
    committed = (DEPLOY / "prometheus/rules/gpuwatch.yml").read_text()
    assert committed == render(AlertThresholds()), "run `make golden`"


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
    starved, condition = rules["GpuStarved"], rules["alert:GpuStarved:value"]
    assert 'run_rank_state:gpuwatch_run_training_seconds:share{state="input_wait"} > 0.35) and\n' in condition["expr"]
    assert ">= 7.5 * max by (job, instance, run, rank) (run_rank_state:gpuwatch_run_training" in condition["expr"]
    assert starved["for"] == "5s"
    assert "last_over_time(alert:GpuStarved:value[500ms])" in starved["expr"]
    assert rules["ShmNearlyFull"]["keep_firing_for"] == "500ms"
    assert "last_over_time(alert:GpuHeldIdle:value[500ms])" in rules["GpuHeldIdle"]["expr"]
    assert "run_rank_state:gpuwatch_run_training_seconds:share" in rules
    assert rules["ShmNearlyFull"]["expr"].endswith("> 0.8")
    assert rules["GpuHeldIdle"]["for"] == "90m"
    assert 'up{job=~"agents"} == 0' in rules["GpuwatchAgentDown"]["expr"]


def test_without_a_hold_alerts_resolve_at_once() -> None:
    text = render(AlertThresholds(keep_firing_for_s=0))
    assert "keep_firing_for" not in text and 'alertstate="firing"' not in text


def test_links_take_a_site_s_own_addresses() -> None:
    own = AlertThresholds(runbooks="https://wiki.example/gpuwatch/", dashboards="https://grafana.example/")
    annotations = rules_of(render(own))["RunStalled"]["annotations"]
    assert annotations["runbook_url"] == "https://wiki.example/gpuwatch/RunStalled.md"
    assert annotations["dashboard_url"].startswith("https://grafana.example/d/gpuwatch-run?var-run=")


def test_by_default_a_runbook_is_that_of_the_alert_s_own_node_where_its_name_is_an_address() -> None:
    """It is not `agent:9478`, which only containers of the compose file know.

    Nor is it a node's name without a port, as the Helm chart sets it.
    """
    link = rules_of(render())["GpuHeldIdle"]["annotations"]["runbook_url"]
    assert link.startswith(
        "http://{{ $node := or $labels.instance `agent:9478` }}{{ if and (match `:[0-9]+$` $node) (ne $node `agent:9478`) }}{{ $node }}"
    )
    assert link.endswith("{{ else }}127.0.0.1:9478{{ end }}/docs/runbooks/GpuHeldIdle.md")


def test_every_kind_of_gpu_time_is_recorded() -> None:
    rules = [rule for group in groups() for rule in group["rules"] if "record" in rule]
    shares = {rule["record"] for rule in rules if rule["record"].endswith("gpuwatch_gpu_seconds:share5m")}
    assert shares == {"gpu_kind:gpuwatch_gpu_seconds:share5m", "kind:gpuwatch_gpu_seconds:share5m"}
    kinds = {
        rule["labels"]["kind"]: rule["expr"]
        for rule in rules
        if rule["record"] == "owner_kind:gpuwatch_gpu_seconds:rate"
    }
    states = {"all": "", "useful": COMPUTE, "starved": INPUT_WAIT, "idle": HELD_IDLE, "stalled": STALLED}
    assert kinds.keys() == states.keys()
    for kind, state in states.items():
        read = f'owner_state:gpuwatch_gpu_seconds:rate{{state="{state}"}}' if state else '{shared!="",state=""}'
        assert read in kinds[kind], "divided among those that share a GPU"
        assert kinds[kind].endswith("* 0"), "at 0 where it has no time yet"


def test_every_state_of_a_gpu_is_recorded_by_owner() -> None:
    rules = [rule for group in groups() for rule in group["rules"]]
    read = [rule["expr"] for rule in rules if rule.get("record") == "owner_shared_state:gpuwatch_gpu_seconds:rate5m"]
    kinds = "|".join((COMPUTE, INPUT_WAIT, HELD_IDLE, STALLED))
    assert re.findall(r"rate\(gpuwatch_gpu_seconds_total(.*?)\[5m\]\)", " ".join(read)) == [
        f'{{state{which}"{kinds}"}}' for which in ("=~", "!~")
    ], "each state once, for GPUs of one owner and of several"
    states = [rule for rule in rules if rule.get("record") == "owner_state:gpuwatch_gpu_seconds:rate"]
    assert sorted(rule["labels"]["state"] for rule in states) == sorted(GPU_STATES)
    for rule in states:
        assert re.findall(r'shared(!?=)"",state="(\w+)"', rule["expr"]) == [
            (which, rule["labels"]["state"]) for which in ("=", "!=")
        ]
    training = template("recording.yml")["texts"]["training_states"].split("|")
    assert training == [INPUT_WAIT, TRANSFER, COMPUTE, HOST_WAIT, COMM_WAIT]


def test_without_a_price_cost_is_in_gpu_hours_and_no_money_is_recorded() -> None:
    text = render()
    assert "GPU-hours a day" in text
    assert "USD" not in text and "cost:per_hour" not in text


def test_a_price_is_recorded_by_model_and_shown_in_its_currency() -> None:
    rules = rules_of(render(prices=Prices(2.5, "EUR", {"NVIDIA H200": 4})))
    price = rules["gpu:gpuwatch_gpu_price:per_hour"]["expr"]
    assert 'gpuwatch_gpu_info{model="NVIDIA H200"}) * 4\nor\n' in price
    assert price.endswith("* 0 + 2.5")
    costs = {name for name in rules if name.endswith("gpuwatch_gpu_cost:per_hour")}
    assert costs == {"owner_kind:gpuwatch_gpu_cost:per_hour"}
    assert rules["GpuHeldIdle"]["annotations"]["cost"].endswith(" EUR){{ end }}{{ end }}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"starved_ratio": 20}, "starved_ratio = 20: a share"),
        ({"shm_used_ratio": 0}, "shm_used_ratio = 0: a share"),
        ({"idle_window_s": 0}, "idle_window_s = 0: a duration"),
        ({"stalled_for_s": -1}, "stalled_for_s = -1: a duration"),
        ({"phase_eval_s": float("inf")}, "phase_eval_s = inf: a duration"),
        ({"phase_eval_s": 1e12}, "phase_eval_s = 1e+12: a duration"),
        ({"starved_for_s": 300}, "starved_for_s = 300: must be at most"),
        ({"keep_firing_for_s": 7200}, "keep_firing_for_s = 7200: at most 3600"),
        ({"step_slower_factor": 1}, "step_slower_factor = 1: a factor"),
        ({"job": 'x"} or vector(1)'}, "job = "),
        ({"runbooks": "docs/runbooks"}, "runbooks = 'docs/runbooks': must be a URL"),
        ({"dashboards": "http://x/{{ end }}"}, "dashboards = "),
        ({"inefficient_gpus": 0}, "inefficient_gpus = 0: must be above 0"),
    ],
)
def test_a_threshold_that_cannot_work_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        AlertThresholds(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu_hour": 0}, "gpu_hour = 0: the price"),
        ({"models": {"NVIDIA H200": 4}}, "gpu_hour is missing"),
        ({"gpu_hour": 1, "models": {"H200": -1}}, "H200 = -1: the price"),
        ({"gpu_hour": 1, "models": {'x"y': 1}}, "models: "),
        ({"currency": "{{ end }}"}, "currency = "),
    ],
)
def test_a_price_that_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Prices(**values)


def test_a_name_that_does_not_exist_is_an_error() -> None:
    own = {"groups": [{"name": "own", "rules": [{"alert": "Own", "expr": "up > ${starved_ration}"}]}]}
    with pytest.raises(
        ConfigError, match=re.escape("${starved_ration} in 'up > ${starved_ration}': neither a threshold")
    ):
        list(filled(own, AlertThresholds(), Prices()))


def _changed(name: str, value: float | str) -> AlertThresholds:
    """Return the defaults with another value of one field; starved_for_s stays within its window."""
    return AlertThresholds(**{"starved_for_s": 1, name: value})


@pytest.mark.parametrize("each", fields(AlertThresholds), ids=lambda each: each.name)
def test_a_changed_threshold_changes_the_rules_that_name_it_and_no_others(each: Field[Any]) -> None:
    other = (
        f"{each.default}x" if isinstance(each.default, str) else (each.default * 0.9 if each.default > 1.3 else 0.97)
    )
    if each.name == "step_slower_factor":
        other = 1.4
    before = [rule for group in groups(_changed("job", "gpuwatch")) for rule in group["rules"]]
    after = [rule for group in groups(_changed(each.name, other)) for rule in group["rules"]]
    differ = {rule.get("alert") or rule["record"] for rule, was in zip(after, before, strict=True) if rule != was}
    differ |= {
        name.split(":")[1] for name in differ if name.startswith("alert:")
    }  # the condition of an alert about a run
    own = {each.name, each.name.removesuffix("_s"), f"own_{each.name}"}
    texts = [template(name)["texts"] for name in TEMPLATES]
    own |= {name for text in texts for name, value in text.items() if names(value) & own}
    own |= {name for text in texts for name, value in text.items() if names(value) & own}
    named = {name for name, rule in alerts().items() if names(rule) & own}
    if each.name == "keep_firing_for_s":
        named |= {name for name, rule in alerts().items() if {"run_alert", "held_by"} & set(rule)}
    assert named == differ & set(alerts()), "an alert names its threshold"
    assert differ, f"no rule has {each.name}"


NUMBER = re.compile(r"(?<![\w:.])(\d+(?:\.\d+)?)(ms|[smhd])?(?![\w.])")
NO_THRESHOLDS = ("* 0 + 1", "(1, ", " + 1)", "vector(1)", "vector(0)", " / 3600", "quantile_over_time(0.5, ", "(0.25, ")
"""Other numbers in expressions: an owner's weight, one of several series, seconds an hour, the median, a quartile."""


def test_no_number_in_an_expression_is_a_threshold() -> None:
    """A number that equals a threshold would stay when that is changed. 0 and 1 in a comparison are no thresholds."""
    known = {float(value) for value in asdict(AlertThresholds()).values() if not isinstance(value, str)} - {0.0, 1.0}
    found = []
    for name in TEMPLATES:
        for rule in (rule for group in template(name)["groups"] for rule in group["rules"]):
            for text in (rule["expr"], rule.get("record", ""), rule.get("for", ""), rule.get("keep_firing_for", "")):
                for allowed in NO_THRESHOLDS:
                    text = text.replace(allowed, "")
                found += [text for number in NUMBER.findall(text) if _value(*number) in known]
    assert found == []
    assert [_value(*number) for number in NUMBER.findall("a_5m[5m] > 0.2 offset 1h and b:c6h == 7")] == [
        300,
        0.2,
        3600,
        7,
    ]


def _value(number: str, unit: str) -> float:
    return float(number) * {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]


@pytest.mark.parametrize("name", alerts())
def test_every_alert_has_its_runbook_and_its_link_leads_there(name: str) -> None:
    path = ROOT / f"docs/runbooks/{name}.md"
    assert path.exists(), f"write the alert's runbook, {path}, like ShmNearlyFull.md"
    runbook = path.read_text()
    assert runbook.startswith(f"# {name}\n")
    assert "**Meaning.**" in runbook and "**Confirm.**" in runbook and "**Do.**" in runbook
    # that agent serves none; nor is there one of a site
    runbooks = "own_runbooks" if name in ("GpuwatchAgentDown", "ManyRunsStalled") else "runbooks"
    assert alerts()[name]["annotations"]["runbook_url"] == f"${{{runbooks}}}/{name}.md"


def test_every_runbook_belongs_to_an_alert_and_its_links_lead_somewhere() -> None:
    runbooks = sorted((ROOT / "docs/runbooks").glob("*.md"))
    assert {path.stem for path in runbooks} == {*alerts(), "Findings"}  # that one is for causes without an alert
    for path in runbooks:
        for target in re.findall(r"\]\((?!https:)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


def test_the_numbers_of_the_runbooks_are_those_of_the_thresholds() -> None:
    plain, rules = AlertThresholds(), Thresholds()

    def minutes(seconds: float) -> str:
        return f"{seconds / 60:g} minutes"

    # Numbers of runbooks that need more than their alert's own thresholds, in any unit, which `own_numbers` knows.
    numbers: dict[str, tuple[str, ...]] = {
        "EpochPauses": (
            f"at least {rules.first_batch_factor:g} times",
            f"at least {rules.first_batch_share:.0%}",
            f"at least {rules.input_share:.0%} of the step time more",
        ),
        "Findings": (f"≥ {rules.mfu_gap * 100:g}% of the peak",),
        "GpuAllocatedUnused": (minutes(plain.processless_for_s), f"more than {plain.idle_ratio:.0%}"),
        "GpuBusyNoProgress": (
            f"more than {plain.busy_ratio:.0%}",
            f"less than {plain.low_power_ratio:.0%}",
            f"{plain.power_window_s / 3600:g} hours",
        ),
        "GpuHeldIdle": (minutes(plain.idle_window_s + plain.idle_for_s), f"more than {plain.idle_ratio:.0%}"),
        "GpuLost": (minutes(plain.gpu_lost_memory_s),),
        "GpuStarved": (minutes(plain.starved_window_s), f"more than {plain.starved_ratio:.0%}"),
        "GpuThrottled": (
            f"For {minutes(plain.throttled_for_s)}, over windows of {minutes(plain.throttled_window_s)}",
            f"more than {plain.throttled_ratio:.0%}",
        ),
        "GpuXid": (minutes(plain.xid_window_s), ", ".join(map(str, XIDS_OF_PROGRAMS))),
        "GpuwatchAgentDown": (minutes(plain.agent_frozen_window_s),),
        "JobGoodputLow": (f"More than {plain.job_wasted_ratio:.0%}", f"last {plain.job_window_s / 3600:g} hours"),
        "JobRestartLoop": (
            f"restarted {plain.restart_runs:g} times within {minutes(plain.restart_window_s)}",
            f"{plain.restarts_runs:g} times within {minutes(plain.restarts_window_s)}",
        ),
        "ManyRunsStalled": (
            f"At least {plain.many_stalled_runs:g} runs, and {plain.many_stalled_ratio:.0%}",
            f"within {minutes(plain.many_stalled_window_s)}",
        ),
        "RunInefficient": (minutes(plain.inefficient_for_s), f"more than {plain.inefficient_gpus:g} GPUs"),
        "RunStalled": (f"{STALL_MEDIANS} times", f"at least {STALL_FLOOR_NS / 1e9:g} s"),
        "ShmForecast": (
            f"more than {plain.shm_forecast_used_ratio:.0%}",
            minutes(plain.shm_forecast_ahead_s),
            f"both halves of the last {minutes(2 * plain.shm_forecast_window_s)}",
        ),
        "ShmNearlyFull": (f"More than {plain.shm_used_ratio:.0%}",),
        "ShortRunsStarved": (
            f"more than {plain.starved_ratio:.0%}",
            f"shorter than {minutes(plain.sweep_window_s)}",
            f"{plain.sweep_runs:g} have ended within {minutes(3 * plain.sweep_window_s)}",
        ),
        "StepTimeRegressed": (
            f"Over {minutes(plain.step_window_s)}",
            f"more than {plain.step_slower_factor:g} times",
            f"{plain.step_baseline_s / 3600:g} hours",
            f"at least {minutes(plain.step_history_s)}",
        ),
        "StragglerAcrossNodes": (f"more than {plain.straggler_ratio:.0%}", minutes(plain.straggler_across_for_s)),
    }
    for path in sorted((ROOT / "docs/runbooks").glob("*.md")):
        text, expected = " ".join(path.read_text().split()), numbers.get(path.stem, ())
        assert [each for each in expected if each not in text] == [], path.name
        sentence = re.search(r"\*\*Meaning\.\*\* (.+?[.:])(?= [A-Z*])", text)
        stated = re.findall(r"\d+(?:\.\d+)?", sentence[1] if sentence else "")
        known = set(re.findall(r"\d+(?:\.\d+)?", " ".join(expected))) | own_numbers(path.stem)
        hint = "numbers that are no thresholds of this alert (docs/reference/alerts.md has those: `make golden`)"
        assert set(stated) <= known, f"{path.name}: {hint}"


def own_numbers(alert: str) -> set[str]:
    """Return the values of the thresholds that an alert depends on, as a runbook may write them."""
    page = (ROOT / "docs/reference/alerts.md").read_text()
    row = re.search(rf"^\| \[{alert}\].*", page, re.MULTILINE)
    found: set[str] = set()
    for name, text in re.findall(r"`(\w+)` ([\d.]+)", row[0] if row else ""):
        units = {"s": (1, 60, 3600), "ratio": (0.01,)}.get(name.rpartition("_")[2], (1,))
        found |= {f"{float(text) / unit:g}" for unit in units}
    return found


def test_a_runbook_may_write_its_own_thresholds_in_any_unit() -> None:
    assert {"90", "60", "1"} <= own_numbers("ShmNearlyFull") and "0.9" not in own_numbers("ShmNearlyFull")
    assert own_numbers("Findings") == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.cause)
def test_the_runbook_of_every_cause_says_what_to_do_about_it(rule: Rule) -> None:
    for name in {rule.runbook, rule.alert or rule.runbook}:
        runbook = (ROOT / f"docs/runbooks/{name}.md").read_text()
        assert f"`{rule.cause}`" in runbook, f"docs/runbooks/{name}.md: run `make golden`, which fills its marked table"
    assert rule.alert is None or rule.alert in alerts()


def test_an_alert_holds_for_as_long_as_its_rule() -> None:
    thresholds = AlertThresholds(starved_for_s=7, xid_for_s=3)
    assert [hold_s(name, thresholds) for name in ("GpuStarved", "GpuXid", "ShmForecast")] == [7, 3, 300]


def test_every_alert_has_number_owner_cause_advice_cost_and_runbook() -> None:
    rules = rules_of(render())
    expected = ["summary", "description", "gpus", "owner", "cause", "advice", "cost", "dashboard_url", "runbook_url"]
    for name, as_written in alerts().items():
        annotations, labels = rules[name]["annotations"], rules[name]["labels"]
        assert list(annotations) == expected
        assert all(annotations.values()), name
        assert labels["severity"] in SEVERITIES or name == "PhaseStuck"  # `other` is a warning, the rest critical
        of_all = as_written["annotations"]["owner"] == "${node_owners}" or name == "ManyRunsStalled"  # about the site
        assert labels["about"]
        assert "namespace" in labels or of_all, (
            f"{name}: no `namespace` (for routes), nor are `${{node_owners}}` its owner"
        )


def test_what_to_do_is_known_of_every_cause_that_an_alert_names() -> None:
    """An alert advises the change of each of its causes; those of RunInefficient have no alert of their own."""
    rules = rules_of(render())
    for rule in RULES:
        if rule.alert in ("RunStalled", "RunHung"):
            assert "stacks of all ranks" in rules[rule.alert]["annotations"]["advice"], "the run's own command"
        elif rule.alert is not None:
            advice = rules[rule.alert]["annotations"]["advice"]
            assert rule.change in advice, rule.cause
            several = sum(other.alert == rule.alert for other in RULES) > 1
            assert (f"if eq . `{rule.cause}` }}}}{rule.change}" in advice) == several


def test_rules_name_only_metrics_and_states_that_exist() -> None:
    text = render()
    metrics = set(re.findall(r"(?<!:)\bgpuwatch_\w+\b(?!:)", text))
    assert len(metrics) > 20
    assert metrics <= set(BY_NAME)
    assert {"held_idle", "stalled", "input_wait"} <= set(re.findall(r'\bstate="(\w+)"', text)) <= set(GPU_STATES)


def test_recorded_names_in_alerts_are_recorded() -> None:
    rules = [rule for group in groups(prices=Prices(2.5)) for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    texts = [text for rule in rules if "alert" in rule for text in (rule["expr"], *rule["annotations"].values())]
    used = {name for text in texts for name in re.findall(r"\b\w+:gpuwatch_\w+:\w+", text)}
    assert len(used) > 8
    assert used <= recorded


def test_the_committed_page_of_alerts_is_fresh_and_complete() -> None:
    command = [sys.executable, str(ROOT / "scripts/alerts_page.py")]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert page == (DEPLOY.parent / "docs/reference/alerts.md").read_text(), "run `make golden`"
    rows = dict(re.findall(r"^\| \[(\w+)\]\(\.\./runbooks/\1\.md\) (.*) \|$", page, re.MULTILINE))
    assert set(rows) == set(alerts())
    assert rows["ShmNearlyFull"].endswith("| 1m | `shm_used_ratio` 0.9, `shm_for_s` 60")
    assert "`throttled_window_s` 300" in rows["GpuThrottled"], "through the recorded series that it reads"
    assert "`starved_ratio`" not in rows["GpuThrottled"]
    # of recorded series alone, or of all alerts
    never = {"job", "ledger_window_s", "keep_firing_for_s", "runbooks", "dashboards"}
    assert {each.name for each in fields(AlertThresholds)} - set(re.findall(r"`(\w+)` ", page)) <= never


def test_alerts_that_alertmanager_silences_exist() -> None:
    config = (DEPLOY / "alertmanager/alertmanager.yml").read_text()
    names = {name for group in re.findall(r"alertname =~? \"?([\w|]+)", config) for name in group.split("|")}
    assert len(names) > 10
    assert names <= set(alerts())
