"""Panels about a node and its agent."""

from __future__ import annotations

from gpuwatch_dashboards.panels.gpu import NO_GPU
from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold, alerts, columns, detail, stat, table
from gpuwatch_dashboards.query import Match, Query

LOST = "starved|idle|stalled"
"""Kinds of GPU time that is paid for and not used."""
_NODE = 'instance=~"$instance"'
_CPU = "gpuwatch_cpu_seconds_total"
_SHM_USED, _SHM_SIZE = "gpuwatch_shm_used_bytes", "gpuwatch_shm_size_bytes"
_REAL_INTERFACES = (Match("device", "!~", "lo|veth.*|docker.*|br-.*|cni.*|flannel.*|cali.*"),)
_REAL_DISKS = (Match("device", "!~", "(loop|ram|zram|sr|md|dm-).*"),)
_NO_JOB = "No job of a scheduler, and no resumed run, on this node."

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
    table(
        key="node_runs",
        title="Runs on the node",
        question="Which runs train here, and do they wait for data?",
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
    detail(
        key="infiniband",
        title="InfiniBand",
        question="How fast do data and gradients come over InfiniBand or RoCE?",
        unit="bytes/s",
        curves=(
            Curve(Query("gpuwatch_infiniband_port_data_received_bytes_total"), "received"),
            Curve(Query("gpuwatch_infiniband_port_data_transmitted_bytes_total"), "sent"),
        ),
        empty="No InfiniBand or RoCE port.",
    ),
    detail(
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
    detail(
        key="disk_busy",
        title="Disks busy",
        question="For which share of the time is each disk busy?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_disk_io_time_seconds_total", ("device",), _REAL_DISKS), "{device}"),),
    ),
    detail(
        key="load",
        title="Load",
        question="Do more tasks want to run than there are cores?",
        unit="1",
        curves=(
            Curve(Query("gpuwatch_load1"), "load of one minute"),
            Curve(Query("gpuwatch_procs_running"), "running or ready"),
            Curve(Query("gpuwatch_cpu_cores"), "cores", dashed=True),
        ),
    ),
    detail(
        key="pressure_all",
        title="Pressure, all tasks",
        question="For which share of the time do all tasks at once wait for I/O or memory?",
        unit="ratio",
        curves=(
            Curve(Query("gpuwatch_pressure_io_stalled_seconds_total"), "I/O"),
            Curve(Query("gpuwatch_pressure_memory_stalled_seconds_total"), "memory"),
        ),
        empty="This kernel does not report pressure.",
    ),
    detail(
        key="memory",
        title="Memory",
        question="How much memory is left?",
        unit="bytes",
        curves=(
            Curve(Query("gpuwatch_memory_available_bytes"), "available"),
            Curve(Query("gpuwatch_memory_total_bytes"), "total", dashed=True),
        ),
    ),
    detail(
        "job_goodput",
        "Goodput of jobs",
        "What share of a job's whole time, restarts included, computed new steps?",
        "ratio",
        (Curve(Query("gpuwatch_job_goodput_ratio", by=("job_id",)), "job {job_id}"),),
        empty=_NO_JOB,
    ),
    detail(
        "job_time",
        "Time of jobs by state",
        "What does the time go to that jobs take over all their attempts?",
        "ratio",
        (Curve(Query("gpuwatch_job_seconds_total", by=("job_id", "state")), "{job_id} {state}"),),
        empty=_NO_JOB,
    ),
    detail(
        "job_attempts",
        "Attempts of jobs",
        "Is a job restarted again and again? New attempts a second.",
        "1/s",
        (Curve(Query("gpuwatch_job_attempts_total", by=("job_id",)), "job {job_id}"),),
        empty=_NO_JOB,
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
    table(
        key="collectors",
        title="Collectors",
        question="Did each collector's last run succeed, and how long did it take?",
        unit="s",
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
    detail(
        key="agent_cost",
        title="CPU of the agent",
        question="Which share of one core does the agent use?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_agent_cpu_seconds_total"), "CPU"),),
    ),
    detail(
        key="agent_nvml",
        title="Time in NVML",
        question="For which share of the time does the agent wait for the driver, by kind of call?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_nvml_call_seconds_total", by=("call",)), "{call}"),),
        empty=NO_GPU,
    ),
    detail(
        key="agent_messages",
        title="Messages of hooks",
        question="Do the hooks' messages arrive, and are any rejected?",
        unit="1/s",
        curves=(
            Curve(Query("gpuwatch_messages_received_total"), "received"),
            Curve(Query("gpuwatch_messages_rejected_total", by=("reason",)), "rejected: {reason}"),
            Curve(Query("gpuwatch_run_failures_total", by=("reason",)), "runs dropped: {reason}"),
            Curve(Query("gpuwatch_runs_kept_apart_total"), "runs kept apart"),
        ),
    ),
    detail(
        key="agent_failures",
        title="History and notifications of the agent",
        question="Does the agent write its history and deliver its notifications?",
        unit="1/s",
        curves=(
            Curve(Query("gpuwatch_history_failures_total"), "history commits failed"),
            Curve(Query("gpuwatch_history_bad_rows_total"), "unreadable rows deleted"),
            Curve(Query("gpuwatch_history_damaged_total"), "history files replaced"),
            Curve(Query("gpuwatch_notification_failures_total"), "deliveries failed"),
            Curve(Query("gpuwatch_notifications_dropped_total"), "notifications dropped"),
            Curve(Query("gpuwatch_notifications_sent_total"), "notifications sent"),
        ),
    ),
    detail(
        key="agent_memory",
        title="Memory and history of the agent",
        question="Do the agent's memory and its history file grow?",
        unit="bytes",
        curves=(
            Curve(Query("gpuwatch_agent_resident_memory_bytes"), "memory"),
            Curve(Query("gpuwatch_history_bytes"), "history"),
        ),
    ),
)
