"""Prometheus rules: what is recorded from the ledgers and what is worth an alert. Pure: `render` gives the file's text.

The rules are data in `gpuwatch.alerting`; every number in them stands for a field of `AlertThresholds`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from gpuwatch.alerting import (
    ALERT_GROUPS,
    ALERT_RULES,
    INTERVALS_S,
    RECORDING_GROUPS,
    RECORDING_RULES,
    AlertRule,
    RecordingRule,
)
from gpuwatch.alerting.hours import money_rules
from gpuwatch.alerting.recording import LEVELS, TRAINING_STATES, cost_rules
from gpuwatch.alerting.thresholds import AlertThresholds, Prices

__all__ = [
    "ALERT_RULES", "RECORDING_RULES", "TRAINING_STATES", "AlertRule", "AlertThresholds", "Prices", "RecordingRule",
    "groups", "render",
]  # fmt: skip

RUNBOOKS = "docs/runbooks"


def render(thresholds: AlertThresholds | None = None, prices: Prices | None = None, *, runbooks: str = RUNBOOKS) -> str:
    """Return the rules file as YAML, for `rule_files` of Prometheus 2.42 or later (`keep_firing_for`).

    Args:
        thresholds: The numbers; the defaults when None.
        prices: What a GPU-hour costs; None: costs are told in GPU-hours, and none is recorded.
        runbooks: What stands before `/<Alert>.md` in the `runbook_url` annotation: a path or a URL.
    """
    import yaml  # of the agent extra

    class Dumper(yaml.SafeDumper):
        """Writes a text of several lines as one, so that people can read it."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    content = {"groups": groups(thresholds, prices, runbooks=runbooks)}
    body = yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return "# Written by `gpuwatch rules` from gpuwatch/alerting: change it there.\n" + body


def groups(
    thresholds: AlertThresholds | None = None, prices: Prices | None = None, *, runbooks: str = RUNBOOKS
) -> list[dict[str, Any]]:
    """Return the rule groups as plain data: what stands below `groups` in a rules file or a PrometheusRule."""
    thresholds, prices = thresholds or AlertThresholds(), prices or Prices()
    more: dict[str, tuple[RecordingRule, ...]] = {}
    if prices.gpu_hour is not None:
        costs = cost_rules(dict(prices.models), prices.gpu_hour)
        more = {"gpuwatch-levels": costs, "gpuwatch-hours": money_rules(LEVELS)}
    # A group need not wait longer than the window that it reads.
    intervals_s = {name: min(interval_s, thresholds.ledger_window_s) for name, interval_s in INTERVALS_S.items()}
    intervals_s["gpuwatch-hours"] = thresholds.ledger_window_s
    recorded: list[dict[str, Any]] = []
    for name, rules in RECORDING_GROUPS.items():
        interval = {"interval": _duration(intervals_s[name])} if name in intervals_s else {}
        recorded.append(
            {"name": name, **interval, "rules": list(_recordings((*rules, *more.get(name, ())), thresholds))}
        )
    return recorded + [
        {"name": name, "rules": list(_alerts(alerts, thresholds, prices, runbooks))}
        for name, alerts in ALERT_GROUPS.items()
    ]


def _recordings(rules: Iterable[RecordingRule], thresholds: AlertThresholds) -> Iterator[dict[str, Any]]:
    for rule in rules:
        entry: dict[str, Any] = {"record": _fill(rule.record, thresholds), "expr": _fill(rule.expr, thresholds)}
        if rule.labels:
            entry["labels"] = dict(rule.labels)
        yield entry


def _alerts(
    rules: Iterable[AlertRule], thresholds: AlertThresholds, prices: Prices, runbooks: str
) -> Iterator[dict[str, Any]]:
    for rule in rules:
        entry: dict[str, Any] = {"alert": rule.name, "expr": _fill(rule.expr, thresholds)}
        hold = getattr(thresholds, rule.for_field)
        if hold:
            entry["for"] = _duration(hold)
        if rule.keep and thresholds.keep_firing_for_s:
            entry["keep_firing_for"] = _duration(thresholds.keep_firing_for_s)
        entry["labels"] = {"severity": rule.severity}
        texts = {
            "summary": rule.summary,
            "description": rule.description,
            "owner": rule.owner,
            "cause": rule.cause,
            "advice": rule.advice,
            "cost": _cost(rule, prices),
        }
        entry["annotations"] = {name: _fill(text, thresholds) for name, text in texts.items()}
        entry["annotations"]["runbook_url"] = f"{runbooks.rstrip('/')}/{rule.name}.md"
        yield entry


def _cost(rule: AlertRule, prices: Prices) -> str:
    """Return the template of what an alert costs. Prometheus' templates cannot multiply, so that a query does."""
    if rule.lost_gpus is None:
        return "cannot be told"
    hours = f"({rule.lost_gpus}) * 24"
    text = f"{{{{ with printf `{hours}` {rule.lost_arguments} | query }}}}"
    text += "{{ . | first | value | printf `%.1f` }} GPU-hours a day"
    if prices.gpu_hour is not None:
        price = f"{prices.gpu_hour:g}"
        if prices.models:
            price = f"scalar(avg(gpu:gpuwatch_gpu_price:per_hour) or vector({price}))"
        text += f"{{{{ end }}}}{{{{ with printf `{hours} * {price}` {rule.lost_arguments} | query }}}}"
        text += f" ({{{{ . | first | value | printf `%.2f` }}}} {prices.currency})"
    return text + "{{ end }}"


def _fill(text: str, thresholds: AlertThresholds) -> str:
    """Return `text` with each `<field>` replaced. A field in seconds is written `5m`; as `<…_seconds>`, as a number."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == "training_states":
            return "|".join(TRAINING_STATES)
        if name.endswith("_seconds"):
            return f"{getattr(thresholds, name.removesuffix('econds')):g}"
        field = getattr(thresholds, name)
        if name.endswith("_s"):
            return _duration(field)
        return field if isinstance(field, str) else f"{field:g}"

    return re.sub(r"<([a-z_]+)>", value, text)


def _duration(seconds: float) -> str:
    """Return seconds as Prometheus writes a duration: `5m`, `90s`, `1500ms`."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{int(seconds) // size}{unit}"
    return f"{int(seconds)}s"
