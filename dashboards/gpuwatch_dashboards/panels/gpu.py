"""Panels about the GPUs of a node."""

from gpuwatch_dashboards.panels.panel import Curve, Panel, detail, line, stack, stat, table
from gpuwatch_dashboards.query import Query

NO_GPU = "No GPU on this node."
NO_READING = "No GPU on this node reports this value."
NOT_REPORTED = "Only GPUs of the Hopper generation and later report this value."
ONLY_FULL = "Not reported by any GPU, or not exported to Prometheus (start the agents with `--series full`)."
_GPU = 'instance=~"$instance", gpu=~"$gpu"'
_EACH = ("gpu", "UUID")
_MIG = ("instance", "gpu", "UUID", "GPU_I_ID", "GPU_I_PROFILE")
_XID = ("instance", "gpu", "UUID")
_OWNER = ("gpu", "user", "job_id", "run", "rank", "workload_namespace", "workload_pod", "workload_container")
_GPU_SECONDS = "gpuwatch_gpu_seconds_total"
GPU_STATES = Query(_GPU_SECONDS, by=(*_EACH, "state"), over=Query(_GPU_SECONDS, by=_EACH))
"""Each GPU's shares of time, for the tables of GPUs."""

_GPM = (
    ("gpu_sm_active", "SMs busy", "What share of the GPU's SMs is busy?", "sm_active"),
    ("gpu_tensor", "Tensor cores busy", "For what share of the time are the tensor cores busy?", "tensor_active"),
    ("gpu_dram", "Memory bandwidth used", "What share of the GPU's memory bandwidth is in use?", "dram_bandwidth"),
)


def _per_gpu(key: str, title: str, question: str, metric: str, empty: str = NO_READING) -> Panel:
    return detail(key, title, empty=empty).asks(question, line("GPU {gpu}", metric))


def _traffic(key: str, title: str, source: str, metric: str) -> Panel:
    """Return the chart of a link's traffic by GPU; `metric` has the place of "receive" or "transmit"."""
    received, sent = (f"gpuwatch_gpu_{metric.format(way)}" for way in ("receive", "transmit"))
    lines = line("GPU {gpu} received", received), line("GPU {gpu} sent", sent)
    question = f"How much data does each GPU receive and send over {title.split()[0]}, {source}?"
    return detail(f"gpu_{key}", title, empty=ONLY_FULL).asks(question, *lines)


def _greatest(metric: str, labels: tuple[str, ...]) -> str:
    return f"max by ({', '.join(labels)}) ({metric}{{{_GPU}}})"


