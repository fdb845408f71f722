"""Panels about the GPUs of a node."""

from __future__ import annotations

from gpuwatch.tools.reports.display import Unit
from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold, columns, detail, stack, stat, table
from gpuwatch_dashboards.query import Query

NO_GPU = "No GPU on this node."
NO_READING = "No GPU of this node reports it."
NOT_REPORTED = "Only GPUs of the Hopper generation and later report this."
ONLY_FULL = "Served with `gpuwatch agent --series full`, for GPUs that report it."
_GPU = 'instance=~"$instance", gpu=~"$gpu"'
_EACH = ("gpu", "UUID")
_MIG = ("instance", "gpu", "GPU_I_ID")
_OWNER = ("gpu", "user", "job_id", "run", "rank", "workload_namespace", "workload_pod", "workload_container")
_GPU_SECONDS = "gpuwatch_gpu_seconds_total"
GPU_STATES = Query(_GPU_SECONDS, by=(*_EACH, "state"), over=Query(_GPU_SECONDS, by=_EACH))
"""Each GPU's shares of time, for the tables of GPUs."""


def _per_gpu(
    key: str, title: str, question: str, unit: Unit, metric: str, empty: str = NO_READING, more: bool = True
) -> Panel:
    """Return the chart of a gauge, with a line for each GPU."""
    return Panel(key, title, question, unit, (Curve(Query(metric, by=_EACH), "GPU {gpu}"),), empty=empty, more=more)


def _traffic(key: str, title: str, question: str, link: str) -> Panel:
    """Return the chart of a link's traffic by GPU, as GPM measures it."""
    received, sent = (Query(f"gpuwatch_gpu_{link}_{way}_bytes_per_second", _EACH) for way in ("receive", "transmit"))
    curves = (Curve(received, "GPU {gpu} received"), Curve(sent, "GPU {gpu} sent"))
    return Panel(key, title, question, "bytes/s", curves, empty=ONLY_FULL, more=True)


