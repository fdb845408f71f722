"""Panels about a node, its GPUs and its agent."""

from __future__ import annotations

from gpuwatch.tools.reports.display import Unit
from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold, alerts, columns, stat
from gpuwatch_dashboards.query import Match, Query

NO_GPU = "No GPU on this node."
NO_READING = "No GPU of this node reports it."
NOT_REPORTED = "Only GPUs of the Hopper generation and later report this."
LOST = "starved|idle|stalled"
"""Kinds of GPU time that is paid for and not used."""
_NODE = 'instance=~"$instance"'
_GPU = f'{_NODE}, gpu=~"$gpu"'
_EACH = ("gpu", "UUID")
_OWNER = ("gpu", "user", "job_id", "run", "rank", "workload_namespace", "workload_pod", "workload_container")
_GPU_SECONDS, _CPU = "gpuwatch_gpu_seconds_total", "gpuwatch_cpu_seconds_total"
_SHM_USED, _SHM_SIZE = "gpuwatch_shm_used_bytes", "gpuwatch_shm_size_bytes"
GPU_STATES = Query(_GPU_SECONDS, by=(*_EACH, "state"), over=Query(_GPU_SECONDS, by=_EACH))
"""Each GPU's shares of time, for the tables of GPUs."""
_REAL_INTERFACES = (Match("device", "!~", "lo|veth.*|docker.*|br-.*|cni.*|flannel.*|cali.*"),)
_REAL_DISKS = (Match("device", "!~", "(loop|ram|zram|sr|md|dm-).*"),)


def _per_gpu(
    key: str, title: str, question: str, unit: Unit, metric: str, empty: str = NO_READING, more: bool = True
) -> Panel:
    """Return the chart of a gauge, with a line for each GPU."""
    return Panel(key, title, question, unit, (Curve(Query(metric, by=_EACH), "GPU {gpu}"),), empty=empty, more=more)


