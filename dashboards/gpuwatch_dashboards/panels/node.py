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
_NO_JOB = "No job of a scheduler, and no resumed run, on this node."
_NO_PRESSURE = "This kernel does not report pressure."
_RUNS = ("run", "rank", "name", "user", "job_id")

NODE: tuple[Panel, ...] = (
    stat("seen", "GPUs").asks("How many GPUs does the driver list?", line("", "gpuwatch_gpus_seen")),
    stat("missing", "GPUs missing", warning="missing", runbook="GpuLost").asks(
        "How many GPUs has the driver listed before and lists no longer?",
        f"sum(gpuwatch_gpus_expected{{{_NODE}}} - gpuwatch_gpus_seen{{{_NODE}}})",
    ),
    stat("without_hook", "Processes without a hook").asks(
        "How many processes on this node's GPUs does gpuwatch not see inside of? Their user may lack the socket's group.",
        line("", "gpuwatch_processes_without_hook"),
    ),
    stat("node_lost", "GPUs lost", warning="lost_gpus", runbook="GpuHeldIdle").asks(
        "How much GPU time is starved, held idle or stalled now, as a number of GPUs?",
        f'sum(owner_kind:gpuwatch_gpu_seconds:rate5m{{kind=~"{LOST}", {_NODE}}})',
    ),
    stat("node_shm", "/dev/shm used", warning="shm_used", runbook="ShmNearlyFull").asks(
        "Is there room for the batches of the loader's workers?",
        Curve(
            promql=f"max({_SHM_USED}{{{_NODE}}} / ({_SHM_SIZE}{{{_NODE}}} > 0))",
            live=Query(_SHM_USED, by=("mount",), over=Query(_SHM_SIZE, by=("mount",))),
        ),
    ),
    stat("node_memory", "Memory used", "ratio", warning="memory_used").asks(
        "Is the node near its limit?",
        f"max(1 - gpuwatch_memory_available_bytes{{{_NODE}}} / (gpuwatch_memory_total_bytes{{{_NODE}}} > 0))",
    ),
    stat("sample_age", "Age of the last sample", "s", warning="sample_age_s", runbook="GpuwatchAgentDown").asks(
        "Is the agent still sampling? Seconds since its last sample.",
        f"max(time() - gpuwatch_sample_timestamp_seconds{{{_NODE}}})",
    ),
    table(
        "node_runs", "Runs on the node", columns=_RUNS, empty="No run that uses gpuwatch is training here.", width=15
    ).asks(
        "Which runs train here, and do they wait for data?",
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
        "Are there cores left to prepare data with? Share of all cores.",
        line("busy, of all cores", _CPU, _CPU, (Match("mode", "!~", "idle|iowait"),)),
        line("idle, waiting for I/O", _CPU, _CPU, (Match("mode", "=", "iowait"),)),
    ),
    Panel("pressure", "Pressure", empty=_NO_PRESSURE).asks(
        "For which share of the time does some task wait for CPU, I/O or memory?",
        line("CPU", "gpuwatch_pressure_cpu_waiting_seconds_total"),
        line("I/O", "gpuwatch_pressure_io_waiting_seconds_total"),
        line("memory", "gpuwatch_pressure_memory_waiting_seconds_total"),
    ),
    Panel("shm", "/dev/shm", empty="/dev/shm is not mounted on this node.").asks(
        "Is there room for the batches of the loader's workers?",
        line("used ({mount})", _SHM_USED),
        line("size ({mount})", _SHM_SIZE, dashed=True),
    ),
    Panel("network", "Network").asks(
        "Does data come over the network, and how fast?",
        line("received", "gpuwatch_network_receive_bytes_total", where=_REAL_INTERFACES),
        line("sent", "gpuwatch_network_transmit_bytes_total", where=_REAL_INTERFACES),
    ),
    detail("infiniband", "InfiniBand", empty="No InfiniBand or RoCE port.").asks(
        "How fast do data and gradients come over InfiniBand or RoCE?",
        line("received", "gpuwatch_infiniband_port_data_received_bytes_total"),
        line("sent", "gpuwatch_infiniband_port_data_transmitted_bytes_total"),
    ),
    detail("infiniband_errors", "InfiniBand errors", empty="No error was counted.").asks(
        "Is a link faulty?",
        line("symbol errors {device}:{port}", "gpuwatch_infiniband_symbol_errors_total"),
        line("link lost {device}:{port}", "gpuwatch_infiniband_link_downed_total"),
    ),
    Panel("disk", "Disk").asks(
        "Does data come from a disk, and how fast?",
        line("read", "gpuwatch_disk_read_bytes_total", where=_REAL_DISKS),
        line("written", "gpuwatch_disk_written_bytes_total", where=_REAL_DISKS),
    ),
    detail("disk_busy", "Disks busy").asks(
        "For which share of the time is each disk busy?",
        line("{device}", "gpuwatch_disk_io_time_seconds_total", where=_REAL_DISKS),
    ),
    detail("load", "Load").asks(
        "Do more tasks want to run than there are cores?",
        line("load of one minute", "gpuwatch_load1"),
        line("running or ready", "gpuwatch_procs_running"),
        line("cores", "gpuwatch_cpu_cores", dashed=True),
    ),
    detail("pressure_all", "Pressure, all tasks", empty=_NO_PRESSURE).asks(
        "For which share of the time do all tasks at once wait for I/O or memory?",
        line("I/O", "gpuwatch_pressure_io_stalled_seconds_total"),
        line("memory", "gpuwatch_pressure_memory_stalled_seconds_total"),
    ),
    detail("memory", "Memory").asks(
        "How much memory is left?",
        line("available", "gpuwatch_memory_available_bytes"),
        line("total", "gpuwatch_memory_total_bytes", dashed=True),
    ),
    detail("job_goodput", "Goodput of jobs", empty=_NO_JOB).asks(
        "What share of a job's whole time, restarts included, computed new steps?",
        line("job {job_id}", "gpuwatch_job_goodput_ratio"),
    ),
    stack("job_time", "Time of jobs by state", more=True, empty=_NO_JOB).asks(
        "Where does the time of jobs go, over all their attempts?",
        line("{state}", "gpuwatch_job_seconds_total"),
    ),
    detail("job_attempts", "Attempts of jobs", empty=_NO_JOB).asks(
        "Is a job restarted again and again? New attempts a second.",
        line("job {job_id}", "gpuwatch_job_attempts_total"),
    ),
)

