"""Panels about a node, its GPUs and its agent."""

from __future__ import annotations

from gpuwatch.tools.reports.display import Unit
from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold, alerts, columns, stat
from gpuwatch_dashboards.query import Match, Query

NO_GPU = "No GPU on this node."
NO_READING = "No GPU of this node reports it."
NOT_REPORTED = "Only GPUs of the Hopper generation and later report this."
ONLY_FULL = "Served with `gpuwatch agent --series full`, for GPUs that report it."
LOST = "starved|idle|stalled"
"""Kinds of GPU time that is paid for and not used."""
_NODE = 'instance=~"$instance"'
_GPU = f'{_NODE}, gpu=~"$gpu"'
_EACH = ("gpu", "UUID")
_MIG = ("instance", "gpu", "GPU_I_ID")
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


def _traffic(key: str, title: str, question: str, link: str) -> Panel:
    """Return the chart of a link's traffic by GPU, as GPM measures it."""
    received, sent = (Query(f"gpuwatch_gpu_{link}_{way}_bytes_per_second", _EACH) for way in ("receive", "transmit"))
    curves = (Curve(received, "GPU {gpu} received"), Curve(sent, "GPU {gpu} sent"))
    return Panel(key, title, question, "bytes/s", curves, empty=ONLY_FULL, more=True)


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
        key="infiniband",
        title="InfiniBand",
        question="How fast do data and gradients come over InfiniBand or RoCE?",
        unit="bytes/s",
        curves=(
            Curve(Query("gpuwatch_infiniband_port_data_received_bytes_total"), "received"),
            Curve(Query("gpuwatch_infiniband_port_data_transmitted_bytes_total"), "sent"),
        ),
        empty="No InfiniBand or RoCE port.",
        more=True,
    ),
    Panel(
        key="infiniband_errors",
        title="InfiniBand errors",
        question="Is a link faulty?",
        unit="1/s",
        curves=(
            Curve(
                Query("gpuwatch_infiniband_symbol_errors_total", by=("device", "port")), "symbol errors {device}:{port}"
            ),
            Curve(Query("gpuwatch_infiniband_link_downed_total", by=("device", "port")), "link lost {device}:{port}"),
        ),
        empty="No error was counted.",
        more=True,
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
        key="disk_busy",
        title="Disks busy",
        question="For which share of the time is each disk busy?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_disk_io_time_seconds_total", ("device",), _REAL_DISKS), "{device}"),),
        more=True,
    ),
    Panel(
        key="load",
        title="Load",
        question="Do more tasks want to run than there are cores?",
        unit="1",
        curves=(
            Curve(Query("gpuwatch_load1"), "load of one minute"),
            Curve(Query("gpuwatch_procs_running"), "running or ready"),
            Curve(Query("gpuwatch_cpu_cores"), "cores", dashed=True),
        ),
        more=True,
    ),
    Panel(
        key="pressure_all",
        title="Pressure, all tasks",
        question="For which share of the time do all tasks at once wait for I/O or memory?",
        unit="ratio",
        curves=(
            Curve(Query("gpuwatch_pressure_io_stalled_seconds_total"), "I/O"),
            Curve(Query("gpuwatch_pressure_memory_stalled_seconds_total"), "memory"),
        ),
        empty="This kernel does not report pressure.",
        more=True,
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
    stat(
        "gpu_energy",
        "Energy, kWh",
        "How much energy did the GPUs use in this time range, in kilowatt-hours?",
        "1",
        f"sum(increase(gpuwatch_gpu_energy_joules_total{{{_GPU}}}[$__range])) / 3.6e6",
        empty=NO_READING,
    ),
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
    _traffic("gpu_nvlink", "NVLink traffic", "How fast does data come over NVLink?", "nvlink"),
    _traffic("gpu_pcie", "PCIe traffic", "How fast does data come over PCIe?", "pcie"),
    Panel(
        key="gpu_nvlink_counted",
        title="NVLink traffic, counted",
        question="How fast does data come over NVLink, where the driver counts it?",
        unit="bytes/s",
        curves=(
            Curve(Query("gpuwatch_gpu_nvlink_receive_bytes_total", _EACH), "GPU {gpu} received"),
            Curve(Query("gpuwatch_gpu_nvlink_transmit_bytes_total", _EACH), "GPU {gpu} sent"),
        ),
        empty=ONLY_FULL,
        more=True,
    ),
    Panel(
        key="gpu_link_errors",
        title="Link errors",
        question="Does a GPU's NVLink or PCIe link repeat what it sends?",
        unit="1/s",
        curves=(
            Curve(Query("gpuwatch_gpu_nvlink_errors_total", _EACH), "NVLink, GPU {gpu}"),
            Curve(Query("gpuwatch_gpu_pcie_replays_total", _EACH), "PCIe, GPU {gpu}"),
        ),
        empty="No error was counted.",
        more=True,
    ),
    Panel(
        key="gpu_mig",
        title="MIG instances",
        question="How much of each MIG instance is used?",
        unit="bytes",
        kind="table",
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

AGENT: tuple[Panel, ...] = (
    stat(
        "notifications_waiting",
        "Notifications waiting",
        "How many notifications does the agent still have to deliver?",
        "1",
        Curve(Query("gpuwatch_notifications_waiting")),
        empty="The agent sends no notifications itself.",
    ),
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
        key="agent_nvml",
        title="Time in NVML",
        question="For which share of the time does the agent wait for the driver, by kind of call?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_nvml_call_seconds_total", by=("call",)), "{call}"),),
        empty=NO_GPU,
        more=True,
    ),
    Panel(
        key="agent_messages",
        title="Messages of hooks",
        question="Do the hooks' messages arrive, and are any rejected?",
        unit="1/s",
        curves=(
            Curve(Query("gpuwatch_messages_received_total"), "received"),
            Curve(Query("gpuwatch_messages_rejected_total", by=("reason",)), "rejected: {reason}"),
        ),
        more=True,
    ),
    Panel(
        key="agent_failures",
        title="History and notifications of the agent",
        question="Does the agent write its history and deliver its notifications?",
        unit="1/s",
        curves=(
            Curve(Query("gpuwatch_history_failures_total"), "history commits failed"),
            Curve(Query("gpuwatch_notification_failures_total"), "deliveries failed"),
            Curve(Query("gpuwatch_notifications_dropped_total"), "notifications dropped"),
            Curve(Query("gpuwatch_notifications_sent_total"), "notifications sent"),
        ),
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
