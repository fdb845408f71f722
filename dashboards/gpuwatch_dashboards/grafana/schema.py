"""What the SDK writes, made to agree with the schema that Grafana 11 publishes (the SDK is of 10.1)."""

from __future__ import annotations

from typing import Any

PER_LINE = 4
"""Repeated panels beside each other."""
_NOT_OF_A_VARIABLE = ("auto", "auto_count", "auto_min", "id")
_STAT = {"percentChangeColorMode": "standard", "showPercentChange": False, "wideLayout": True}


def to_schema(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Return the dashboard without what the schema does not know, and with what it has required since."""
    dashboard.pop("style", None)
    for variable in dashboard.get("templating", {}).get("list", []):
        for name in _NOT_OF_A_VARIABLE:
            variable.pop(name, None)
    for panel in dashboard.get("panels", []):
        if panel["type"] == "stat":
            panel["options"] = {**panel["options"], **_STAT}
        if panel.get("repeat"):
            panel["maxPerRow"] = PER_LINE
        else:
            panel.pop("repeatDirection", None)
    return dashboard
