"""The metric catalogue: every name that gpuwatch exports, once. Exporter, panels, alerts and docs all read it.

Base units, `_total` only on counters, ratios 0–1. Labels are bounded: never a step number, a path or a pid.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpuwatch.ledger.states import GPU_STATES

Kind = Literal["counter", "gauge", "info"]
Unit = Literal["seconds", "bytes", "ratio", "watts", "joules", "celsius", "hertz", "timestamp", "count"]

When = Literal["always", "counted", "seen", "history", "full"]
"""Which series a node has. "counted" and "seen" are on /metrics from their first count on, after a 0; before, the agent's history has
those that are "seen". "history": in the agent's history and API alone. "full": nowhere. With `--series full` all are everywhere, from 0 on."""


@dataclass(frozen=True)
class Metric:
    """One metric family."""

    name: str  # as a query names it: with `_total` for counters and `_info` for info metrics
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()
    when: When = "always"


class Sample(NamedTuple):
    """One value of one series. `labels` are the values of the metric's labels, in the catalogue's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


RUN = ("run", "rank")
GPU = ("gpu", "UUID")
_STATES = ", ".join(GPU_STATES)

CATALOGUE: tuple[Metric, ...] = (
    # the ledgers
    Metric("gpuwatch_gpu_seconds_total", "counter", "seconds", f"Wall-clock time of a GPU by state: {_STATES}. With MIG: the time of each instance and of the unpartitioned remainder, multiplied by gpuwatch_gpu_mig_ratio.", (*GPU, "state"), "seen"),
    Metric("gpuwatch_gpu_ledger_watermark_timestamp_seconds", "gauge", "timestamp", "Unix time up to which a GPU's ledger is final.", GPU),
    Metric("gpuwatch_run_seconds_total", "counter", "seconds", "Wall-clock time of a training process by state.", (*RUN, "state"), "seen"),
    Metric("gpuwatch_ledger_watermark_timestamp_seconds", "gauge", "timestamp", "Unix time up to which a run's ledger is final.", RUN),
    # jobs
    Metric("gpuwatch_job_seconds_total", "counter", "seconds", "Wall-clock time of a job by state (the states of a run plus down, restart and redone), over all its attempts on this node. Exported by the node that has rank 0.", ("job_id", "state")),
    Metric("gpuwatch_job_lost_seconds", "gauge", "seconds", "Time spent on steps that an interruption lost and that the current attempt has not repeated yet. Included in gpuwatch_job_seconds_total.", ("job_id",)),
    Metric("gpuwatch_job_goodput_ratio", "gauge", "ratio", "Share of a job's wall-clock time spent on new steps. An upper bound if gpuwatch_job_steps is absent.", ("job_id",)),
    Metric("gpuwatch_job_start_timestamp_seconds", "gauge", "timestamp", "Unix time at which the first attempt of a job on this node started, for each live run of the job. job_id is GPUWATCH_JOB if set; the job_id of runs and GPUs is the scheduler's.", ("job_id", "run")),
    Metric("gpuwatch_job_steps", "gauge", "count", "Global step numbers of a job on this node: first = its first step, next = its last step + 1, missing = number of steps in between that it did not do. first and missing are absent when they are 0.", ("job_id", "kind")),
    Metric("gpuwatch_job_attempts_total", "counter", "count", "Attempts of a job on this node: the first start and each restart after an interruption. Further trials of a sweep do not count.", ("job_id",)),
    # training runs
    Metric("gpuwatch_step_phase_seconds_total", "counter", "seconds", "Time of training steps on the host's timeline: data_wait, transfer, compute.", (*RUN, "phase"), "seen"),
    Metric("gpuwatch_phase_seconds_total", "counter", "seconds", "Time in user-declared phases (w.phase) by name, a breakdown of the state \"other\". At most eight names are kept; the remainder is \"rest\".", (*RUN, "phase"), "counted"),
    Metric("gpuwatch_compute_breakdown_seconds_total", "counter", "seconds", "Compute of a training process by section: forward (with loss, metrics and other code), backward, optimizer. Of the steps in which it was measured; absent unless requested by GPUWATCH_BREAKDOWN=1.", (*RUN, "section"), "counted"),
    Metric("gpuwatch_hidden_input_wait_seconds_total", "counter", "seconds", "Data wait that did not delay the device because work was still queued on it. Absent without device events.", RUN),
    Metric("gpuwatch_device_steps_total", "counter", "count", "Training steps measured by timing events on the device. Absent if there are none.", RUN, "history"),
    Metric("gpuwatch_unverified_steps_total", "counter", "count", "Training steps with work on another device or stream, whose input wait is therefore unreliable. Absent if there are none.", RUN, "history"),
    Metric("gpuwatch_steps_total", "counter", "count", "Completed training steps.", RUN),
    Metric("gpuwatch_samples_total", "counter", "count", "Training samples consumed. Absent if the batch size is unknown.", RUN),
    Metric("gpuwatch_tokens_total", "counter", "count", "Training tokens consumed. Absent if tokens are not counted.", RUN),
    Metric("gpuwatch_comm_steps_total", "counter", "count", "Training steps whose wait for other ranks (state comm_wait) was measured. Absent if there are none.", RUN, "history"),
    Metric("gpuwatch_step_percentile_seconds", "gauge", "seconds", "Step time percentiles (p50, p95) over the last minute, from at most 1,200 steps. Absent if no step was completed.", (*RUN, "percentile")),
    Metric("gpuwatch_run_mfu_ratio", "gauge", "ratio", "Model FLOPs utilisation over the last minute: declared FLOP/s divided by the declared peak of the device. Absent if either is not declared or no step was completed.", RUN),
    Metric("gpuwatch_run_mfu_estimated_ratio", "gauge", "ratio", "Estimated model FLOPs utilisation over the last minute: tensor core activity × SM clock, relative to the dense 16-bit peak of the GPU model. Needs no declaration.", RUN),
    Metric("gpuwatch_run_info", "info", "count", "Display name, owner and settings of a run.", (*RUN, "name", "job_id", "job_step", "user", "container_id", "pod_uid", "workload_namespace", "workload_pod", "workload_container", "timeline", "device", "world_size", "num_workers", "version")),
    Metric("gpuwatch_run_up", "gauge", "count", "1 while the training process is alive and its messages arrive, else 0.", RUN),
    Metric("gpuwatch_finding_active", "gauge", "count", "1 while a finding is active for a run, 0 after it has cleared.", ("run", "cause")),
    Metric("gpuwatch_finding_evidence_ratio", "gauge", "ratio", "Share of time (or of a capacity) that an active finding concerns.", ("run", "cause")),
    Metric("gpuwatch_finding_info", "info", "count", "Advice of an active finding with its predicted gain, or the place of a hang, as of 15 s after the finding began.", ("run", "cause", "advice")),
    Metric("gpuwatch_straggler_excess_ratio", "gauge", "ratio", "Share of the step time by which this rank delays all others. Present only while the straggler finding is active.", RUN),
    Metric("gpuwatch_step_records_lost_total", "counter", "count", "Step records that did not reach the agent. Their time is still counted in gpuwatch_run_seconds_total.", RUN, "seen"),
    Metric("gpuwatch_hook_overhead_seconds_total", "counter", "seconds", "Overhead of the hook: CPU time of its background thread, plus the time that the training thread spends in gpuwatch (estimated from sampled steps).", RUN),
    Metric("gpuwatch_fetches_sampled_total", "counter", "count", "Batch fetches whose CPU time was sampled. The sampling rate drops when sampling would exceed the hook's time budget.", RUN, "history"),
    Metric("gpuwatch_loader_fetches_total", "counter", "count", "Batches requested from loader workers. Absent without workers.", RUN),
    Metric("gpuwatch_loader_empty_fetches_total", "counter", "count", "Batch requests for which no batch was ready.", RUN),
    Metric("gpuwatch_loader_ready_batches_total", "counter", "count", "Number of ready batches, summed over all batch requests. Divided by gpuwatch_loader_fetches_total it is the mean queue depth.", RUN),
    Metric("gpuwatch_loader_worker_cpu_seconds_total", "counter", "seconds", "CPU time of all loader workers of a run.", RUN),
    Metric("gpuwatch_loader_workers", "gauge", "count", "Live loader workers of a run.", RUN),
    Metric("gpuwatch_loader_workers_in_disk_wait", "gauge", "count", "Loader workers of a run in uninterruptible sleep (state D), usually disk I/O.", RUN, "history"),
    Metric("gpuwatch_loader_worker_read_bytes_total", "counter", "bytes", "Bytes read from disks by a run's loader workers, excluding page cache hits.", RUN, "seen"),
    Metric("gpuwatch_loader_worker_written_bytes_total", "counter", "bytes", "Bytes written to disks by a run's loader workers.", RUN, "counted"),
    Metric("gpuwatch_loader_worker_run_queue_seconds_total", "counter", "seconds", "Time in which a run's loader workers were runnable but waited for a CPU, summed over the workers.", RUN, "history"),
    Metric("gpuwatch_run_resident_memory_bytes", "gauge", "bytes", "Resident memory of a training process, excluding loader workers.", RUN),
    Metric("gpuwatch_run_threads", "gauge", "count", "Threads of a training process.", RUN, "full"),
    Metric("gpuwatch_run_open_files", "gauge", "count", "Open file descriptors of a training process.", RUN, "full"),
    Metric("gpuwatch_run_memory_limit_bytes", "gauge", "bytes", "Memory limit of a run's cgroup. One series per cgroup, with the lowest rank in it.", RUN),
    Metric("gpuwatch_run_memory_used_bytes", "gauge", "bytes", "Memory in use in a run's cgroup, including page cache.", RUN),
    Metric("gpuwatch_run_oom_kills_total", "counter", "count", "Processes in a run's cgroup that the kernel's OOM killer killed.", RUN, "counted"),
    Metric("gpuwatch_run_pressure_cpu_waiting_seconds_total", "counter", "seconds", "Time in which at least one task in a run's cgroup waited for a CPU.", RUN),
    Metric("gpuwatch_run_pressure_io_waiting_seconds_total", "counter", "seconds", "Time in which at least one task in a run's cgroup waited for I/O.", RUN),
    Metric("gpuwatch_run_pressure_memory_waiting_seconds_total", "counter", "seconds", "Time in which at least one task in a run's cgroup waited for memory.", RUN),
    # GPUs
    Metric("gpuwatch_gpu_info", "info", "count", "Model, PCI address and driver version of a GPU.", (*GPU, "model", "pci_bus_id", "driver_version")),
    Metric("gpuwatch_gpu_owner_info", "info", "count", "Owner of a GPU (exactly one series per GPU): the owner of its processes or, if it has none, of its allocation by a scheduler. run is empty without a hook and \"shared\" for several runs.", (*GPU, "run", "rank", "user", "job_id", "workload_namespace", "workload_pod", "workload_container")),
    Metric("gpuwatch_gpu_shared_seconds_total", "counter", "seconds", "Time in which processes of several owners shared a GPU (time-slicing, MPS), divided among the owners by SM utilisation, or equally if it was zero. Absent for GPUs that are not shared.", (*GPU, "user", "job_id", "workload_namespace", "workload_pod"), "counted"),
    Metric("gpuwatch_gpu_holder_pid", "gauge", "count", "Process id and name of the first process that holds a GPU. Present while the GPU is held idle.", (*GPU, "command")),
    Metric("gpuwatch_gpu_utilization_ratio", "gauge", "ratio", "Share of the driver's last sample period in which at least one kernel ran. It does not show how much of the GPU the kernel used.", GPU),
    Metric("gpuwatch_gpu_memory_used_bytes", "gauge", "bytes", "Memory in use on a GPU.", GPU),
    Metric("gpuwatch_gpu_memory_total_bytes", "gauge", "bytes", "Total memory of a GPU.", GPU),
    Metric("gpuwatch_gpu_power_watts", "gauge", "watts", "Power draw of a GPU.", GPU),
    Metric("gpuwatch_gpu_energy_joules_total", "counter", "joules", "Energy used by a GPU since the agent first read its counter, by kind of use: working, waiting, idle, unknown. Absent if the GPU has no energy counter.", (*GPU, "kind"), "seen"),
    Metric("gpuwatch_gpu_state_energy_joules_total", "counter", "joules", "Energy used by a GPU since the agent first read its counter, by ledger state.", (*GPU, "state"), "history"),
    Metric("gpuwatch_gpu_driver_energy_joules_total", "counter", "joules", "Energy used by a GPU since its driver was loaded, as the driver counts it.", GPU, "full"),
    Metric("gpuwatch_gpu_temperature_celsius", "gauge", "celsius", "Core temperature of a GPU.", GPU),
    Metric("gpuwatch_gpu_throttled", "gauge", "count", "1 while the GPU's clocks are throttled for this reason: power, thermal or hardware. With --series full: every reason that the driver reports.", (*GPU, "reason"), "seen"),
    Metric("gpuwatch_gpu_processes", "gauge", "count", "Processes with a context on a GPU.", GPU),
    Metric("gpuwatch_gpu_sm_clock_hertz", "gauge", "hertz", "Clock frequency of a GPU's SMs.", GPU, "history"),
    Metric("gpuwatch_gpu_sm_active_ratio", "gauge", "ratio", "Share of a GPU's SMs that were busy, mean since the last sample (GPM: Hopper and later).", GPU),
    Metric("gpuwatch_gpu_tensor_active_ratio", "gauge", "ratio", "Share of time in which the tensor cores were active (GPM: Hopper and later).", GPU),
    Metric("gpuwatch_gpu_dram_bandwidth_ratio", "gauge", "ratio", "Memory bandwidth in use, as a share of the GPU's peak (GPM: Hopper and later).", GPU),
    Metric("gpuwatch_gpu_pcie_receive_bytes_per_second", "gauge", "bytes", "Rate of PCIe traffic to a GPU (GPM: Hopper and later).", GPU, "history"),
    Metric("gpuwatch_gpu_pcie_transmit_bytes_per_second", "gauge", "bytes", "Rate of PCIe traffic from a GPU (GPM: Hopper and later).", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_receive_bytes_per_second", "gauge", "bytes", "Rate of NVLink traffic to a GPU over all links (GPM: Hopper and later).", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_transmit_bytes_per_second", "gauge", "bytes", "Rate of NVLink traffic from a GPU over all links (GPM: Hopper and later).", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_receive_bytes_total", "counter", "bytes", "Data received by a GPU over all NVLinks. Absent if the driver does not count it.", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_transmit_bytes_total", "counter", "bytes", "Data sent by a GPU over all NVLinks. Absent if the driver does not count it.", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_errors_total", "counter", "count", "NVLink replays, recoveries and CRC errors of a GPU, over all links.", GPU, "counted"),
    Metric("gpuwatch_gpu_pcie_replays_total", "counter", "count", "PCIe replays of a GPU: packets that were retransmitted.", GPU, "counted"),
    Metric("gpuwatch_gpu_ecc_errors_total", "counter", "count", "ECC memory errors of a GPU since its driver was loaded, by kind: corrected, uncorrected.", (*GPU, "kind"), "counted"),
    Metric("gpuwatch_gpu_xid_errors_total", "counter", "count", "XID errors of a GPU that the driver reported since the agent started.", GPU, "counted"),
    Metric("gpuwatch_gpu_last_xid", "gauge", "count", "Number of the last XID error of a GPU. For an hour after a hardware XID, XIDs caused by applications do not replace it. Absent before the first XID.", GPU),
    Metric("gpuwatch_gpu_last_xid_timestamp_seconds", "gauge", "timestamp", "Unix time of the XID error in gpuwatch_gpu_last_xid. Absent before the first XID.", GPU),
    Metric("gpuwatch_gpu_mig_ratio", "gauge", "ratio", "Size of a MIG instance as a share of its GPU, by compute slices. For a partitioned GPU itself (no GPU_I_ID): the share not assigned to an instance. Absent for other GPUs.", (*GPU, "GPU_I_ID", "GPU_I_PROFILE")),
    Metric("gpuwatch_gpu_engine_active_ratio", "gauge", "ratio", "Share of time in which the compute engines of a MIG instance were busy (GPM). It replaces utilization, which the driver does not report under MIG.", GPU),
    Metric("gpuwatch_processes_without_hook", "gauge", "count", "GPU processes on this node that no hook reports, excluding their child processes. Absent if the driver lists no processes."),
    Metric("gpuwatch_gpus_seen", "gauge", "count", "GPUs that the driver currently lists."),
    Metric("gpuwatch_gpus_expected", "gauge", "count", "Highest number of GPUs that the driver has listed since the agent started."),
    # the node
    Metric("gpuwatch_cpu_seconds_total", "counter", "seconds", "CPU time of the node by mode, summed over all cores.", ("mode",), "seen"),
    Metric("gpuwatch_cpu_cores", "gauge", "count", "Online CPU cores of the node."),
    Metric("gpuwatch_load1", "gauge", "count", "Load average of the node over one minute."),
    Metric("gpuwatch_procs_running", "gauge", "count", "Tasks on the node that are running or waiting for a CPU.", when="history"),
    Metric("gpuwatch_pressure_cpu_waiting_seconds_total", "counter", "seconds", "Time in which at least one task on the node waited for a CPU."),
    Metric("gpuwatch_pressure_io_waiting_seconds_total", "counter", "seconds", "Time in which at least one task on the node waited for I/O."),
    Metric("gpuwatch_pressure_io_stalled_seconds_total", "counter", "seconds", "Time in which all tasks on the node that were not idle waited for I/O."),
    Metric("gpuwatch_pressure_memory_waiting_seconds_total", "counter", "seconds", "Time in which at least one task on the node waited for memory."),
    Metric("gpuwatch_pressure_memory_stalled_seconds_total", "counter", "seconds", "Time in which all tasks on the node that were not idle waited for memory."),
    Metric("gpuwatch_memory_total_bytes", "gauge", "bytes", "Total memory of the node."),
    Metric("gpuwatch_memory_available_bytes", "gauge", "bytes", "Memory of the node that is available without swapping."),
    Metric("gpuwatch_shm_size_bytes", "gauge", "bytes", "Size of a /dev/shm. mount: \"host\", or the run whose mount namespace it belongs to.", ("mount",)),
    Metric("gpuwatch_shm_used_bytes", "gauge", "bytes", "Used space of a /dev/shm. mount: \"host\", or the run whose mount namespace it belongs to.", ("mount",)),
    Metric("gpuwatch_disk_read_bytes_total", "counter", "bytes", "Bytes read from a disk.", ("device",)),
    Metric("gpuwatch_disk_written_bytes_total", "counter", "bytes", "Bytes written to a disk.", ("device",)),
    Metric("gpuwatch_disk_io_time_seconds_total", "counter", "seconds", "Time in which a disk was busy.", ("device",)),
    Metric("gpuwatch_network_receive_bytes_total", "counter", "bytes", "Bytes received on an interface.", ("device",)),
    Metric("gpuwatch_network_transmit_bytes_total", "counter", "bytes", "Bytes sent on an interface.", ("device",)),
    Metric("gpuwatch_infiniband_port_data_received_bytes_total", "counter", "bytes", "Bytes received on an InfiniBand or RoCE port.", ("device", "port")),
    Metric("gpuwatch_infiniband_port_data_transmitted_bytes_total", "counter", "bytes", "Bytes sent on an InfiniBand or RoCE port.", ("device", "port")),
    Metric("gpuwatch_infiniband_symbol_errors_total", "counter", "count", "Symbol errors of an InfiniBand or RoCE port.", ("device", "port"), "counted"),
    Metric("gpuwatch_infiniband_link_downed_total", "counter", "count", "Number of times that an InfiniBand or RoCE port lost its link.", ("device", "port"), "counted"),
    # the agent itself
    Metric("gpuwatch_build_info", "info", "count", "Version of the agent.", ("version",)),
    Metric("gpuwatch_collector_failed", "gauge", "count", "1 while a collector fails, 0 after it has recovered.", ("collector",), "seen"),
    Metric("gpuwatch_nvml_call_seconds_total", "counter", "seconds", "Time that the agent spent in NVML calls, by call, for all GPUs together.", ("call",), "history"),
    Metric("gpuwatch_messages_received_total", "counter", "count", "Messages received from hooks."),
    Metric("gpuwatch_messages_rejected_total", "counter", "count", "Messages from hooks that the agent rejected, by reason.", ("reason",), "seen"),
    Metric("gpuwatch_history_bytes", "gauge", "bytes", "Size of the agent's history file."),
    Metric("gpuwatch_run_failures_total", "counter", "count", "Internal errors of the agent by processing step: runs dropped after an error or evicted to make room (given_up), and incomplete samples.", ("reason",), "counted"),
    Metric("gpuwatch_runs_kept_apart_total", "counter", "count", "Processes that reported a run and rank already in use by another live process. Each is recorded as a separate run.", when="counted"),
    Metric("gpuwatch_history_bad_rows_total", "counter", "count", "Unreadable rows that were deleted from the history.", when="counted"),
    Metric("gpuwatch_history_damaged_total", "counter", "count", "Damaged or removed history files. Each was replaced by a new one.", when="counted"),
    Metric("gpuwatch_history_failures_total", "counter", "count", "Failed commits to the history file, for example on a full disk.", when="counted"),
    Metric("gpuwatch_history_waiting_seconds", "gauge", "seconds", "Seconds of samples that the agent has served but only buffers in memory, because the history's disk is slow.", when="seen"),
    Metric("gpuwatch_notifications_sent_total", "counter", "count", "Notifications that the agent itself delivered. Absent without --notify."),
    Metric("gpuwatch_notification_failures_total", "counter", "count", "Failed attempts of the agent to deliver a notification. Each is retried. Absent without --notify."),
    Metric("gpuwatch_notifications_dropped_total", "counter", "count", "Notifications that the agent dropped after a day of retries, or because its queue was full. Absent without --notify."),
    Metric("gpuwatch_notifications_waiting", "gauge", "count", "Notifications in the agent's delivery queue. Absent without --notify."),
    Metric("gpuwatch_otlp_requests_sent_total", "counter", "count", "Requests accepted by the OpenTelemetry collector. Absent without --otlp."),
    Metric("gpuwatch_otlp_request_failures_total", "counter", "count", "Requests that the OpenTelemetry collector rejected or did not answer. Absent without --otlp."),
    Metric("gpuwatch_sample_timestamp_seconds", "gauge", "timestamp", "Unix time at which the agent took the sample that it serves."),
    Metric("gpuwatch_agent_cpu_seconds_total", "counter", "seconds", "CPU time of the agent itself."),
    Metric("gpuwatch_agent_resident_memory_bytes", "gauge", "bytes", "Resident memory of the agent itself."),
)  # fmt: skip
# fmt: skip above keeps one metric a line; line length is not checked in this table

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


def labels_of(sample: Sample) -> dict[str, str]:
    """Return a sample's labels by name."""
    return dict(zip(BY_NAME[sample.metric].labels, sample.labels, strict=True))
