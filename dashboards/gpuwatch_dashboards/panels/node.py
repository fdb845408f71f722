"""Panels about a node and about its agent."""

from __future__ import annotations

from gpuwatch_dashboards.panels.panel import Column, Curve, Panel, Threshold, alerts, stat
from gpuwatch_dashboards.query import Match, Query

_CPU = "gpuwatch_cpu_seconds_total"
_SHM_USED, _SHM_SIZE = "gpuwatch_shm_used_bytes", "gpuwatch_shm_size_bytes"
_REAL_INTERFACES = (Match("device", "!~", "lo|veth.*|docker.*|br-.*|cni.*|flannel.*|cali.*"),)
_REAL_DISKS = (Match("device", "!~", "(loop|ram|zram|sr|md|dm-).*"),)
_NODE = 'instance=~"$instance"'

NODE: tuple[Panel, ...] = (
    stat("seen", "GPUs", "How many GPUs does the driver list?", "1", Curve(Query("gpuwatch_gpus_seen"))),
    stat(
        "missing",
        "GPUs missing",
        "How many were there and are gone?",
        "1",
        f"sum(gpuwatch_gpus_expected{{{_NODE}}} - gpuwatch_gpus_seen{{{_NODE}}})",
        "missing",
        runbook="GpuLost",
    ),
    stat(
        "node_lost",
        "GPUs lost",
        "How many GPUs' worth of time is starved, idle or stalled?",
        "1",
        f'sum(node_kind:gpuwatch_gpu_seconds:rate5m{{kind=~"starved|idle|stalled", {_NODE}}})',
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
        "Age of the sample",
        "Does the agent still sample? (Seconds since its last sample.)",
        "s",
        f"max(time() - gpuwatch_sample_timestamp_seconds{{{_NODE}}})",
        "sample_age_s",
        runbook="GpuwatchAgentDown",
    ),
    Panel(
        key="node_runs",
        title="Runs on the node",
        question="What trains here, and does it wait for data?",
        unit="1",
        kind="table",
        curves=(
            Curve(
                promql=f"max by (run, rank, name, user, job_id) (gpuwatch_run_info{{{_NODE}}})\n"
                f"* on (run, rank) group_left ()\nmax by (run, rank) (gpuwatch_run_up{{{_NODE}}})",
                legend="Status",
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
        columns=(
            Column("run", "Run", "run"),
            Column("rank", "Rank"),
            Column("name", "Name"),
            Column("user", "User", "user"),
            Column("job_id", "Job", "job"),
        ),
        empty="No training with a hook runs here.",
        width=15,
    ),
    alerts("node_alerts", _NODE, Column("run", "Run", "run"), Column("gpu", "GPU")),
    Panel(
        key="cpu",
        title="CPU",
        question="Are there cores left to prepare data with?",
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
        question="How often does a task wait for CPU, I/O or memory?",
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
            Curve(Query("gpuwatch_memory_total_bytes"), "in all", dashed=True),
        ),
        more=True,
    ),
)

AGENT: tuple[Panel, ...] = (
    Panel(
        key="collectors",
        title="Collectors",
        question="Which collector failed at its last run, and how long do they take?",
        unit="s",
        kind="table",
        curves=(
            Curve(
                promql=f"min by (instance, collector) (gpuwatch_collector_success{{{_NODE}}})",
                legend="Works",
                unit="up",
            ),
            Curve(
                promql=f"max by (instance, collector) (gpuwatch_collector_duration_seconds{{{_NODE}}})", legend="Took"
            ),
        ),
        columns=(Column("instance", "Node"), Column("collector", "Collector")),
        sort="Took",
    ),
    Panel(
        key="agent_cost",
        title="What the agent costs",
        question="How much of a core does it take?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_agent_cpu_seconds_total"), "CPU"),),
        more=True,
    ),
    Panel(
        key="agent_memory",
        title="The agent's memory and history",
        question="Does it grow?",
        unit="bytes",
        curves=(
            Curve(Query("gpuwatch_agent_resident_memory_bytes"), "memory"),
            Curve(Query("gpuwatch_history_bytes"), "history"),
        ),
        more=True,
    ),
)
