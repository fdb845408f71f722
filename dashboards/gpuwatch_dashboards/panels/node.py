"""Panels about the node that a run is on."""

from __future__ import annotations

from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold
from gpuwatch_dashboards.query import Match, Query

_CPU = "gpuwatch_cpu_seconds_total"
_REAL_INTERFACES = (Match("device", "!~", "lo|veth.*|docker.*|br-.*|cni.*|flannel.*|cali.*"),)
_REAL_DISKS = (Match("device", "!~", "(loop|ram|zram|sr|md|dm-).*"),)

NODE_PANELS: tuple[Panel, ...] = (
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
        thresholds=(Threshold(0.9, "warning"),),
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
        question="Is there room for the batches that workers hand over?",
        unit="bytes",
        curves=(
            Curve(Query("gpuwatch_shm_used_bytes", by=("mount",)), "used ({mount})"),
            Curve(Query("gpuwatch_shm_size_bytes", by=("mount",)), "size ({mount})", dashed=True),
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
)
