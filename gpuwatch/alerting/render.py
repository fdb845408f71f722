"""Fills in the templates of the Prometheus rules. The first lines of recording.yml explain their syntax."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from gpuwatch.alerting.thresholds import XIDS_OF_PROGRAMS, AlertThresholds, Prices
from gpuwatch.diagnosis.rules import RULES
from gpuwatch.tables import NAME, fill, table

TEMPLATES = ("recording.yml", "alerts.yml")
RUNBOOKS = AlertThresholds.runbooks
_INTERVALS_S = {"ledger": 60, "baseline": 120, "slow": 180}
"""How often groups with windows of minutes and of hours are evaluated. The last are well within the five minutes for
which Prometheus uses a recorded value: a late evaluation must not restart an alert."""

Rule = dict[str, Any]


@cache
def template(name: str) -> dict[str, Any]:
    """Return a template as it is written, parsed. Do not change it."""
    loaded: dict[str, Any] = table("gpuwatch.alerting", name)
    return loaded


def alerts() -> dict[str, Rule]:
    """Return the alerts by name, as the template has them."""
    rules = (rule for group in template("alerts.yml")["groups"] for rule in group["rules"])
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def hold_s(alert: str, thresholds: AlertThresholds) -> float:
    """Return for how long an alert's expression must hold, in seconds."""
    (name,) = names(alerts()[alert]["for"])
    return float(getattr(thresholds, f"{name}_s"))


def render(thresholds: AlertThresholds | None = None, prices: Prices | None = None) -> str:
    """Return the rules file as YAML, for Prometheus >= 2.42 (`keep_firing_for`). Without prices it records no money."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes a text of several lines as a block."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    rules = {"groups": groups(thresholds, prices)}
    body = yaml.dump(rules, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return "# Written by `gpuwatch rules` from the templates in gpuwatch/alerting: change it there.\n" + body


def groups(thresholds: AlertThresholds | None = None, prices: Prices | None = None) -> list[dict[str, Any]]:
    """Return the rule groups as plain data: the list under `groups` in a rules file or a PrometheusRule."""
    values = thresholds or AlertThresholds(), prices or Prices()
    return [group for name in TEMPLATES for group in filled(template(name), *values)]


def filled(template: Mapping[str, Any], thresholds: AlertThresholds, prices: Prices) -> Iterator[dict[str, Any]]:
    """Yield a template's groups with every name filled in. Raises ConfigError for a name that does not exist."""
    values = _values(thresholds, prices) | template.get("texts", {})
    for alert in alerts():
        values |= _changes(alert)
    active: set[str | None] = {None}
    if prices.gpu_hour is not None:
        active |= {"any_price", "prices_by_model" if prices.models else "one_price"}
    for group in template["groups"]:
        rules = [
            entry
            for rule in group["rules"]
            if rule.get("when") in active
            for of_rule in rule.get("for_each", [{}])
            for entry in _rules(rule, values | fill(of_rule, values))
        ]
        yield fill({key: value for key, value in group.items() if key != "rules"}, values) | {"rules": rules}


def names(value: Any) -> set[str]:
    """Return the names of `${…}` in a text, or in all texts of a rule."""
    return set(NAME.findall(str(value)))


def _rules(rule: Rule, values: Mapping[str, str]) -> list[Rule]:
    """Return a rule, filled in; before an alert that its expression holds the record of its condition."""
    entry: Rule = fill({key: value for key, value in rule.items() if key not in ("when", "for_each")}, values)
    # 0s is what Prometheus takes where the key is missing.
    entry = {key: value for key, value in entry.items() if not (key in ("for", "keep_firing_for") and value == "0s")}
    own, by, over = (entry.pop(name, None) for name in ("run_alert", "held_by", "held_unless"))
    if own is None and by is None:
        return [entry]
    record = {"record": f"alert:{entry['alert']}:value", "expr": entry["expr"]}
    return [record, entry | {"expr": _held(entry["alert"], own, by or own, over, values)}]


def _held(alert: str, own: str | None, by: str, over: str | None, values: Mapping[str, str]) -> str:
    """Return the expression of an alert: held like keep_firing_for, but not past the end of the run or job, nor where
    `over` has a series; of `run_alert` with its owner.

    A rule cannot resolve an alert held by keep_firing_for. What fired at the last evaluation is in the series ALERTS.
    """
    ended = fill("${ended_job}" if "job_id" in by else "${ended_run}", values)
    held = record = f"alert:{alert}:value"
    if values["keep_firing_for"] != "0s":
        held = (
            f"(\n  {record}\n  or last_over_time({record}[{values['keep_firing_for']}])"
            f'\n  and on ({by}) ALERTS{{alertname="{alert}",alertstate="firing"}}'
            f"{'' if over is None and own else chr(10) + '  unless on ' + (over or ended)}\n)"
        )
    if own is None:
        return held
    labels = values["run_owner_labels"] + ("" if "instance" in by else ", instance")
    return f"({held} unless on {ended})\n* on (job, run) group_left ({labels}) run:gpuwatch_run_info:one"


