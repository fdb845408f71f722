"""How numbers and states look in Grafana: units, thresholds, colours, and where cells and panels lead to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from gpuwatch_dashboards.grafana.uids import FLEET, NODE, RUN, runbook_url
from gpuwatch_dashboards.palette import BLUE, GREY, LOOKS, ORANGE, SAND, VERMILLION, WINE, Look
from gpuwatch_dashboards.panels import Threshold
from gpuwatch_dashboards.panels.site_panel import Link

MONEY = "currencyUSD"
"""Replaced by the site's own currency when the files are written or pushed with a configuration."""
UNITS: Mapping[str, str] = {
    "s": "s",
    "ratio": "percentunit",
    "bytes": "bytes",
    "bytes/s": "binBps",
    "1/s": "ops",
    "watts": "watt",
    "celsius": "celsius",
    "hertz": "hertz",
    "hours": "h",
    "money": MONEY,
    "money/h": MONEY,
    "1": "short",
    "up": "short",
}
DECIMALS: Mapping[str, int] = {"hours": 1, "money": 2, "money/h": 2}
COLOURS = {"warning": ORANGE, "critical": VERMILLION}
KINDS: Mapping[str, Look] = {
    "useful": Look("useful", BLUE),
    "starved": Look("starved", VERMILLION),
    "idle": Look("held idle", WINE),
    "stalled": Look("stalled", SAND),
    "rest": Look("the rest", GREY),
}
BY_LABEL: Mapping[str, Mapping[str, Look]] = {**LOOKS, "kind": KINDS}
_KEEP = "${datasource:queryparam}&${__url_time_range}"
_TARGETS: Mapping[Link, tuple[str, str]] = {
    "fleet": ("Fleet", f"/d/{FLEET}?{_KEEP}"),
    "node": ("Node ${__value.text}", f"/d/{NODE}?var-instance=${{__value.text}}&{_KEEP}"),
    "run": ("Run ${__value.text}", f"/d/{RUN}?var-run=${{__value.text}}&{_KEEP}"),
    "user": ("GPUs of ${__value.text}", f"/d/{FLEET}?var-user=${{__value.text}}&{_KEEP}"),
    "job": ("Runs of job ${__value.text}", f"/d/{RUN}?var-job=${{__value.text}}&{_KEEP}"),
    "runbook": ("What to do", runbook_url("${__data.fields.runbook}")),
}


def thresholds(limits: Sequence[Threshold], below: str = "transparent") -> dashboard.ThresholdsConfig:
    """Return a panel's thresholds; `below` is the colour of values under all of them."""
    steps = [models.Threshold(value=None, color=below)]
    steps += [models.Threshold(value=limit.value, color=COLOURS[limit.severity]) for limit in limits]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def prop(name: str, value: Any) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(name, value)


def cell_link(link: Link) -> models.DynamicConfigValue:
    """Return the property that makes a column's cells lead somewhere."""
    title, url = _TARGETS[link]
    return prop("links", [{"title": title, "url": url}])


def overrides(legend: str) -> dict[str, list[models.DynamicConfigValue]]:
    """Return colour and name of each state, phase or kind, by the name that the legend format gives it."""
    for label, looks in BY_LABEL.items():
        if legend == f"{{{label}}}":
            return {
                value: [
                    prop("displayName", look.name),
                    prop("color", {"mode": "fixed", "fixedColor": look.colour}),
                ]
                for value, look in looks.items()
            }
    return {}


UP: list[dict[str, Any]] = [
    {
        "type": "value",
        "options": {
            "0": {"text": "no", "color": VERMILLION, "index": 0},
            "1": {"text": "yes", "color": BLUE, "index": 1},
        },
    }
]
"""1 and 0 in words."""
