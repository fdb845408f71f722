"""The dashboards' files, as they are in the repository and in the wheel, and made to fit a site's configuration.

Needs neither the SDK nor a Grafana.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpuwatch.alerting.render import RUNBOOKS, groups
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.config import Config
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.errors import ConfigError
from gpuwatch.extras import require

FLEET, NODE, RUN = "gpuwatch-fleet", "gpuwatch-node", "gpuwatch-run"
"""The dashboards' names in URLs. Fixed: links and bookmarks are made of them."""
TAG = "gpuwatch"
"""Of every dashboard and annotation that is ours."""
DATASOURCE = "gpuwatch-prometheus"
"""The uid that the provisioned datasource has, and that the datasource variable starts with."""
MONEY = "currencyUSD"
"""Replaced by the site's own currency."""
CHECKOUT = Path(__file__).parents[2] / "grafana"
PACKAGED = Path(__file__).parent / "json"
"""Where the wheel has them."""
_JOB = 'job=\\"gpuwatch\\"'


def runbook_url(page: str) -> str:
    """Return where a runbook is, by its alert's name; `causes` is the list of causes."""
    return f"{RUNBOOKS}/../concepts/causes.md" if page == "causes" else f"{RUNBOOKS}/{page}.md"


def folder() -> Path:
    """Return where the files are. Raises ConfigError for an installation without them."""
    for place in (PACKAGED, CHECKOUT):
        if any(place.glob("gpuwatch-*.json")):
            return place
    raise ConfigError(f"{PACKAGED}: the dashboards are missing; install gpuwatch-training again")


def load(config: Config | None = None, runbooks: str = RUNBOOKS) -> dict[str, dict[str, Any]]:
    """Return the dashboards by file name, for a site's configuration (the defaults when None).

    Args:
        config: Its thresholds, windows, prices and scrape job.
        runbooks: What stands before `/<Alert>.md` in links to runbooks: a path or a URL.
    """
    own = config or Config()
    found = {}
    for path in sorted(folder().glob("gpuwatch-*.json")):
        content = _fitted(path.read_text(encoding="utf-8"), own)
        dashboard = json.loads(content.replace(f"{RUNBOOKS}/", f"{runbooks.rstrip('/')}/"))
        if own.thresholds != Thresholds():
            _set_thresholds(dashboard, own.thresholds)
        found[path.name] = dashboard
    return found


def text(dashboard: dict[str, Any]) -> str:
    """Return a dashboard's file: the same for the same dashboard."""
    return json.dumps(dashboard, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _set_thresholds(dashboard: dict[str, Any], thresholds: Thresholds) -> None:
    """Set each panel's thresholds to the site's own; panels are found by title and question."""
    require("numpy", "dashboard")
    from gpuwatch_dashboards.panels import PANELS

    by_text = {(panel.title, panel.question): panel for panel in PANELS if panel.thresholds}
    for drawn in dashboard["panels"]:
        if panel := by_text.get((drawn["title"], drawn.get("description", ""))):
            steps = drawn["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]
            for step, limit in zip(steps, panel.thresholds, strict=True):
                step["value"] = limit.value_in(thresholds)


def _fitted(content: str, config: Config) -> str:
    """Return a file with the site's names of recorded series (they hold the windows), its scrape job and its currency."""
    for default, own in zip(_recorded(Config()), _recorded(config), strict=True):
        content = content.replace(default, own)
    content = content.replace(_JOB, f'job=\\"{config.alerts.job}\\"')
    currency = config.prices.currency
    return content if currency == "USD" else content.replace(MONEY, f"currency:{currency}")


def _recorded(config: Config) -> list[str]:
    """Return the names of all recorded series, in the order of the rules; those of money with any price."""
    found = groups(config.alerts, Prices(1.0))
    return [rule["record"] for group in found for rule in group["rules"] if "record" in rule]
