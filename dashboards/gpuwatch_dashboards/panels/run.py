"""Panels about a training run."""

from __future__ import annotations

from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold
from gpuwatch_dashboards.query import Query

_RUN_SECONDS = "gpuwatch_run_seconds_total"

RUN_PANELS: tuple[Panel, ...] = (
    Panel(
        key="ledger",
        title="Where the time goes",
        question="Which share of the wall clock goes to computing, and which to waiting?",
        unit="ratio",
        curves=(Curve(Query(_RUN_SECONDS, by=("state",), over=Query(_RUN_SECONDS)), "{state}"),),
        stacked=True,
        maximum=1.0,
        empty="The first second of this run has not been counted yet.",
    ),
    Panel(
        key="step_time",
        title="Step time",
        question="How long is one step, and what makes it long? The mean by phase; lines: half (p50) and 95% of a minute's steps are shorter.",
        unit="s",
        curves=(
            Curve(
                Query("gpuwatch_step_phase_seconds_total", by=("phase",), over=Query("gpuwatch_steps_total")), "{phase}"
            ),
            Curve(
                Query("gpuwatch_step_percentile_seconds", by=("percentile",), greatest=True),
                "{percentile}",
                over_stack=True,
            ),
        ),
        stacked=True,
        empty="No step has ended in this time range.",
    ),
    Panel(
        key="throughput",
        title="Throughput",
        question="How many steps does training take in a second?",
        unit="1/s",
        curves=(Curve(Query("gpuwatch_steps_total", by=("rank",)), "steps, rank {rank}"),),
        empty="No step has ended in this time range.",
    ),
    Panel(
        key="loader_workers",
        title="Loader workers",
        question="Are the loader's workers at the limit of a core?",
        unit="ratio",
        curves=(
            Curve(
                Query("gpuwatch_loader_worker_cpu_seconds_total", over=Query("gpuwatch_loader_workers")),
                "CPU of a worker (mean)",
            ),
        ),
        maximum=1.0,
        thresholds=(Threshold(0.9, "warning"),),
        empty="No loader workers: batches are made in the training process.",
    ),
    Panel(
        key="findings",
        title="Findings",
        question="Which causes are active, and what share of time does each concern?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_finding_evidence_ratio", by=("cause",)), "{cause}"),),
        maximum=1.0,
        empty="Nothing found.",
    ),
)
