"""Panels about the GPUs of a node."""

from __future__ import annotations

from gpuwatch.tools.reports.display import Unit
from gpuwatch_dashboards.panels.panel import Column, Curve, Panel, Threshold
from gpuwatch_dashboards.query.evaluate import Query

NO_GPU = "No GPU on this node."
NO_READING = "No GPU of this node reports it."
NOT_REPORTED = "Only GPUs of Hopper and later report this."
_GPU_SECONDS = "gpuwatch_gpu_seconds_total"
_GPU = 'instance=~"$instance", gpu=~"$gpu"'
_EACH = ("gpu", "UUID")


def _gauge(key: str, title: str, question: str, unit: Unit, metric: str, empty: str = NO_READING) -> Panel:
    """Return a gauge's chart with a line for each GPU."""
    return Panel(key, title, question, unit, (Curve(Query(metric, by=_EACH), "GPU {gpu}"),), empty=empty, more=True)


GPU: tuple[Panel, ...] = (
    Panel(
        key="node_gpu_ledger",
        title="GPU $gpu",
        question="Where does this GPU's time go?",
        unit="ratio",
        kind="stack",
        curves=(
            Curve(
                promql=f"sum by (state) (rate({_GPU_SECONDS}{{{_GPU}}}[$__rate_interval]))\n/ on () group_left ()\n"
                f"(sum(rate({_GPU_SECONDS}{{{_GPU}}}[$__rate_interval])) > 0)",
                legend="{state}",
            ),
        ),
        maximum=1.0,
        empty=NO_GPU,
        repeat="gpu",
        width=24,
    ),
    Panel(
        key="owners",
        title="Who holds the GPUs",
        question="Whose processes are on which GPU?",
        unit="1",
        kind="table",
        curves=(
            Curve(
                promql="max by (gpu, run, rank, user, job_id, workload_namespace, workload_pod, workload_container) "
                f"(gpuwatch_gpu_owner_info{{{_GPU}}})"
            ),
        ),
        columns=(
            Column("gpu", "GPU"),
            Column("user", "User", "user"),
            Column("job_id", "Job", "job"),
            Column("run", "Run", "run"),
            Column("rank", "Rank"),
            Column("workload_namespace", "Namespace"),
            Column("workload_pod", "Pod"),
            Column("workload_container", "Container"),
        ),
        empty=NO_GPU,
        runbook="GpuAllocatedUnused",
        width=24,
    ),
    Panel(
        key="gpu_ledger",
        title="Where the GPUs' time goes",
        question="Do they compute, wait for data, or are they held without work?",
        unit="ratio",
        kind="stack",
        curves=(Curve(Query(_GPU_SECONDS, by=("state",), over=Query(_GPU_SECONDS)), "{state}"),),
        maximum=1.0,
        empty=NO_GPU,
    ),
    Panel(
        key="gpu_utilization",
        title="GPU utilisation",
        question="Does some kernel run? (Presence, not intensity.)",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_gpu_utilization_ratio", by=_EACH), "GPU {gpu}"),),
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
                Query("gpuwatch_gpu_memory_used_bytes", _EACH, over=Query("gpuwatch_gpu_memory_total_bytes", _EACH)),
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
        curves=(Curve(Query("gpuwatch_gpu_power_watts", by=_EACH), "GPU {gpu}"),),
        empty=NO_GPU,
    ),
    _gauge("gpu_temperature", "GPU temperature", "Is it cooled?", "celsius", "gpuwatch_gpu_temperature_celsius"),
    Panel(
        key="gpu_throttled",
        title="Clocks held down",
        question="For which reason does a GPU run slower than it could? (Share of the time.)",
        unit="ratio",
        curves=(
            Curve(
                Query("gpuwatch_gpu_throttled", by=(*_EACH, "reason")),
                "GPU {gpu} {reason}",
                f"avg_over_time(gpuwatch_gpu_throttled{{{_GPU}}}[$__rate_interval])",
            ),
        ),
        thresholds=(Threshold("throttled_share"),),
        empty=NO_READING,
        runbook="GpuThrottled",
        more=True,
    ),
    _gauge("gpu_clock", "GPU clock", "How fast does it run?", "hertz", "gpuwatch_gpu_sm_clock_hertz"),
    _gauge(
        "gpu_sm_active",
        "Multiprocessors busy",
        "How much of the GPU is at work? (Intensity, not presence.)",
        "ratio",
        "gpuwatch_gpu_sm_active_ratio",
        NOT_REPORTED,
    ),
    _gauge(
        "gpu_tensor",
        "Tensor cores busy",
        "For which share of the time do the tensor cores work?",
        "ratio",
        "gpuwatch_gpu_tensor_active_ratio",
        NOT_REPORTED,
    ),
    _gauge(
        "gpu_dram",
        "Memory bandwidth used",
        "Is the GPU's memory the limit?",
        "ratio",
        "gpuwatch_gpu_dram_bandwidth_ratio",
        NOT_REPORTED,
    ),
    Panel(
        key="gpu_ecc",
        title="Memory errors",
        question="Does the GPU's memory fail?",
        unit="1",
        curves=(
            Curve(
                promql=f"sum by (instance, gpu, kind) (gpuwatch_gpu_ecc_errors_total{{{_GPU}}})",
                legend="GPU {gpu} {kind} · {instance}",
            ),
        ),
        empty="None since the driver was loaded.",
        runbook="GpuXid",
    ),
    Panel(
        key="gpu_xid",
        title="XID errors",
        question="Which fault did the driver report last, and when?",
        unit="1",
        kind="table",
        curves=(
            Curve(promql=f"max by (instance, gpu, UUID) (gpuwatch_gpu_last_xid{{{_GPU}}})", legend="XID"),
            Curve(
                promql=f"time() - max by (instance, gpu, UUID) (gpuwatch_gpu_last_xid_timestamp_seconds{{{_GPU}}})",
                legend="Ago",
                unit="s",
            ),
        ),
        columns=(Column("instance", "Node"), Column("gpu", "GPU"), Column("UUID", "UUID")),
        empty="No XID since the agents started.",
        runbook="GpuXid",
        width=16,
    ),
)
