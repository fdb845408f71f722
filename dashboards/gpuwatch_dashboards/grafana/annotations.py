"""What is marked on every chart: alerts while they fire, runs that begin and end, and what `gpuwatch grafana push` marked.

The SDK's type of an annotation lacks what Prometheus' annotations are made of (docs of Grafana's Prometheus data source,
"annotations"), so that these are plain data.
"""

from __future__ import annotations

from typing import Any

from gpuwatch_dashboards.grafana.uids import TAG
from gpuwatch_dashboards.palette import BLUE, GREY, VERMILLION

_PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
_STEP = "15s"


def marks(chosen: str) -> list[dict[str, Any]]:
    """Return a dashboard's annotations; `chosen` are the conditions on `instance` or `run` that its variables stand for."""
    up = f"max by (run) (gpuwatch_run_up{{{chosen}}})"
    before = f"max by (run) (gpuwatch_run_up{{{chosen}}} offset 1m)"
    return [
        _prometheus(
            "Alerts",
            f'ALERTS{{alertstate="firing", {chosen}}}',
            VERMILLION,
            "{{alertname}}",
            "severity,instance,rank,gpu",
        ),
        _prometheus("Run begins", f"({up} == 1) unless ({before} == 1)", BLUE, "{{run}} begins", "run"),
        _prometheus("Run ends", f"({before} == 1) unless ({up} == 1)", GREY, "{{run}} ends", "run"),
    ]


def pushed(*tags: str) -> dict[str, Any]:
    """Return the annotation of what was pushed and has all of these tags besides ours."""
    return {
        "name": "Pushed by gpuwatch",
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "iconColor": BLUE,
        "target": {"type": "tags", "tags": [TAG, *tags], "matchAny": False, "limit": 200},
    }


def _prometheus(name: str, expr: str, colour: str, title: str, tags: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": _PROMETHEUS,
        "enable": True,
        "iconColor": colour,
        "expr": expr,
        "step": _STEP,
        "titleFormat": title,
        "tagKeys": tags,
    }
