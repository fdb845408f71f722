"""Panels about the GPUs of a node."""

from __future__ import annotations

from gpuwatch_dashboards.panels.panel import Curve, Panel
from gpuwatch_dashboards.query import Query

NO_GPU = "No GPU on this node."

_GPU_SECONDS = "gpuwatch_gpu_seconds_total"

GPU_PANELS: tuple[Panel, ...] = (
    Panel(
        key="gpu_ledger",
        title="Where the GPUs' time goes",
        question="Do they compute, wait for data, or are they held without work?",
        unit="ratio",
        curves=(Curve(Query(_GPU_SECONDS, by=("state",), over=Query(_GPU_SECONDS)), "{state}"),),
        stacked=True,
        maximum=1.0,
        empty=NO_GPU,
    ),
    Panel(
        key="gpu_utilization",
        title="GPU utilisation",
        question="Does some kernel run? (Presence, not intensity.)",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_gpu_utilization_ratio", by=("gpu", "UUID")), "GPU {gpu}"),),
        maximum=1.0,
        empty=NO_GPU,
    ),
    Panel(
        key="gpu_memory",
        title="GPU memory",
        question="How much of the GPU's memory is in use?",
        unit="ratio",
        curves=(
            Curve(
                Query(
                    "gpuwatch_gpu_memory_used_bytes",
                    by=("gpu", "UUID"),
                    over=Query("gpuwatch_gpu_memory_total_bytes", by=("gpu", "UUID")),
                ),
                "GPU {gpu}",
            ),
        ),
        maximum=1.0,
        empty=NO_GPU,
    ),
    Panel(
        key="gpu_power",
        title="GPU power",
        question="How hard does the GPU really work?",
        unit="watts",
        curves=(Curve(Query("gpuwatch_gpu_power_watts", by=("gpu", "UUID")), "GPU {gpu}"),),
        empty=NO_GPU,
    ),
)
