"""The panel of the page "Fleet" that is drawn from what the states' recording rule keeps (gpuwatch/alerting/recording.yml)."""

from __future__ import annotations

from gpuwatch_dashboards.panels.panel import Curve, Panel
from gpuwatch_dashboards.query import Query

FLEET_STATES = Panel(
    key="fleet_states",
    title="What the GPUs do",
    question="How many GPUs compute, wait, or are held by somebody who does not use them?",
    unit="1",
    curves=(Curve(Query("gpuwatch_gpu_seconds_total", by=("state",)), "{state}"),),
    stacked=True,
    empty="Nothing was recorded in this time. The rules of `gpuwatch rules` record it every five minutes.",
)
