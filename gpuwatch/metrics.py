"""The metric catalogue: every name that gpuwatch exports, once. Exporter, panels, alerts and docs all read it.

Base units, `_total` only on counters, ratios 0–1. Labels are bounded: never a step number, a path or a pid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gpuwatch.ledger import GPU_STATES

Kind = Literal["counter", "gauge", "histogram", "info"]
Unit = Literal["seconds", "bytes", "ratio", "watts", "joules", "celsius", "timestamp", "count"]


@dataclass(frozen=True)
class Metric:
    """One metric family."""

    name: str
    """As a query names it: with `_total` for counters and `_info` for info metrics."""
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One value of one series. `labels` are the values of the metric's labels, in the catalogue's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class HistogramSample:
    """One histogram. `counts` are per bucket, not cumulative, the last one being +Inf's."""

    metric: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    labels: tuple[str, ...] = ()


RUN = ("run", "rank")
GPU = ("gpu", "UUID")
_STATES = ", ".join(GPU_STATES)

CATALOGUE: tuple[Metric, ...] = (
    # the ledgers
    Metric("gpuwatch_gpu_seconds_total", "counter", "seconds", f"Wall clock of a GPU by state: {_STATES}.", (*GPU, "state")),
    Metric("gpuwatch_gpu_ledger_watermark_timestamp_seconds", "gauge", "timestamp", "Unix time up to which a GPU's ledger is final.", GPU),
    Metric("gpuwatch_run_seconds_total", "counter", "seconds", "Wall clock of a training process by state.", (*RUN, "state")),
    Metric("gpuwatch_ledger_watermark_timestamp_seconds", "gauge", "timestamp", "Unix time up to which a run's ledger is final.", RUN),
    # training runs
    Metric("gpuwatch_step_phase_seconds_total", "counter", "seconds", "Time of training steps on the host's timeline: data_wait, transfer, compute.", (*RUN, "phase")),
    Metric("gpuwatch_hidden_input_wait_seconds_total", "counter", "seconds", "Data wait that cost nothing, hidden behind the device's queued work; absent without device events.", RUN),
    Metric("gpuwatch_device_steps_total", "counter", "count", "Training steps that timing events on the device measured; absent without any.", RUN),
    Metric("gpuwatch_steps_total", "counter", "count", "Training steps done.", RUN),
    Metric("gpuwatch_samples_total", "counter", "count", "Training samples consumed, where the batch tells its size.", RUN),
    Metric("gpuwatch_step_seconds", "histogram", "seconds", "Time of one training step, data wait included.", RUN),
    Metric("gpuwatch_last_step_timestamp_seconds", "gauge", "timestamp", "Unix time of the last training step's end.", RUN),
    Metric("gpuwatch_run_info", "info", "count", "Who a run is: its display name and settings.", (*RUN, "name", "job_id", "user", "timeline", "device", "world_size", "num_workers", "version")),
    Metric("gpuwatch_run_up", "gauge", "count", "1 while the training process lives and its messages arrive, else 0.", RUN),
    Metric("gpuwatch_finding_active", "gauge", "count", "1 while a cause is found for a run, 0 once it has gone.", ("run", "cause")),
    Metric("gpuwatch_finding_evidence_ratio", "gauge", "ratio", "Share of time (or of a capacity) that an active finding concerns.", ("run", "cause")),
    Metric("gpuwatch_step_records_lost_total", "counter", "count", "Step records that never reached the agent; their time is in the ledger all the same.", RUN),
    Metric("gpuwatch_hook_overhead_seconds_total", "counter", "seconds", "CPU time that the hook's background thread took in the training process.", RUN),
    Metric("gpuwatch_loader_worker_cpu_seconds_total", "counter", "seconds", "CPU time of a run's loader workers, summed.", RUN),
    Metric("gpuwatch_loader_workers", "gauge", "count", "Loader workers of a run that are alive.", RUN),
    # GPUs
    Metric("gpuwatch_gpu_info", "info", "count", "What a GPU is.", (*GPU, "modelName", "pci_bus_id", "driver_version")),
    Metric("gpuwatch_gpu_owner_info", "info", "count", "Who holds a GPU: one series a GPU; run is empty without a hook and \"shared\" for several runs.", (*GPU, "run", "rank", "user", "job_id", "workload_namespace", "workload_pod", "workload_container")),
    Metric("gpuwatch_gpu_utilization_ratio", "gauge", "ratio", "Share of the driver's last sample period in which some kernel ran. Presence, not intensity.", GPU),
    Metric("gpuwatch_gpu_memory_used_bytes", "gauge", "bytes", "Memory in use on a GPU.", GPU),
    Metric("gpuwatch_gpu_memory_total_bytes", "gauge", "bytes", "Memory of a GPU.", GPU),
    Metric("gpuwatch_gpu_power_watts", "gauge", "watts", "Power draw of a GPU.", GPU),
    Metric("gpuwatch_gpu_energy_joules_total", "counter", "joules", "Energy used by a GPU since its driver was loaded.", GPU),
    Metric("gpuwatch_gpu_temperature_celsius", "gauge", "celsius", "Core temperature of a GPU.", GPU),
    Metric("gpuwatch_gpu_throttled", "gauge", "count", "1 while the GPU's clocks are held down for this reason: power, thermal, hardware.", (*GPU, "reason")),
    Metric("gpuwatch_gpu_processes", "gauge", "count", "Processes with a context on a GPU.", GPU),
    Metric("gpuwatch_gpus_seen", "gauge", "count", "GPUs that the driver lists now."),
    Metric("gpuwatch_gpus_expected", "gauge", "count", "The most GPUs that the driver has listed since the agent started."),
    # the node
    Metric("gpuwatch_cpu_seconds_total", "counter", "seconds", "CPU time of the node by mode, all cores together.", ("mode",)),
    Metric("gpuwatch_cpu_cores", "gauge", "count", "CPU cores that are online."),
    Metric("gpuwatch_load1", "gauge", "count", "Load average over one minute."),
    Metric("gpuwatch_procs_running", "gauge", "count", "Tasks that run or wait for a CPU."),
    Metric("gpuwatch_pressure_cpu_waiting_seconds_total", "counter", "seconds", "Time in which some task waited for a CPU."),
    Metric("gpuwatch_pressure_io_waiting_seconds_total", "counter", "seconds", "Time in which some task waited for I/O."),
    Metric("gpuwatch_pressure_io_stalled_seconds_total", "counter", "seconds", "Time in which all tasks waited for I/O."),
    Metric("gpuwatch_pressure_memory_waiting_seconds_total", "counter", "seconds", "Time in which some task waited for memory."),
    Metric("gpuwatch_pressure_memory_stalled_seconds_total", "counter", "seconds", "Time in which all tasks waited for memory."),
    Metric("gpuwatch_memory_total_bytes", "gauge", "bytes", "Memory of the node."),
    Metric("gpuwatch_memory_available_bytes", "gauge", "bytes", "Memory that can be had without swapping."),
    Metric("gpuwatch_shm_size_bytes", "gauge", "bytes", "Size of /dev/shm; mount says whose: the node's, or a run's own mount namespace.", ("mount",)),
    Metric("gpuwatch_shm_used_bytes", "gauge", "bytes", "Used part of /dev/shm.", ("mount",)),
    Metric("gpuwatch_disk_read_bytes_total", "counter", "bytes", "Bytes read from a disk.", ("device",)),
    Metric("gpuwatch_disk_written_bytes_total", "counter", "bytes", "Bytes written to a disk.", ("device",)),
    Metric("gpuwatch_disk_io_time_seconds_total", "counter", "seconds", "Time in which a disk was busy.", ("device",)),
    Metric("gpuwatch_network_receive_bytes_total", "counter", "bytes", "Bytes received on an interface.", ("device",)),
    Metric("gpuwatch_network_transmit_bytes_total", "counter", "bytes", "Bytes sent on an interface.", ("device",)),
    # the agent itself
    Metric("gpuwatch_build_info", "info", "count", "Version of the agent.", ("version",)),
    Metric("gpuwatch_collector_duration_seconds", "gauge", "seconds", "How long a collector's last turn took.", ("collector",)),
    Metric("gpuwatch_collector_success", "gauge", "count", "1 when a collector's last turn succeeded, 0 when it failed; absent where it has nothing to measure.", ("collector",)),
    Metric("gpuwatch_messages_received_total", "counter", "count", "Messages taken from hooks."),
    Metric("gpuwatch_messages_rejected_total", "counter", "count", "Messages from hooks that could not be used, by reason.", ("reason",)),
    Metric("gpuwatch_history_bytes", "gauge", "bytes", "Size of the history file."),
    Metric("gpuwatch_history_failures_total", "counter", "count", "Commits to the history that failed (a full disk, say)."),
    Metric("gpuwatch_sample_timestamp_seconds", "gauge", "timestamp", "Unix time of the sample that this page shows."),
    Metric("gpuwatch_agent_cpu_seconds_total", "counter", "seconds", "CPU time of the agent itself."),
    Metric("gpuwatch_agent_resident_memory_bytes", "gauge", "bytes", "Resident memory of the agent itself."),
)  # fmt: skip
# fmt: skip above keeps one metric a line; line length is not checked in this table

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


def labels_of(sample: Sample | HistogramSample) -> dict[str, str]:
    """Return a sample's labels by name."""
    return dict(zip(BY_NAME[sample.metric].labels, sample.labels, strict=True))


def check(samples: Iterator[Sample | HistogramSample]) -> Iterator[Sample | HistogramSample]:
    """Pass samples on; raise KeyError or ValueError for a metric or label set that the catalogue lacks."""
    for sample in samples:
        metric = BY_NAME[sample.metric]
        if len(metric.labels) != len(sample.labels):
            raise ValueError(f"{sample.metric}: {len(sample.labels)} label values for labels {metric.labels}")
        yield sample