AGENT: tuple[Panel, ...] = (
    stat("notifications_waiting", "Notifications waiting", empty="The agent sends no notifications itself.").asks(
        "How many notifications does the agent still have to deliver?", line("", "gpuwatch_notifications_waiting")
    ),
    table("collectors", "Collectors", columns=("instance", "collector"), empty="No collector has failed.").asks(
        "Which collectors fail, or have failed since the agent's start?",
        Curve("Fails now", f"max by (instance, collector) (gpuwatch_collector_failed{{{_NODE}}})"),
    ),
    detail("agent_cost", "CPU of the agent").asks(
        "Which share of one core does the agent use?", line("CPU", "gpuwatch_agent_cpu_seconds_total")
    ),
    detail("agent_nvml", "Time in NVML", empty=ONLY_FULL).asks(
        "For which share of the time does the agent wait for the driver, by kind of call?",
        line("{call}", "gpuwatch_nvml_call_seconds_total"),
    ),
    detail("agent_messages", "Messages of hooks").asks(
        "Do the hooks' messages arrive, and are any rejected?",
        line("received", "gpuwatch_messages_received_total"),
        line("rejected: {reason}", "gpuwatch_messages_rejected_total"),
        line("runs dropped: {reason}", "gpuwatch_run_failures_total"),
        line("runs kept apart", "gpuwatch_runs_kept_apart_total"),
    ),
    detail("agent_failures", "History and notifications of the agent").asks(
        "Does the agent write its history and deliver its notifications?",
        line("history commits failed", "gpuwatch_history_failures_total"),
        line("unreadable rows deleted", "gpuwatch_history_bad_rows_total"),
        line("history files replaced", "gpuwatch_history_damaged_total"),
        line("deliveries failed", "gpuwatch_notification_failures_total"),
        line("notifications dropped", "gpuwatch_notifications_dropped_total"),
        line("notifications sent", "gpuwatch_notifications_sent_total"),
        line("OTLP requests sent", "gpuwatch_otlp_requests_sent_total"),
        line("OTLP requests failed", "gpuwatch_otlp_request_failures_total"),
    ),
    detail("history_waiting", "History behind its disk").asks(
        "How many seconds of samples wait for the history's disk?", line("waiting", "gpuwatch_history_waiting_seconds")
    ),
    detail("agent_memory", "Memory and history of the agent").asks(
        "Do the agent's memory and its history file grow?",
        line("memory", "gpuwatch_agent_resident_memory_bytes"),
        line("history", "gpuwatch_history_bytes"),
    ),
)