GPU: tuple[Panel, ...] = (
    stat(
        "gpu_energy",
        "Energy, kWh",
        "How much energy did the GPUs use in this time range, in kilowatt-hours?",
        "1",
        f"sum(increase(gpuwatch_gpu_energy_joules_total{{{_GPU}}}[$__range])) / 3.6e6",
        empty=NO_READING,
    ),
    stack(
        key="node_gpu_ledger",
        title="GPU $gpu",
        question="Where does this GPU's time go?",
        unit="ratio",
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
    table(
        key="owners",
        title="Who holds the GPUs",
        question="Whose processes are on which GPU?",
        curves=(Curve(promql=f"max by ({', '.join(_OWNER)}) (gpuwatch_gpu_owner_info{{{_GPU}}})"),),
        columns=columns(*_OWNER),
        empty=NO_GPU,
        runbook="GpuAllocatedUnused",
        width=24,
    ),
    stack(
        key="gpu_ledger",
        title="Where the GPUs' time goes",
        question="Do they compute, wait for data, or are they held without work?",
        unit="ratio",
        curves=(Curve(Query(_GPU_SECONDS, by=("state",), over=Query(_GPU_SECONDS)), "{state}"),),
        maximum=1.0,
        empty=NO_GPU,
    ),
    Panel(
        key="gpu_utilization",
        title="GPU utilisation",
        question="For which share of the time is any kernel running? (Presence, not intensity.)",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_gpu_utilization_ratio", by=_EACH), "GPU {gpu}"),),
        maximum=1.0,
        empty=NO_GPU,
    ),
    Panel(
        key="gpu_memory",
        title="GPU memory",
        question="Which share of the GPU's memory is in use?",
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
    _per_gpu(
        "gpu_power", "GPU power", "How hard does the GPU work?", "watts", "gpuwatch_gpu_power_watts", NO_GPU, more=False
    ),
    _per_gpu("gpu_temperature", "GPU temperature", "Is it cooled?", "celsius", "gpuwatch_gpu_temperature_celsius"),
    detail(
        key="gpu_throttled",
        title="Clocks held down",
        question="For which share of the time does the GPU limit its own clock, and for which reason?",
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
    ),
    _per_gpu("gpu_clock", "GPU clock", "At which frequency do its SMs run?", "hertz", "gpuwatch_gpu_sm_clock_hertz"),
    _per_gpu(
        "gpu_sm_active",
        "Multiprocessors busy",
        "Which share of the GPU's multiprocessors is busy? (Intensity, not presence.)",
        "ratio",
        "gpuwatch_gpu_sm_active_ratio",
        NOT_REPORTED,
    ),
    _per_gpu(
        "gpu_tensor",
        "Tensor cores busy",
        "For which share of the time are the tensor cores busy?",
        "ratio",
        "gpuwatch_gpu_tensor_active_ratio",
        NOT_REPORTED,
    ),
    _per_gpu(
        "gpu_dram",
        "Memory bandwidth used",
        "Which share of the GPU's memory bandwidth is used?",
        "ratio",
        "gpuwatch_gpu_dram_bandwidth_ratio",
        NOT_REPORTED,
    ),
    _traffic("gpu_nvlink", "NVLink traffic", "How fast does data come over NVLink?", "nvlink"),
    _traffic("gpu_pcie", "PCIe traffic", "How fast does data come over PCIe?", "pcie"),
    detail(
        key="gpu_nvlink_counted",
        title="NVLink traffic, counted",
        question="How fast does data come over NVLink, where the driver counts it?",
        unit="bytes/s",
        curves=(
            Curve(Query("gpuwatch_gpu_nvlink_receive_bytes_total", _EACH), "GPU {gpu} received"),
            Curve(Query("gpuwatch_gpu_nvlink_transmit_bytes_total", _EACH), "GPU {gpu} sent"),
        ),
        empty=ONLY_FULL,
    ),
    detail(
        key="gpu_link_errors",
        title="Link errors",
        question="Does a GPU's NVLink or PCIe link repeat what it sends?",
        unit="1/s",
        curves=(
            Curve(Query("gpuwatch_gpu_nvlink_errors_total", _EACH), "NVLink, GPU {gpu}"),
            Curve(Query("gpuwatch_gpu_pcie_replays_total", _EACH), "PCIe, GPU {gpu}"),
        ),
        empty="No error was counted.",
    ),
    table(
        key="gpu_mig",
        title="MIG instances",
        question="How much of each MIG instance is used?",
        unit="bytes",
        curves=(
            Curve(promql=f"max by ({', '.join(_MIG)}, GPU_I_PROFILE) (gpuwatch_gpu_mig_info{{{_GPU}}})"),
            Curve(
                promql=f"max by ({', '.join(_MIG)}) (gpuwatch_gpu_mig_memory_used_bytes{{{_GPU}}})",
                legend="Memory used",
            ),
            Curve(
                promql=f"max by ({', '.join(_MIG)}) (gpuwatch_gpu_mig_memory_total_bytes{{{_GPU}}})", legend="Memory"
            ),
            Curve(
                promql=f"max by ({', '.join(_MIG)}) (gpuwatch_gpu_mig_sm_active_ratio{{{_GPU}}})",
                legend="Multiprocessors busy",
                unit="ratio",
            ),
        ),
        columns=columns(*_MIG, "GPU_I_PROFILE"),
        empty="No GPU is split into MIG instances.",
        width=12,
    ),
    Panel(
        key="gpu_ecc",
        title="Memory errors",
        question="How many ECC errors has the GPU's memory had since the driver was loaded?",
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
    table(
        key="gpu_xid",
        title="XID errors",
        question="Which fault did the driver report last, and when?",
        curves=(
            Curve(promql=f"max by (instance, gpu, UUID) (gpuwatch_gpu_last_xid{{{_GPU}}})", legend="XID"),
            Curve(
                promql=f"time() - max by (instance, gpu, UUID) (gpuwatch_gpu_last_xid_timestamp_seconds{{{_GPU}}})",
                legend="Ago",
                unit="s",
            ),
            Curve(
                promql=f"max by (instance, gpu, UUID) (gpuwatch_gpu_xid_errors_total{{{_GPU}}})",
                legend="Since the agent's start",
            ),
        ),
        columns=columns("instance", "gpu", "UUID"),
        empty="No XID since the agents started.",
        runbook="GpuXid",
        width=16,
    ),
)
