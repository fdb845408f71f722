"""Panels about a node and its agent."""

from gpuwatch_dashboards.panels.gpu import ONLY_FULL
from gpuwatch_dashboards.panels.panel import Curve, Panel, alerts, detail, line, stack, stat, table
from gpuwatch_dashboards.query import Match, Query

LOST = "starved|idle|stalled"  # kinds of GPU time that is paid for and not used
_NODE = 'instance=~"$instance"'
_CPU = "gpuwatch_cpu_seconds_total"
_SHM_USED, _SHM_SIZE = "gpuwatch_shm_used_bytes", "gpuwatch_shm_size_bytes"
_REAL_INTERFACES = (Match("device", "!~", "lo|veth.*|docker.*|br-.*|cni.*|flannel.*|cali.*"),)
_REAL_DISKS = (Match("device", "!~", "(loop|ram|zram|sr|md|dm-).*"),)
_NO_JOB = "No scheduler job or resumed run on this node."
_NO_PRESSURE = "This kernel does not report pressure."
_RUNS = ("run", "rank", "name", "user", "job_id")

NODE: tuple[Panel, ...] = (
    stat("seen", "GPUs").asks("How many GPUs does the driver currently list?", line("", "gpuwatch_gpus_seen")),
    stat("missing", "GPUs missing", warning="missing", runbook="GpuLost").asks(
        "How many GPUs that the driver listed before are no longer listed?",
        f"sum(gpuwatch_gpus_expected{{{_NODE}}} - gpuwatch_gpus_seen{{{_NODE}}})",
    ),
    stat("without_hook", "Processes without a hook").asks(
        "How many GPU processes on this node report no data? Their users may not be in the socket's group.",
        line("", "gpuwatch_processes_without_hook"),
    ),
    stat("node_lost", "GPUs lost", warning="lost_gpus", runbook="GpuHeldIdle").asks(
        "How many GPUs' worth of time is currently starved, held idle or stalled?",
        f'sum(owner_kind:gpuwatch_gpu_seconds:rate5m{{kind=~"{LOST}", {_NODE}}})',
    ),
    stat("node_shm", "/dev/shm used", warning="shm_used", runbook="ShmNearlyFull").asks(
        "How full is the fullest /dev/shm, which holds the batches of loader workers?",
        Curve(
            promql=f"max({_SHM_USED}{{{_NODE}}} / ({_SHM_SIZE}{{{_NODE}}} > 0))",
            live=Query(_SHM_USED, by=("mount",), over=Query(_SHM_SIZE, by=("mount",))),
        ),
    ),
    stat("node_memory", "Memory used", "ratio", warning="memory_used").asks(
        "What share of the node's memory is in use?",
        f"max(1 - gpuwatch_memory_available_bytes{{{_NODE}}} / (gpuwatch_memory_total_bytes{{{_NODE}}} > 0))",
    ),
    stat("sample_age", "Age of the last sample", "s", warning="sample_age_s", runbook="GpuwatchAgentDown").asks(
        "Is the agent still sampling? Time since its last sample.",
        f"max(time() - gpuwatch_sample_timestamp_seconds{{{_NODE}}})",
    ),
    table(
        "node_runs", "Runs on the node", columns=_RUNS, empty="No run with gpuwatch is training on this node.", width=15
    ).asks(
        "Which runs train on this node, and how much of their time do they wait for data?",
        Curve(
            "Running",
            f"max by ({', '.join(_RUNS)}) (gpuwatch_run_info{{{_NODE}}})\n"
            f"* on (run, rank) group_left ()\nmax by (run, rank) (gpuwatch_run_up{{{_NODE}}})",
            "up",
        ),
        Curve("Steps/s", f"sum by (run, rank) (rate(gpuwatch_steps_total{{{_NODE}}}[$__rate_interval]))", "1/s"),
        Curve(
            "Input wait",
            f'max by (run, rank) (run_rank_state:gpuwatch_run_training_seconds:share5m{{state="input_wait", {_NODE}}})',
            "ratio",
        ),
    ),
    alerts("node_alerts", _NODE, "run", "gpu"),
    Panel("cpu", "CPU", maximum=1.0, warning="cores_exhausted").asks(
        "Are CPU cores left for loading data? Share of all cores.",
        line("busy, of all cores", _CPU, _CPU, (Match("mode", "!~", "idle|iowait"),)),
        line("idle, waiting for I/O", _CPU, _CPU, (Match("mode", "=", "iowait"),)),
    ),
    Panel("pressure", "Pressure", empty=_NO_PRESSURE).asks(
        "For what share of the time does at least one task wait for CPU, I/O or memory?",
        line("CPU", "gpuwatch_pressure_cpu_waiting_seconds_total"),
        line("I/O", "gpuwatch_pressure_io_waiting_seconds_total"),
        line("memory", "gpuwatch_pressure_memory_waiting_seconds_total"),
    ),
    Panel("shm", "/dev/shm", empty="/dev/shm is not mounted on this node.").asks(
        "Does /dev/shm have room for the batches of loader workers?",
        line("used ({mount})", _SHM_USED),
        line("size ({mount})", _SHM_SIZE, dashed=True),
    ),
    Panel("network", "Network").asks(
        "How much data does the node receive and send over the network?",
        line("received", "gpuwatch_network_receive_bytes_total", where=_REAL_INTERFACES),
        line("sent", "gpuwatch_network_transmit_bytes_total", where=_REAL_INTERFACES),
    ),
    detail("infiniband", "InfiniBand", empty="No InfiniBand or RoCE port.").asks(
        "How much data does the node receive and send over InfiniBand or RoCE?",
        line("received", "gpuwatch_infiniband_port_data_received_bytes_total"),
        line("sent", "gpuwatch_infiniband_port_data_transmitted_bytes_total"),
    ),
    detail("infiniband_errors", "InfiniBand errors", empty="No error was counted.").asks(
        "Does an InfiniBand or RoCE link have errors?",
        line("symbol errors {device}:{port}", "gpuwatch_infiniband_symbol_errors_total"),
        line("link lost {device}:{port}", "gpuwatch_infiniband_link_downed_total"),
    ),
    Panel("disk", "Disk").asks(
        "How much data does the node read from and write to its disks?",
        line("read", "gpuwatch_disk_read_bytes_total", where=_REAL_DISKS),
        line("written", "gpuwatch_disk_written_bytes_total", where=_REAL_DISKS),
    ),
    detail("disk_busy", "Disks busy").asks(
        "For what share of the time is each disk busy?",
        line("{device}", "gpuwatch_disk_io_time_seconds_total", where=_REAL_DISKS),
    ),
    detail("load", "Load").asks(
        "Are there more runnable tasks than cores?",
        line("load average (1 min)", "gpuwatch_load1"),
        line("running or runnable", "gpuwatch_procs_running"),
        line("cores", "gpuwatch_cpu_cores", dashed=True),
    ),
    detail("pressure_all", "Pressure, all tasks", empty=_NO_PRESSURE).asks(
        "For what share of the time do all tasks wait for I/O or memory at once?",
        line("I/O", "gpuwatch_pressure_io_stalled_seconds_total"),
        line("memory", "gpuwatch_pressure_memory_stalled_seconds_total"),
    ),
    detail("memory", "Memory").asks(
        "How much memory of the node is available?",
        line("available", "gpuwatch_memory_available_bytes"),
        line("total", "gpuwatch_memory_total_bytes", dashed=True),
    ),
    detail("job_goodput", "Goodput of jobs", empty=_NO_JOB).asks(
        "What share of a job's wall-clock time, restarts included, was spent on new steps?",
        line("job {job_id}", "gpuwatch_job_goodput_ratio"),
    ),
    stack("job_time", "Time of jobs by state", more=True, empty=_NO_JOB).asks(
        "How is the wall-clock time of jobs divided among states, over all their attempts?",
        line("{state}", "gpuwatch_job_seconds_total"),
    ),
    detail("job_attempts", "Attempts of jobs", empty=_NO_JOB).asks(
        "How many times has each job been started? (A first start is attempt 1.)",
        Curve("job {job_id}", live=Query("gpuwatch_job_attempts_total", ("job_id",), total=True)),
    ),
)

