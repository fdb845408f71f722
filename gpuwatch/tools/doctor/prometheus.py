"""A Prometheus: does it answer, scrape the agents, and know the rules."""

from __future__ import annotations

import json
from typing import Any

from gpuwatch.http import why
from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.surroundings import Surroundings

_JOB = "gpuwatch"
_RULE = "GpuStarved"
_ASK = "give it with --prometheus URL"
_ADD = f"scrape_configs: [{{job_name: {_JOB}, static_configs: [{{targets: ['HOST:9478']}}]}}], then reload it"


def prometheus(around: Surroundings) -> Outcome:
    """Its targets of the job `gpuwatch`. Source: prometheus.io, HTTP API, /api/v1/targets."""
    if around.prometheus_url is None:
        return skipped("none was named", _ASK)
    try:
        targets = _ask(around, "/api/v1/targets?state=active")["activeTargets"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _no_answer(around, error)
    ours = [target for target in targets if target["labels"].get("job") == _JOB]
    if not ours:
        return problem(f"{around.prometheus_url} has no target of the job '{_JOB}'", _ADD)
    down = [target for target in ours if target["health"] == "down"]
    if down:
        words = "; ".join(f"{target['labels'].get('instance')}: {target['lastError']}" for target in down[:3])
        return problem(
            f"{len(down)} of {len(ours)} targets are down: {words}",
            "is the agent on that address? It serves on loopback unless told: gpuwatch agent --http ADDRESS:9478",
        )
    up = sum(target["health"] == "up" for target in ours)
    waiting = f", {len(ours) - up} not scraped yet" if up < len(ours) else ""
    return ok(f"{around.prometheus_url}: {up} of {len(ours)} targets up{waiting}")


def alert_rules(around: Surroundings) -> Outcome:
    """Whether gpuwatch's alerts are loaded there, and evaluate. Source: prometheus.io, HTTP API, /api/v1/rules."""
    if around.prometheus_url is None:
        return skipped("no Prometheus was named")
    try:
        groups = _ask(around, "/api/v1/rules?type=alert")["groups"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _no_answer(around, error)
    rules = [rule for group in groups if any(r["name"] == _RULE for r in group["rules"]) for rule in group["rules"]]
    if not rules:
        return warning(
            f"gpuwatch's alerts ({_RULE} …) are not loaded",
            "gpuwatch rules > gpuwatch.yml, name it under rule_files, and reload Prometheus",
        )
    failing = [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule.get("health") == "err"]
    if failing:
        return problem("; ".join(failing), "gpuwatch rules > gpuwatch.yml, and reload Prometheus")
    return ok(f"{len(rules)} alerts of gpuwatch's are loaded")


def _ask(around: Surroundings, path: str) -> Any:
    answer = around.fetch(f"{around.prometheus_url}{path}")
    if answer.status != 200:
        raise ValueError(f"status {answer.status}")
    return json.loads(answer.body)["data"]


def _no_answer(around: Surroundings, error: Exception) -> Outcome:
    if isinstance(error, OSError):
        reason = why(error)
    else:
        reason = f"no Prometheus API there ({error})" if str(error).startswith("status") else "no Prometheus API there"
    return problem(f"{around.prometheus_url}: {reason}", "curl the URL from here: address, port, firewall, path prefix")
