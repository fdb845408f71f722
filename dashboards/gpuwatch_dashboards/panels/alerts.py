"""Panels about alerts: what fires, where, and the way to its runbook."""

from __future__ import annotations

from gpuwatch_dashboards.panels.site_panel import Column, SiteCurve, SitePanel

NOTHING = "No alert fires."


def firing(key: str, chosen: str, *columns: Column) -> SitePanel:
    """Return the table of alerts that fire now and have these labels; `chosen` are further conditions, or empty."""
    labels = ", ".join(["alertname", "severity", *(column.label for column in columns)])
    selector = f'ALERTS{{alertstate="firing"{", " + chosen if chosen else ""}}}'
    return SitePanel(
        key=key,
        title="Alerts",
        question="What is wrong enough to tell somebody? The name leads to what to do.",
        unit="1",
        shape="table",
        curves=(SiteCurve(f"max by ({labels}) ({selector})"),),
        columns=(Column("alertname", "Alert", "runbook"), Column("severity", "Severity"), *columns),
        empty=NOTHING,
    )


FLEET_ALERTS = firing(
    "fleet_alerts",
    "",
    Column("instance", "Node", "node"),
    Column("run", "Run", "run"),
    Column("rank", "Rank"),
    Column("gpu", "GPU"),
)
NODE_ALERTS = firing("node_alerts", 'instance=~"$instance"', Column("run", "Run", "run"), Column("gpu", "GPU"))
RUN_ALERTS = firing("run_alerts", 'run="$run"', Column("instance", "Node", "node"), Column("rank", "Rank"))
