"""Print docs/reference/alerts.md: all alerts, from their template, thresholds and each runbook's first sentence."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path

from gpuwatch.alerting.render import TEMPLATES, Rule, alerts, duration, groups, names, template
from gpuwatch.alerting.thresholds import SHARED, AlertThresholds

RUNBOOKS = Path(__file__).parents[1] / "docs/runbooks"
DEFAULTS = asdict(AlertThresholds())
_ORDER = "critical warning info"
"""PhaseStuck's severity is a template, and so the first."""
_HEAD = """# Alerts

All alerts of `gpuwatch rules`, by severity. `critical`: GPUs make no progress, or are not measured. `warning`: GPU time
is being lost. `info`: GPU time could be saved. The column *for* is how long the expression must hold, in addition to
the windows of the expression.

When the expression no longer holds, an alert keeps firing for {keep} (`keep_firing_for_s`), because a series that
vanished does not mean that the problem is fixed. Some alerts resolve earlier: alerts about a run or a job, when it has
ended; alerts about a run without progress, when it has made progress for five minutes; alerts about an idle or unused
GPU, when the GPU is used or released; and alerts about a run that is no longer measured, when it is measured again.
These resolve at once: {at_once}.

Each key is set in the section `[alerts]` of the [configuration file](../deploy/compose.md); keys that end with `_s` are
in seconds. These keys default to keys of the section `[thresholds]`:
{shared}.

The rules are made from the templates [recording.yml](../../gpuwatch/alerting/recording.yml) and
[alerts.yml](../../gpuwatch/alerting/alerts.yml); with the defaults filled in they are
[deploy/prometheus/rules/gpuwatch.yml](../../deploy/prometheus/rules/gpuwatch.yml).
Written by `python scripts/alerts_page.py > docs/reference/alerts.md`.

| alert | severity | when | for | keys and their defaults |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the page."""
    filled = {rule["alert"]: rule for group in groups() for rule in group["rules"] if "alert" in rule}
    in_order = sorted(alerts().items(), key=lambda item: _ORDER.find(item[1]["labels"]["severity"]))
    at_once = ", ".join(
        name for name, rule in alerts().items() if not {"keep_firing_for", "run_alert", "held_by"} & set(rule)
    )
    shared = ",\n".join(f"`{name}` (`{of}`)" for name, of in SHARED.items())
    head = _HEAD.format(keep=duration(DEFAULTS["keep_firing_for_s"]), at_once=at_once, shared=shared)
    return head + "".join(_row(rule, filled[name]) for name, rule in in_order)


def keys(rule: Rule) -> list[str]:
    """Return the fields of AlertThresholds that an alert depends on, through the recorded series that it reads too."""
    templates = [template(name) for name in TEMPLATES]
    rules = (each for one in templates for group in one["groups"] for each in group["rules"])
    recorded = [each for each in rules if "record" in each and "when" not in each]
    texts = {name: text for one in templates for name, text in one["texts"].items()}
    found, todo, done = set(), [rule["expr"], str(rule.get("for"))], set()
    while todo:
        text = todo.pop()
        used = names(text)
        found |= used
        more = [texts[name] for name in used & set(texts)]
        more += [each["expr"] + str(each.get("for_each", "")) for each in recorded if each["record"] in text]
        todo += [each for each in more if each not in done]
        done.update(more)
    return [name for name in DEFAULTS if {name, name.removesuffix("_s")} & found]


def meaning(alert: str) -> str:
    """Return the first sentence of the runbook's **Meaning.**. Exits for a runbook without one."""
    text = " ".join((RUNBOOKS / f"{alert}.md").read_text().split())
    found = re.search(r"\*\*Meaning\.\*\* (.+?[.:])(?= [A-Z*]| \*\*)", text)
    return found[1].rstrip(":.") if found else sys.exit(f"docs/runbooks/{alert}.md: no **Meaning.** sentence")


def _row(rule: Rule, filled: Rule) -> str:
    name = rule["alert"]
    own = ", ".join(f"`{key}` {DEFAULTS[key]}" for key in keys(rule)).replace("|", "\\|")
    cells = (
        f"[{name}](../runbooks/{name}.md)",
        "critical; `other`: warning" if name == "PhaseStuck" else rule["labels"]["severity"],
        meaning(name),
        filled.get("for", "0s"),
        own,
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
