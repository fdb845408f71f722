"""The Grafana dashboards: JSON files in the repository and in the wheel, adapted here to a site's configuration.

`scripts/grafana_dashboards.py` makes them from the list of panels, which needs grafana-foundation-sdk (in the `dev`
extra); `push` sends them to a Grafana by grafana-client. Reading the files needs neither.
"""

import json
from pathlib import Path
from typing import Any

from gpuwatch.alerting.render import RUNBOOKS
from gpuwatch.config import Config
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.errors import ConfigError, require

DATASOURCE = "gpuwatch-prometheus"
"""Uid of the provisioned data source, and the default of the dashboards' data source variable."""
CHECKOUT = Path(__file__).parents[2] / "grafana"
PACKAGED = Path(__file__).parent / "json"
_JOB = 'job=~\\"{}\\"'


def load(config: Config | None = None, datasource: str = DATASOURCE) -> dict[str, dict[str, Any]]:
    """Return the dashboards by file name, for a site's settings. Raises ConfigError for an installation without them.

    The Prometheus with the uid `datasource` is selected at first.
    """
    own = config or Config()
    found = {}
    paths = sorted(PACKAGED.glob("gpuwatch-*.json")) or sorted(CHECKOUT.glob("gpuwatch-*.json"))
    if not paths:
        raise ConfigError(f"{PACKAGED}: the dashboards are missing; install gpuwatch-training again")
    replaced = [(_JOB.format("gpuwatch"), _JOB.format(own.alerts.job)), ("USD", own.prices.currency)]
    replaced += [(f"{RUNBOOKS}/", f"{own.alerts.runbooks.rstrip('/')}/"), (f'"{DATASOURCE}"', json.dumps(datasource))]
    for path in paths:
        content = path.read_text(encoding="utf-8")
        for default, value in replaced:
            content = content.replace(default, value)
        dashboard = json.loads(content)
        if own.thresholds != Thresholds():
            _set_thresholds(dashboard, own.thresholds)
        found[path.name] = dashboard
    return found


def text(dashboard: dict[str, Any]) -> str:
    """Return a dashboard's file: the same for the same dashboard."""
    return json.dumps(dashboard, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _set_thresholds(dashboard: dict[str, Any], thresholds: Thresholds) -> None:
    """Set each panel's thresholds to the site's; panels are found by title and question."""
    require("numpy", "dashboard")
    from gpuwatch_dashboards.panels import PANELS

    by_text = {(panel.title, panel.question): panel for panel in PANELS if panel.thresholds()}
    for drawn in dashboard["panels"]:
        if panel := by_text.get((drawn["title"], drawn.get("description", ""))):
            steps = drawn["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]
            for step, (value, _) in zip(steps, panel.thresholds(thresholds), strict=True):
                step["value"] = value