def _changes(alert: str) -> dict[str, str]:
    """Return templates: the costliest finding's advice, up to its else; the change for it and `.`; cause patterns."""
    changes = {rule.cause: rule.change for rule in RULES if rule.alert == alert}
    causes = "|".join(changes)
    largest = f'max by (job, instance, cause) (gpuwatch_finding_evidence_ratio{{run=%q,cause=~"{causes}"}})'
    advice = "topk by (job, instance, cause) (1, gpuwatch_finding_info{run=%q})"
    advised = f"topk(1, {largest} * on (job, instance, cause) group_left (advice) {advice})"
    advised = f"{{{{ with printf `{advised}` $labels.run $labels.run | query }}}}{{{{ (. | first).Labels.advice }}}}{{{{ else }}}}"
    costliest = f'sort_desc(max by (cause) (gpuwatch_finding_evidence_ratio{{run=%q,cause=~"{causes}"}}))'
    text = "{{ else ".join(f"if eq . `{cause}` }}}}{change}" for cause, change in changes.items())
    of_cause = f"{{{{ {text}{{{{ end }}}}"
    text = f"{{{{ with (. | first).Labels.cause }}}}{of_cause}{{{{ end }}}}{{{{ else }}}}see the runbook{{{{ end }}}}"
    text = f"{{{{ with printf `{costliest}` $labels.run | query }}}}{text}"
    change = next(iter(changes.values())) if len(changes) == 1 else text
    later = "|".join(rule.cause for rule in RULES if rule.alert == alert and rule.costs_later)
    found = {"advised": advised, "change": change, "change_of": of_cause, "causes_of": causes, "later_of": later}
    return {f"{name}_{alert}": text for name, text in found.items()}


def _values(thresholds: AlertThresholds, prices: Prices) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in asdict(thresholds).items():
        values[name] = value if isinstance(value, str) else f"{value:g}"
        if name.endswith("_s"):
            values[name.removesuffix("_s")] = duration(value)
    values["missed"] = duration(_INTERVALS_S["baseline"])
    # No group need wait longer than its window. What is summed once a window is recorded a whole number of times in it.
    for group, most_s in (*_INTERVALS_S.items(), ("states", thresholds.ledger_window_s / 2)):
        values[f"{group}_interval"] = duration(min(most_s, thresholds.ledger_window_s))
    values["own_runbooks"], values["dashboards"] = thresholds.runbooks.rstrip("/"), thresholds.dashboards.rstrip("/")
    of_agents = RUNBOOKS.replace("127.0.0.1:9478", "${agent}")
    values["runbooks"] = of_agents if thresholds.runbooks == RUNBOOKS else values["own_runbooks"]
    phases = [value for name, value in asdict(thresholds).items() if re.fullmatch(r"phase_(?!for)\w+_s", name)]
    values["longest_phase_s"] = f"{max(phases):g}"
    values["held_window"] = duration(max(thresholds.keep_firing_for_s, thresholds.telemetry_window_s))
    values["sweep_before"], values["sweep_memory"] = (duration(n * thresholds.sweep_window_s) for n in (2, 3))
    values["xids_of_programs"] = " or ".join(f"gpuwatch_gpu_last_xid == {xid}" for xid in XIDS_OF_PROGRAMS)
    cases = (f"if eq $value {xid}.0 }}}}{text}" for xid, text in template("alerts.yml")["xids"].items())
    values["xid_meaning"] = "{{ " + "{{ else ".join(cases) + "{{ else }}see NVIDIA's list of XIDs{{ end }}"
    return values | {"currency": prices.currency} | _price_values(prices)


def _price_values(prices: Prices) -> dict[str, str]:
    """Return the names about money. Prometheus' text templates cannot multiply, so a query does."""
    per_day = "{{ . | first | value | printf `%.1f` }} GPU-hours a day"
    if prices.gpu_hour is None:
        return {"per_day": per_day}
    gpu_hour = f"{prices.gpu_hour:g}"
    price, whose = ("${own_price}", "${whose_price}") if prices.models else (gpu_hour, "")
    per_day += f"{{{{ with printf `vector(%f) * {price}` (. | first | value) {whose} | query }}}}"
    per_day += f" ({{{{ . | first | value | printf `%.2f` }}}} {prices.currency}){{{{ end }}}}"
    gpus = "max by (job, instance, gpu, UUID)"
    by_model = [f'{gpus} (gpuwatch_gpu_info{{model="{model}"}}) * {own:g}' for model, own in prices.models.items()]
    by_model.append(f"{gpus} (gpuwatch_gpu_ledger_watermark_timestamp_seconds) * 0 + {gpu_hour}")
    return {"per_day": per_day, "gpu_hour": gpu_hour, "price_by_model": "\nor\n".join(by_model)}


def duration(seconds: float) -> str:
    """Return seconds as Prometheus writes a duration: `5m`, `90s`, `1500ms`."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{int(seconds) // size}{unit}"
    return f"{int(seconds)}s"