GPU: tuple[Panel, ...] = (
    stat("gpu_energy", "Energy, kWh", empty=NO_READING).asks(
        "How much energy did the GPUs use in this time range, in kilowatt-hours?",
        f"sum(increase(gpuwatch_gpu_energy_joules_total{{{_GPU}}}[$__range])) / 3.6e6",
    ),
    stack("node_gpu_ledger", "GPU $gpu", "ratio", maximum=1.0, empty=NO_GPU, repeat="gpu", width=24).asks(
        "How is this GPU's time divided among states?",
        Curve(
            "{state}",
            f"sum by (state) (rate({_GPU_SECONDS}{{{_GPU}}}[$__rate_interval]))\n/ on () group_left ()\n"
            f"(sum(rate({_GPU_SECONDS}{{{_GPU}}}[$__rate_interval])) > 0)",
        ),
    ),
    table("owners", "Who holds the GPUs", columns=_OWNER, empty=NO_GPU, runbook="GpuAllocatedUnused", width=24).asks(
        "Who holds each GPU: which user, job, run or pod?", _greatest("gpuwatch_gpu_owner_info", _OWNER)
    ),
    detail("gpu_shared", "Shared GPUs", empty="No GPU of this node is shared by several owners.").asks(
        "How is the time of shared GPUs (time-slicing, MPS) divided among their owners?",
        line("GPU {gpu} {user} {job_id}", "gpuwatch_gpu_shared_seconds_total"),
    ),
    stack("gpu_ledger", "Where the GPUs' time goes", maximum=1.0, empty=NO_READING).asks(
        "Do the GPUs compute, wait for data, or idle?", line("{state}", _GPU_SECONDS, _GPU_SECONDS)
    ),
    Panel("gpu_utilization", "GPU utilisation", maximum=1.0, empty=NO_READING).asks(
        "For what share of the time does at least one kernel run? (100% does not mean that the whole GPU is used.)",
        line("GPU {gpu}", "gpuwatch_gpu_utilization_ratio"),
    ),
    Panel("gpu_memory", "GPU memory", maximum=1.0, empty=NO_READING).asks(
        "What share of the GPU's memory is in use?",
        line("GPU {gpu}", "gpuwatch_gpu_memory_used_bytes", "gpuwatch_gpu_memory_total_bytes"),
    ),
    Panel("gpu_power", "GPU power", empty=NO_READING).asks(
        "How much power does each GPU draw?", line("GPU {gpu}", "gpuwatch_gpu_power_watts")
    ),
    stack("gpu_energy_kind", "Power by use", more=True, empty=NO_READING).asks(
        "How much of the GPUs' power is used while they work, wait and idle?",
        line("power {kind}", "gpuwatch_gpu_energy_joules_total"),
    ),
    _per_gpu("gpu_temperature", "GPU temperature", "How hot is each GPU?", "gpuwatch_gpu_temperature_celsius"),
    detail(
        "gpu_throttled",
        "Throttling",
        "ratio",
        warning="throttled_share",
        empty="Never since the agent's start, or not reported.",
        runbook="GpuThrottled",
    ).asks(
        "For what share of the time are the GPU's clocks throttled, and for which reason?",
        line(
            "GPU {gpu} {reason}",
            "gpuwatch_gpu_throttled",
            promql=f"avg_over_time(gpuwatch_gpu_throttled{{{_GPU}}}[$__rate_interval])",
        ),
    ),
    _per_gpu("gpu_clock", "GPU clock", "How fast is each GPU's SM clock?", "gpuwatch_gpu_sm_clock_hertz", ONLY_FULL),
    *(
        _per_gpu(key, title, question, f"gpuwatch_gpu_{what}_ratio", NOT_REPORTED)
        for key, title, question, what in _GPM
    ),
    _traffic("nvlink", "NVLink traffic", "by GPM's rates", "nvlink_{}_bytes_per_second"),
    _traffic("pcie", "PCIe traffic", "by GPM's rates", "pcie_{}_bytes_per_second"),
    _traffic("nvlink_counted", "NVLink traffic, counted", "by the driver's byte counters", "nvlink_{}_bytes_total"),
    detail("gpu_link_errors", "Link errors", empty="No error was counted.").asks(
        "Are there NVLink errors or PCIe replays?",
        line("NVLink, GPU {gpu}", "gpuwatch_gpu_nvlink_errors_total"),
        line("PCIe, GPU {gpu}", "gpuwatch_gpu_pcie_replays_total"),
    ),
    table(
        "gpu_mig", "MIG instances", "ratio", columns=_MIG, empty="No GPU is split into MIG instances.", width=12
    ).asks(
        "How large is each MIG instance, and for what share of the time are its engines busy? A row without an "
        "instance is the unpartitioned remainder.",
        Curve("Share of the GPU", _greatest("gpuwatch_gpu_mig_ratio", _MIG)),
        Curve("Engines busy", _greatest("gpuwatch_gpu_engine_active_ratio", _XID)),
    ),
    Panel("gpu_ecc", "Memory errors", empty="None since the driver was loaded.", runbook="GpuXid").asks(
        "How many ECC errors has each GPU's memory had since its driver was loaded?",
        Curve(
            "GPU {gpu} {kind} · {instance}", f"sum by (instance, gpu, kind) (gpuwatch_gpu_ecc_errors_total{{{_GPU}}})"
        ),
    ),
    table(
        "gpu_xid", "XID errors", columns=_XID, empty="No XID since the agents started.", runbook="GpuXid", width=16
    ).asks(
        "Which XID did the driver report last for each GPU, and when?",
        Curve("XID", _greatest("gpuwatch_gpu_last_xid", _XID)),
        Curve("Ago", f"time() - {_greatest('gpuwatch_gpu_last_xid_timestamp_seconds', _XID)}", "s"),
        Curve("Since the agent's start", _greatest("gpuwatch_gpu_xid_errors_total", _XID)),
    ),
)
