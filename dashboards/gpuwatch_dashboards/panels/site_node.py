"""Panels about one node for Grafana, beside those that every page has (gpu.py, node.py)."""

from __future__ import annotations

from gpuwatch_dashboards.panels.gpu import NO_GPU
from gpuwatch_dashboards.panels.panel import Threshold
from gpuwatch_dashboards.panels.site_panel import Column, Shape, SiteCurve, SitePanel, SiteUnit

_NODE = 'instance=~"$instance"'
_GPU = f'{_NODE}, gpu=~"$gpu"'
_LEGEND = "GPU {gpu} · {instance}"


def _number(
    key: str, title: str, question: str, unit: SiteUnit, expr: str, warning: float | None = None, runbook: str = ""
) -> SitePanel:
    limits = () if warning is None else (Threshold(warning, "warning"),)
    return SitePanel(key, title, question, unit, "number", (SiteCurve(expr),), thresholds=limits, runbook=runbook)


def _gpu(
    key: str, title: str, question: str, unit: SiteUnit, expr: str, legend: str = _LEGEND, **more: str
) -> SitePanel:
    shape: Shape = "lines"
    return SitePanel(key, title, question, unit, shape, (SiteCurve(expr, legend),), **{"empty": NO_GPU, **more})  # type: ignore[arg-type]


NODE_NOW: tuple[SitePanel, ...] = (
    _number("seen", "GPUs", "How many GPUs does the driver list?", "1", f"sum(gpuwatch_gpus_seen{{{_NODE}}})"),
    _number(
        "missing",
        "GPUs missing",
        "How many were there and are gone?",
        "1",
        f"sum(gpuwatch_gpus_expected{{{_NODE}}} - gpuwatch_gpus_seen{{{_NODE}}})",
        1.0,
        "GpuLost",
    ),
    _number(
        "node_lost",
        "GPUs lost",
        "How many GPUs' worth of time is starved, idle or stalled?",
        "1",
        f'sum(node_kind:gpuwatch_gpu_seconds:rate5m{{kind=~"starved|idle|stalled", {_NODE}}})',
        1.0,
        "GpuHeldIdle",
    ),
    _number(
        "node_shm",
        "/dev/shm used",
        "Is there room for the batches that workers hand over?",
        "ratio",
        f"max(gpuwatch_shm_used_bytes{{{_NODE}}} / (gpuwatch_shm_size_bytes{{{_NODE}}} > 0))",
        0.9,
        "ShmNearlyFull",
    ),
    _number(
        "node_memory",
        "Memory used",
        "Is the node near its limit?",
        "ratio",
        f"max(1 - gpuwatch_memory_available_bytes{{{_NODE}}} / (gpuwatch_memory_total_bytes{{{_NODE}}} > 0))",
        0.95,
    ),
    _number(
        "sample_age",
        "Age of the sample",
        "Does the agent still look? (Seconds since its last sample.)",
        "s",
        f"max(time() - gpuwatch_sample_timestamp_seconds{{{_NODE}}})",
        120.0,
        "GpuwatchAgentDown",
    ),
)

NODE_LEDGER = SitePanel(
    key="node_gpu_ledger",
    title="GPU $gpu",
    question="Where does this GPU's time go?",
    unit="ratio",
    shape="stack",
    curves=(
        SiteCurve(
            f"sum by (state) (rate(gpuwatch_gpu_seconds_total{{{_GPU}}}[$__rate_interval]))\n/ on () group_left ()\n"
            f"(sum(rate(gpuwatch_gpu_seconds_total{{{_GPU}}}[$__rate_interval])) > 0)",
            "{state}",
        ),
    ),
    maximum=1.0,
    empty=NO_GPU,
    repeat="gpu",
)