NODE: tuple[Panel, ...] = (
    stat("seen", "GPUs", "How many GPUs does the driver list?", "1", Curve(Query("gpuwatch_gpus_seen"))),
    stat(
        "missing",
        "GPUs missing",
        "How many GPUs has the driver listed before and lists no longer?",
        "1",
        f"sum(gpuwatch_gpus_expected{{{_NODE}}} - gpuwatch_gpus_seen{{{_NODE}}})",
        "missing",
        runbook="GpuLost",
    ),
    stat(
        "without_hook",
        "Processes without a hook",
        "How many processes on this node's GPUs does gpuwatch not see inside of? Their user may lack the socket's group.",
        "1",
        Curve(Query("gpuwatch_processes_without_hook")),
    ),
    stat(
        "node_lost",
        "GPUs lost",
        "How much GPU time is starved, held idle or stalled now, as a number of GPUs?",
        "1",
        f'sum(node_kind:gpuwatch_gpu_seconds:rate5m{{kind=~"{LOST}", {_NODE}}})',
        "lost_gpus",
        runbook="GpuHeldIdle",
    ),
    stat(
        "node_shm",
        "/dev/shm used",
        "Is there room for the batches of the loader's workers?",
        "ratio",
        Curve(
            Query(_SHM_USED, by=("mount",), over=Query(_SHM_SIZE, by=("mount",))),
            promql=f"max({_SHM_USED}{{{_NODE}}} / ({_SHM_SIZE}{{{_NODE}}} > 0))",
        ),
        "shm_used",
        runbook="ShmNearlyFull",
    ),
    stat(
        "node_memory",
        "Memory used",
        "Is the node near its limit?",
        "ratio",
        f"max(1 - gpuwatch_memory_available_bytes{{{_NODE}}} / (gpuwatch_memory_total_bytes{{{_NODE}}} > 0))",
        "memory_used",
    ),
    stat(
        "sample_age",
        "Age of the last sample",
        "Is the agent still sampling? Seconds since its last sample.",
        "s",
        f"max(time() - gpuwatch_sample_timestamp_seconds{{{_NODE}}})",
        "sample_age_s",
        runbook="GpuwatchAgentDown",
    ),
    Panel(
        key="node_runs",
        title="Runs on the node",
        question="Which runs train here, and do they wait for data?",
        unit="1",
        kind="table",
        curves=(
            Curve(
                promql=f"max by (run, rank, name, user, job_id) (gpuwatch_run_info{{{_NODE}}})\n"
                f"* on (run, rank) group_left ()\nmax by (run, rank) (gpuwatch_run_up{{{_NODE}}})",
                legend="Running",
                unit="up",
            ),
            Curve(
                promql=f"sum by (run, rank) (rate(gpuwatch_steps_total{{{_NODE}}}[$__rate_interval]))",
                legend="Steps/s",
                unit="1/s",
            ),
            Curve(
                promql="max by (run, rank) (run_rank_state:gpuwatch_run_training_seconds:share5m"
                f'{{state="input_wait", {_NODE}}})',
                legend="Input wait",
                unit="ratio",
            ),
        ),
        columns=columns("run", "rank", "name", "user", "job_id"),
        empty="No run that uses gpuwatch is training here.",
        width=15,
    ),
    alerts("node_alerts", _NODE, "run", "gpu"),
    Panel(
        key="cpu",
        title="CPU",
        question="Are there cores left to prepare data with? Share of all cores.",
        unit="ratio",
        curves=(
            Curve(Query(_CPU, where=(Match("mode", "!~", "idle|iowait"),), over=Query(_CPU)), "busy, of all cores"),
            Curve(Query(_CPU, where=(Match("mode", "=", "iowait"),), over=Query(_CPU)), "idle, waiting for I/O"),
        ),
        maximum=1.0,
        thresholds=(Threshold("cores_exhausted"),),
    ),
    Panel(
        key="pressure",
        title="Pressure",
        question="For which share of the time does some task wait for CPU, I/O or memory?",
        unit="ratio",
        curves=(
            Curve(Query("gpuwatch_pressure_cpu_waiting_seconds_total"), "CPU"),
            Curve(Query("gpuwatch_pressure_io_waiting_seconds_total"), "I/O"),
            Curve(Query("gpuwatch_pressure_memory_waiting_seconds_total"), "memory"),
        ),
        empty="This kernel does not report pressure.",
    ),
    Panel(
        key="shm",
        title="/dev/shm",
        question="Is there room for the batches of the loader's workers?",
        unit="bytes",
        curves=(
            Curve(Query(_SHM_USED, by=("mount",)), "used ({mount})"),
            Curve(Query(_SHM_SIZE, by=("mount",)), "size ({mount})", dashed=True),
        ),
        empty="/dev/shm is not mounted on this node.",
    ),
    Panel(
        key="network",
        title="Network",
        question="Does data come over the network, and how fast?",
        unit="bytes/s",
        curves=(
            Curve(Query("gpuwatch_network_receive_bytes_total", where=_REAL_INTERFACES), "received"),
            Curve(Query("gpuwatch_network_transmit_bytes_total", where=_REAL_INTERFACES), "sent"),
        ),
    ),
    Panel(
        key="disk",
        title="Disk",
        question="Does data come from a disk, and how fast?",
        unit="bytes/s",
        curves=(
            Curve(Query("gpuwatch_disk_read_bytes_total", where=_REAL_DISKS), "read"),
            Curve(Query("gpuwatch_disk_written_bytes_total", where=_REAL_DISKS), "written"),
        ),
    ),
    Panel(
        key="memory",
        title="Memory",
        question="How much memory is left?",
        unit="bytes",
        curves=(
            Curve(Query("gpuwatch_memory_available_bytes"), "available"),
            Curve(Query("gpuwatch_memory_total_bytes"), "total", dashed=True),
        ),
        more=True,
    ),
)

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
        curves=(Curve(promql=f"max by ({', '.join(_OWNER)}) (gpuwatch_gpu_owner_info{{{_GPU}}})"),),
        columns=columns(*_OWNER),
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
    Panel(
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
        more=True,
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
        columns=columns("instance", "gpu", "UUID"),
        empty="No XID since the agents started.",
        runbook="GpuXid",
        width=16,
    ),
)

AGENT: tuple[Panel, ...] = (
    Panel(
        key="collectors",
        title="Collectors",
        question="Did each collector's last run succeed, and how long did it take?",
        unit="s",
        kind="table",
        curves=(
            Curve(
                promql=f"min by (instance, collector) (gpuwatch_collector_success{{{_NODE}}})",
                legend="Success",
                unit="up",
            ),
            Curve(
                promql=f"max by (instance, collector) (gpuwatch_collector_duration_seconds{{{_NODE}}})",
                legend="Duration",
            ),
        ),
        columns=columns("instance", "collector"),
        sort="Duration",
    ),
    Panel(
        key="agent_cost",
        title="CPU of the agent",
        question="Which share of one core does the agent use?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_agent_cpu_seconds_total"), "CPU"),),
        more=True,
    ),
    Panel(
        key="agent_memory",
        title="Memory and history of the agent",
        question="Do the agent's memory and its history file grow?",
        unit="bytes",
        curves=(
            Curve(Query("gpuwatch_agent_resident_memory_bytes"), "memory"),
            Curve(Query("gpuwatch_history_bytes"), "history"),
        ),
        more=True,
    ),
)
