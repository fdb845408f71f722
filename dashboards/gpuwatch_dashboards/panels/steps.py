"""Panels drawn from step records, which agents keep and no time series has: they have no query, and no place in Grafana."""

from __future__ import annotations

from gpuwatch_dashboards.panels.panel import Curve, Panel
from gpuwatch_dashboards.query import Query

_STEPS = Query("gpuwatch_step_phase_seconds_total", by=("phase",), over=Query("gpuwatch_steps_total"))
"""What a time series comes nearest with; said so that units are checked like any panel's. It is never asked."""


HOST_STEPS = Panel(
    key="steps",
    title="Steps on the host",
    question="What is a step's time made of, as the training process sees it? Click to look closer.",
    unit="s",
    curves=(Curve(_STEPS, "{phase}"),),
    stacked=True,
    empty="No step of this run is kept for this time.",
)
DEVICE_STEPS = Panel(
    key="device_steps",
    title="Steps on the device",
    question="What did the device do in a step, by its own clock?",
    unit="s",
    curves=(Curve(_STEPS, "{state}"),),
    stacked=True,
)
WAITS = Panel(
    key="waits",
    title="Data wait, exposed and hidden",
    question="How much of the host's wait did the device feel? What is hidden costs nothing: it is head-room.",
    unit="s",
    curves=(Curve(_STEPS, "{wait}"),),
    stacked=True,
)
LONGEST = Panel(
    key="longest",
    title="Longest data wait",
    question="Which steps stand out? The longest and the mean of each interval.",
    unit="s",
    curves=(Curve(_STEPS, "longest"), Curve(_STEPS, "mean")),
)
RANK_STEPS = Panel(
    key="rank_steps",
    title="Step time of the ranks",
    question="Is one rank slower than the others? They all wait for it.",
    unit="s",
    curves=(Curve(_STEPS, "rank {rank}"),),
)
STEP_PANELS = (HOST_STEPS, DEVICE_STEPS, WAITS, LONGEST, RANK_STEPS)