NODE_GPUS: tuple[SitePanel, ...] = (
    SitePanel(
        key="owners",
        title="Who holds the GPUs",
        question="Whose processes are on which GPU?",
        unit="1",
        shape="table",
        curves=(
            SiteCurve(
                "max by (gpu, run, rank, user, job_id, workload_namespace, workload_pod, workload_container) "
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
    ),
)

NODE_HARDWARE: tuple[SitePanel, ...] = (
    _gpu(
        "gpu_temperature", "GPU temperature", "Is it cooled?", "celsius", f"gpuwatch_gpu_temperature_celsius{{{_GPU}}}"
    ),
    _gpu(
        "gpu_throttled",
        "Clocks held down",
        "For which reason does a GPU run slower than it could? (Share of the time.)",
        "ratio",
        f"avg_over_time(gpuwatch_gpu_throttled{{{_GPU}}}[$__rate_interval])",
        "GPU {gpu} {reason} · {instance}",
        runbook="GpuThrottled",
    ),
    _gpu("gpu_clock", "GPU clock", "How fast does it run?", "hertz", f"gpuwatch_gpu_sm_clock_hertz{{{_GPU}}}"),
    _gpu(
        "gpu_sm_active",
        "Multiprocessors busy",
        "How much of the GPU is at work? (Intensity, not presence.)",
        "ratio",
        f"gpuwatch_gpu_sm_active_ratio{{{_GPU}}}",
        empty="GPUs of Hopper and later say this.",
    ),
    _gpu(
        "gpu_tensor",
        "Tensor cores busy",
        "For which share of the time do the tensor cores work?",
        "ratio",
        f"gpuwatch_gpu_tensor_active_ratio{{{_GPU}}}",
        empty="GPUs of Hopper and later say this.",
    ),
    _gpu(
        "gpu_dram",
        "Memory bandwidth used",
        "Is the GPU's memory the limit?",
        "ratio",
        f"gpuwatch_gpu_dram_bandwidth_ratio{{{_GPU}}}",
        empty="GPUs of Hopper and later say this.",
    ),
    SitePanel(
        key="gpu_xid",
        title="XID errors",
        question="Which fault did the driver report last, and when?",
        unit="1",
        shape="table",
        curves=(
            SiteCurve(f"max by (instance, gpu, UUID) (gpuwatch_gpu_last_xid{{{_GPU}}})", "XID"),
            SiteCurve(
                f"time() - max by (instance, gpu, UUID) (gpuwatch_gpu_last_xid_timestamp_seconds{{{_GPU}}})", "Ago", "s"
            ),
        ),
        columns=(Column("instance", "Node"), Column("gpu", "GPU"), Column("UUID", "UUID")),
        empty="No XID since the agents started.",
        runbook="GpuXid",
    ),
    _gpu(
        "gpu_ecc",
        "Memory errors",
        "Does the GPU's memory fail?",
        "1",
        f"sum by (instance, gpu, kind) (gpuwatch_gpu_ecc_errors_total{{{_GPU}}})",
        "GPU {gpu} {kind} · {instance}",
        empty="None since the driver was loaded.",
        runbook="GpuXid",
    ),
)

NODE_RUNS: tuple[SitePanel, ...] = (
    SitePanel(
        key="node_runs",
        title="Runs on the node",
        question="What trains here, and does it wait for data?",
        unit="1",
        shape="table",
        curves=(
            SiteCurve(
                f"max by (run, rank, name, user, job_id) (gpuwatch_run_info{{{_NODE}}})\n* on (run, rank) group_left ()\n"
                f"max by (run, rank) (gpuwatch_run_up{{{_NODE}}})",
                "Status",
                "up",
            ),
            SiteCurve(
                f"sum by (run, rank) (rate(gpuwatch_steps_total{{{_NODE}}}[$__rate_interval]))", "Steps/s", "1/s"
            ),
            SiteCurve(
                "max by (run, rank) (run_rank_state:gpuwatch_run_training_seconds:share5m"
                f'{{state="input_wait", {_NODE}}})',
                "Input wait",
                "ratio",
            ),
        ),
        columns=(
            Column("run", "Run", "run"),
            Column("rank", "Rank"),
            Column("name", "Name"),
            Column("user", "User", "user"),
            Column("job_id", "Job", "job"),
        ),
        empty="Nothing trains here with a hook.",
    ),
)

NODE_MORE: tuple[SitePanel, ...] = (
    SitePanel(
        key="memory",
        title="Memory",
        question="How much memory is left?",
        unit="bytes",
        shape="lines",
        curves=(
            SiteCurve(f"gpuwatch_memory_available_bytes{{{_NODE}}}", "available · {instance}"),
            SiteCurve(f"gpuwatch_memory_total_bytes{{{_NODE}}}", "in all · {instance}"),
        ),
    ),
)
