"""Panels about a node's agent itself: does it measure, and what does it cost."""

from __future__ import annotations

from gpuwatch_dashboards.panels.site_panel import Column, SiteCurve, SitePanel

_NODE = 'instance=~"$instance"'

AGENT: tuple[SitePanel, ...] = (
    SitePanel(
        key="collectors",
        title="Collectors",
        question="Which collector failed at its last turn, and how long do they take?",
        unit="s",
        shape="table",
        curves=(
            SiteCurve(f"min by (instance, collector) (gpuwatch_collector_success{{{_NODE}}})", "Works", "up"),
            SiteCurve(f"max by (instance, collector) (gpuwatch_collector_duration_seconds{{{_NODE}}})", "Took"),
        ),
        columns=(Column("instance", "Node"), Column("collector", "Collector")),
        sort="Took",
    ),
    SitePanel(
        key="agent_cost",
        title="What the agent costs",
        question="How much of a core does it take?",
        unit="ratio",
        shape="lines",
        curves=(SiteCurve(f"rate(gpuwatch_agent_cpu_seconds_total{{{_NODE}}}[$__rate_interval])", "CPU · {instance}"),),
    ),
    SitePanel(
        key="agent_memory",
        title="The agent's memory and history",
        question="Does it grow?",
        unit="bytes",
        shape="lines",
        curves=(
            SiteCurve(f"gpuwatch_agent_resident_memory_bytes{{{_NODE}}}", "memory · {instance}"),
            SiteCurve(f"gpuwatch_history_bytes{{{_NODE}}}", "history · {instance}"),
        ),
    ),
)