AGENT: tuple[Panel, ...] = (
    stat("notifications_waiting", "Notifications waiting", empty="The agent sends no notifications itself.").asks(
        "How many notifications are in the agent's delivery queue?", line("", "gpuwatch_notifications_waiting")
    ),
    table("collectors", "Collectors", columns=("instance", "collector"), empty="No collector has failed.").asks(
        "Which collectors of the agent fail, or have failed since it started?",
        Curve("Failing", f"max by (instance, collector) (gpuwatch_collector_failed{{{_NODE}}})"),
    ),
    detail("agent_cost", "CPU of the agent").asks(
        "What share of one core does the agent use?", line("CPU", "gpuwatch_agent_cpu_seconds_total")
    ),
    detail("agent_nvml", "Time in NVML", empty=ONLY_FULL).asks(
        "What share of its time does the agent spend in NVML calls, by call?",
        line("{call}", "gpuwatch_nvml_call_seconds_total"),
    ),
    detail("agent_messages", "Hook messages").asks(
        "How many messages of hooks does the agent receive and reject, and how many runs does it drop?",
        line("received", "gpuwatch_messages_received_total"),
        line("rejected: {reason}", "gpuwatch_messages_rejected_total"),
        line("runs dropped: {reason}", "gpuwatch_run_failures_total"),
        line("duplicate run ids", "gpuwatch_runs_kept_apart_total"),
    ),
    detail("agent_failures", "History and deliveries of the agent").asks(
        "Does the agent write its history, and deliver notifications and OTLP data?",
        line("history commits failed", "gpuwatch_history_failures_total"),
        line("unreadable rows deleted", "gpuwatch_history_bad_rows_total"),
        line("history files replaced", "gpuwatch_history_damaged_total"),
        line("deliveries failed", "gpuwatch_notification_failures_total"),
        line("notifications dropped", "gpuwatch_notifications_dropped_total"),
        line("notifications sent", "gpuwatch_notifications_sent_total"),
        line("OTLP requests sent", "gpuwatch_otlp_requests_sent_total"),
        line("OTLP requests failed", "gpuwatch_otlp_request_failures_total"),
    ),
    detail("history_waiting", "History write backlog").asks(
        "How many seconds of samples are not on disk yet?", line("buffered", "gpuwatch_history_waiting_seconds")
    ),
    detail("agent_memory", "Memory and history of the agent").asks(
        "Do the agent's memory and its history file grow?",
        line("memory", "gpuwatch_agent_resident_memory_bytes"),
        line("history", "gpuwatch_history_bytes"),
    ),
)
