"""The dashboards' files, as they are in the repository and in the wheel, and made to fit a site's configuration.

Needs neither the SDK nor a Grafana.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpuwatch.alerting.render import groups
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.config import Config
from gpuwatch.errors import ConfigError

CHECKOUT = Path(__file__).parents[2] / "grafana"
PACKAGED = Path(__file__).parent / "json"
"""Where the wheel has them."""
_MONEY, _JOB = "currencyUSD", 'job=\\"gpuwatch\\"'


def folder() -> Path:
    """Return where the files are. Raises ConfigError for an installation without them."""
    for place in (PACKAGED, CHECKOUT):
        if any(place.glob("gpuwatch-*.json")):
            return place
    raise ConfigError(f"{PACKAGED}: the dashboards are missing; install gpuwatch-training again")


def load(config: Config | None = None) -> dict[str, dict[str, Any]]:
    """Return the dashboards by file name, for a site's thresholds, prices and scrape job (the defaults when None)."""
    files = sorted(folder().glob("gpuwatch-*.json"))
    return {path.name: json.loads(_fitted(path.read_text(encoding="utf-8"), config or Config())) for path in files}


def text(dashboard: dict[str, Any]) -> str:
    """Return a dashboard's file: the same for the same dashboard."""
    return json.dumps(dashboard, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _fitted(content: str, config: Config) -> str:
    """Return a file with the site's names of recorded series (they hold the windows), its scrape job and its currency."""
    for default, own in zip(_recorded(Config()), _recorded(config), strict=True):
        content = content.replace(default, own)
    content = content.replace(_JOB, f'job=\\"{config.alerts.job}\\"')
    currency = config.prices.currency
    return content if currency == "USD" else content.replace(_MONEY, f"currency:{currency}")


def _recorded(config: Config) -> list[str]:
    """Return the names of all recorded series, in the order of the rules; those of money with any price."""
    found = groups(config.alerts, Prices(1.0))
    return [rule["record"] for group in found for rule in group["rules"] if "record" in rule]
