"""The metric catalogue: every name that gpuwatch exports, once. Exporter, panels, alerts and docs all read it.

Base units, `_total` only on counters, ratios 0–1. Labels are bounded: never a step number, a path or a pid.
"""

from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class Sample:
    """One value of one series. `labels` are the values of the metric's labels, in the catalogue's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


RUN = ("run", "rank")
GPU = ("gpu", "UUID")
_STATES = ", ".join(GPU_STATES)

CATALOGUE: tuple[Metric, ...] = (
    # the ledgers
    Metric("gpuwatch_gpu_seconds_total", "counter", "seconds", f"Wall clock of a GPU by state: {_STATES}. Of a MIG instance, and of what is left of a split GPU, times gpuwatch_gpu_mig_ratio: GPU-seconds.", (*GPU, "state"), "seen"),
    Metric("gpuwatch_gpu_ledger_watermark_timestamp_seconds", "gauge", "timestamp", "Unix time up to which a GPU's ledger is final.", GPU),
    Metric("gpuwatch_run_seconds_total", "counter", "seconds", "Wall clock of a training process by state.", (*RUN, "state"), "seen"),
    Metric("gpuwatch_ledger_watermark_timestamp_seconds", "gauge", "timestamp", "Unix time up to which a run's ledger is final.", RUN),
    # jobs
    Metric("gpuwatch_job_seconds_total", "counter", "seconds", "Wall clock of a job over all its attempts on this node, while it has rank 0: a run's states, down, restart and redone.", ("job_id", "state")),
    Metric("gpuwatch_job_lost_seconds", "gauge", "seconds", "Part of gpuwatch_job_seconds_total in steps that the last attempt neither resumed from nor has come to again.", ("job_id",)),
    Metric("gpuwatch_job_goodput_ratio", "gauge", "ratio", "Share of a job's wall clock that computed new steps.", ("job_id",)),
    Metric("gpuwatch_job_start_timestamp_seconds", "gauge", "timestamp", "Unix time at which a job's first attempt on this node began.", ("job_id",)),
    Metric("gpuwatch_job_steps", "gauge", "count", "Steps of a job on this node by global number: the one after its last (next), its first, and how many between them it did not do (missing); absent at 0, except next.", ("job_id", "kind")),
    Metric("gpuwatch_job_attempts_total", "counter", "count", "Attempts of a job on this node: its first process, and each one after an interruption; the next trial of a sweep is none.", ("job_id",)),
    # training runs
    Metric("gpuwatch_step_phase_seconds_total", "counter", "seconds", "Time of training steps on the host's timeline: data_wait, transfer, compute.", (*RUN, "phase"), "seen"),
    Metric("gpuwatch_phase_seconds_total", "counter", "seconds", "Time in declared phases that are a part of the state other, by name; those after eight names are rest.", (*RUN, "phase"), "counted"),
    Metric("gpuwatch_hidden_input_wait_seconds_total", "counter", "seconds", "Data wait that cost nothing, hidden behind the device's queued work; absent without device events.", RUN),
    Metric("gpuwatch_device_steps_total", "counter", "count", "Training steps that timing events on the device measured; absent without any.", RUN, "history"),
    Metric("gpuwatch_unverified_steps_total", "counter", "count", "Training steps in which work on another device or stream was seen: their input wait is not certain; absent without any.", RUN, "history"),
    Metric("gpuwatch_steps_total", "counter", "count", "Training steps done.", RUN),
    Metric("gpuwatch_samples_total", "counter", "count", "Training samples consumed; absent where the batch size is not known.", RUN),
    Metric("gpuwatch_tokens_total", "counter", "count", "Training tokens consumed; absent where they are not counted.", RUN),
    Metric("gpuwatch_comm_steps_total", "counter", "count", "Training steps whose wait for other ranks was measured (state comm_wait); absent without any.", RUN, "history"),
    Metric("gpuwatch_step_percentile_seconds", "gauge", "seconds", "Step time percentiles (p50, p95) over the last minute, of 1,200 steps at most; absent without a step.", (*RUN, "percentile")),
    Metric("gpuwatch_run_mfu_ratio", "gauge", "ratio", "Model FLOPs utilisation over the last minute: the operations that training declares over the declared peak of its device; absent where either is not declared, and without a step.", RUN),
    Metric("gpuwatch_run_mfu_estimated_ratio", "gauge", "ratio", "The same with nothing declared, estimated: activity of the tensor cores times their clock, over the dense 16-bit peak of the GPU's model.", RUN),
    Metric("gpuwatch_run_info", "info", "count", "Display name, owner and settings of a run.", (*RUN, "name", "job_id", "job_step", "user", "container_id", "pod_uid", "workload_namespace", "workload_pod", "workload_container", "timeline", "device", "world_size", "num_workers", "version")),
    Metric("gpuwatch_run_up", "gauge", "count", "1 while the training process is alive and its messages arrive, else 0.", RUN),
    Metric("gpuwatch_finding_active", "gauge", "count", "1 while a finding is active for a run, 0 after it has cleared.", ("run", "cause")),
    Metric("gpuwatch_finding_evidence_ratio", "gauge", "ratio", "Share of time (or of a capacity) that an active finding concerns.", ("run", "cause")),
    Metric("gpuwatch_finding_info", "info", "count", "What an active finding advises, with its gain, or where its hang is, as it was 15 s after its begin.", ("run", "cause", "advice")),
    Metric("gpuwatch_straggler_excess_ratio", "gauge", "ratio", "Share of the step by which a rank is later than the others, which wait for it; only while the finding is active.", RUN),
    Metric("gpuwatch_step_records_lost_total", "counter", "count", "Step records that never reached the agent; their time is in the ledger all the same.", RUN, "seen"),
    Metric("gpuwatch_hook_overhead_seconds_total", "counter", "seconds", "What the hook cost the training process: CPU time of its background thread, and the training thread's time in gpuwatch, estimated from sampled steps.", RUN),
    Metric("gpuwatch_fetches_sampled_total", "counter", "count", "Fetches whose CPU time was sampled; the sampling rate falls where it would exceed the hook's budget.", RUN, "history"),
    Metric("gpuwatch_loader_fetches_total", "counter", "count", "Batches requested from loader workers; absent without workers.", RUN),
    Metric("gpuwatch_loader_empty_fetches_total", "counter", "count", "Batch requests at which no batch was ready.", RUN),
    Metric("gpuwatch_loader_ready_batches_total", "counter", "count", "Batches that were ready, summed over all batch requests; divided by gpuwatch_loader_fetches_total, the mean queue depth.", RUN),
    Metric("gpuwatch_loader_worker_cpu_seconds_total", "counter", "seconds", "CPU time of a run's loader workers, summed.", RUN),
    Metric("gpuwatch_loader_workers", "gauge", "count", "Loader workers of a run that are alive.", RUN),
    Metric("gpuwatch_loader_workers_in_disk_wait", "gauge", "count", "Loader workers in uninterruptible disk sleep (state D).", RUN, "history"),
    Metric("gpuwatch_loader_worker_read_bytes_total", "counter", "bytes", "Bytes read from disks by a run's loader workers, page cache hits not counted.", RUN, "seen"),
    Metric("gpuwatch_loader_worker_written_bytes_total", "counter", "bytes", "Bytes written to disks by a run's loader workers.", RUN, "counted"),
    Metric("gpuwatch_loader_worker_run_queue_seconds_total", "counter", "seconds", "Time in which a run's loader workers were runnable but waited for a CPU, summed.", RUN, "history"),
    Metric("gpuwatch_run_resident_memory_bytes", "gauge", "bytes", "Resident memory of a training process, its workers not counted.", RUN),
    Metric("gpuwatch_run_threads", "gauge", "count", "Threads of a training process.", RUN, "full"),
    Metric("gpuwatch_run_open_files", "gauge", "count", "File descriptors that a training process has open.", RUN, "full"),
    Metric("gpuwatch_run_memory_limit_bytes", "gauge", "bytes", "Memory limit of a run's control group, reported for the lowest rank in it: one series per group.", RUN),
    Metric("gpuwatch_run_memory_used_bytes", "gauge", "bytes", "Memory in use of a run's control group, page cache included.", RUN),
    Metric("gpuwatch_run_oom_kills_total", "counter", "count", "Processes of a run's control group that were killed by the kernel's OOM killer.", RUN, "counted"),
    Metric("gpuwatch_run_pressure_cpu_waiting_seconds_total", "counter", "seconds", "Time in which some task of a run's control group waited for a CPU.", RUN),
    Metric("gpuwatch_run_pressure_io_waiting_seconds_total", "counter", "seconds", "Time in which some task of a run's control group waited for I/O.", RUN),
    Metric("gpuwatch_run_pressure_memory_waiting_seconds_total", "counter", "seconds", "Time in which some task of a run's control group waited for memory.", RUN),
    # GPUs
    Metric("gpuwatch_gpu_info", "info", "count", "Model, PCI address and driver version of a GPU.", (*GPU, "model", "pci_bus_id", "driver_version")),
    Metric("gpuwatch_gpu_owner_info", "info", "count", "Owner of a GPU, exactly one series per GPU: of its processes, else whom a scheduler has given it to; run is empty without a hook and \"shared\" for several runs.", (*GPU, "run", "rank", "user", "job_id", "workload_namespace", "workload_pod", "workload_container")),
    Metric("gpuwatch_gpu_shared_seconds_total", "counter", "seconds", "Time in which processes of several owners held a GPU (time-slicing, MPS), divided among the owners by their processes' use of its multiprocessors, equally where none used any; of an unshared GPU absent.", (*GPU, "user", "job_id", "workload_namespace", "workload_pod"), "counted"),
    Metric("gpuwatch_gpu_holder_pid", "gauge", "count", "Process id of the first process that holds a GPU, with its name, while the GPU is held idle.", (*GPU, "command")),
    Metric("gpuwatch_gpu_utilization_ratio", "gauge", "ratio", "Share of the driver's last sample period in which some kernel ran. Presence, not intensity.", GPU),
    Metric("gpuwatch_gpu_memory_used_bytes", "gauge", "bytes", "Memory in use on a GPU.", GPU),
    Metric("gpuwatch_gpu_memory_total_bytes", "gauge", "bytes", "Memory of a GPU.", GPU),
    Metric("gpuwatch_gpu_power_watts", "gauge", "watts", "Power draw of a GPU.", GPU),
    Metric("gpuwatch_gpu_energy_joules_total", "counter", "joules", "Energy used by a GPU since the agent first read its driver's counter, by what the GPU did: working, waiting, idle, unknown; absent without a counter.", (*GPU, "kind"), "seen"),
    Metric("gpuwatch_gpu_state_energy_joules_total", "counter", "joules", "The same by the state of the GPU's ledger.", (*GPU, "state"), "history"),
    Metric("gpuwatch_gpu_driver_energy_joules_total", "counter", "joules", "The driver's own counter: energy used by a GPU since its driver was loaded.", GPU, "full"),
    Metric("gpuwatch_gpu_temperature_celsius", "gauge", "celsius", "Core temperature of a GPU.", GPU),
    Metric("gpuwatch_gpu_throttled", "gauge", "count", "1 while the GPU's clocks are held down for this reason: power, thermal, hardware; with --series full each of the driver's reasons.", (*GPU, "reason"), "seen"),
    Metric("gpuwatch_gpu_processes", "gauge", "count", "Processes with a context on a GPU.", GPU),
    Metric("gpuwatch_gpu_sm_clock_hertz", "gauge", "hertz", "Clock of a GPU's multiprocessors.", GPU, "history"),
    Metric("gpuwatch_gpu_sm_active_ratio", "gauge", "ratio", "Share of a GPU's multiprocessors that were busy, mean since the last sample (GPM: Hopper and later).", GPU),
    Metric("gpuwatch_gpu_tensor_active_ratio", "gauge", "ratio", "Share of time in which the multiprocessors did tensor operations (GPM).", GPU),
    Metric("gpuwatch_gpu_dram_bandwidth_ratio", "gauge", "ratio", "Bandwidth used of the most that the GPU's memory can give (GPM).", GPU),
    Metric("gpuwatch_gpu_pcie_receive_bytes_per_second", "gauge", "bytes", "Rate of PCIe traffic to a GPU (GPM).", GPU, "history"),
    Metric("gpuwatch_gpu_pcie_transmit_bytes_per_second", "gauge", "bytes", "Rate of PCIe traffic from a GPU (GPM).", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_receive_bytes_per_second", "gauge", "bytes", "Rate of NVLink traffic to a GPU, all links (GPM).", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_transmit_bytes_per_second", "gauge", "bytes", "Rate of NVLink traffic from a GPU, all links (GPM).", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_receive_bytes_total", "counter", "bytes", "Data received over all NVLinks, where the driver counts it.", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_transmit_bytes_total", "counter", "bytes", "Data sent over all NVLinks, where the driver counts it.", GPU, "history"),
    Metric("gpuwatch_gpu_nvlink_errors_total", "counter", "count", "Replays, recoveries and checksum errors of all NVLinks.", GPU, "counted"),
    Metric("gpuwatch_gpu_pcie_replays_total", "counter", "count", "PCIe replays: packets that were sent again.", GPU, "counted"),
    Metric("gpuwatch_gpu_ecc_errors_total", "counter", "count", "Memory errors since the driver was loaded: corrected, uncorrected.", (*GPU, "kind"), "counted"),
    Metric("gpuwatch_gpu_xid_errors_total", "counter", "count", "XID errors that the driver reported since the agent started.", GPU, "counted"),
    Metric("gpuwatch_gpu_last_xid", "gauge", "count", "Number of the last XID error; absent before the first. One that programs cause does not replace a fault of the GPU for an hour.", GPU),
    Metric("gpuwatch_gpu_last_xid_timestamp_seconds", "gauge", "timestamp", "Unix time of the last XID error; absent before the first.", GPU),
    Metric("gpuwatch_gpu_mig_ratio", "gauge", "ratio", "Size of a MIG instance as a share of its GPU, by compute slices; of a split GPU itself (no GPU_I_ID) the share that is in no instance; of others absent.", (*GPU, "GPU_I_ID", "GPU_I_PROFILE")),
    Metric("gpuwatch_gpu_engine_active_ratio", "gauge", "ratio", "Share of time in which a MIG instance's compute engines, one of each slice, were busy, in place of the utilization that a split GPU does not have (GPM).", GPU),
    Metric("gpuwatch_processes_without_hook", "gauge", "count", "Processes with a context on some GPU of this node that no hook reports, their own children not counted; absent where no process list is known."),
    Metric("gpuwatch_gpus_seen", "gauge", "count", "GPUs that the driver lists now."),
    Metric("gpuwatch_gpus_expected", "gauge", "count", "The most GPUs that the driver has listed since the agent started."),
    # the node
    Metric("gpuwatch_cpu_seconds_total", "counter", "seconds", "CPU time of the node by mode, summed over all cores.", ("mode",), "seen"),
    Metric("gpuwatch_cpu_cores", "gauge", "count", "CPU cores that are online."),
    Metric("gpuwatch_load1", "gauge", "count", "Load average over one minute."),
    Metric("gpuwatch_procs_running", "gauge", "count", "Tasks that are running or waiting for a CPU.", when="history"),
    Metric("gpuwatch_pressure_cpu_waiting_seconds_total", "counter", "seconds", "Time in which some task waited for a CPU."),
    Metric("gpuwatch_pressure_io_waiting_seconds_total", "counter", "seconds", "Time in which some task waited for I/O."),
    Metric("gpuwatch_pressure_io_stalled_seconds_total", "counter", "seconds", "Time in which all tasks waited for I/O."),
    Metric("gpuwatch_pressure_memory_waiting_seconds_total", "counter", "seconds", "Time in which some task waited for memory."),
    Metric("gpuwatch_pressure_memory_stalled_seconds_total", "counter", "seconds", "Time in which all tasks waited for memory."),
    Metric("gpuwatch_memory_total_bytes", "gauge", "bytes", "Memory of the node."),
    Metric("gpuwatch_memory_available_bytes", "gauge", "bytes", "Memory available without swapping."),
    Metric("gpuwatch_shm_size_bytes", "gauge", "bytes", "Size of /dev/shm; mount says whose: the node's, or a run's own mount namespace.", ("mount",)),
    Metric("gpuwatch_shm_used_bytes", "gauge", "bytes", "Used part of /dev/shm.", ("mount",)),
    Metric("gpuwatch_disk_read_bytes_total", "counter", "bytes", "Bytes read from a disk.", ("device",)),
    Metric("gpuwatch_disk_written_bytes_total", "counter", "bytes", "Bytes written to a disk.", ("device",)),
    Metric("gpuwatch_disk_io_time_seconds_total", "counter", "seconds", "Time in which a disk was busy.", ("device",)),
    Metric("gpuwatch_network_receive_bytes_total", "counter", "bytes", "Bytes received on an interface.", ("device",)),
    Metric("gpuwatch_network_transmit_bytes_total", "counter", "bytes", "Bytes sent on an interface.", ("device",)),
    Metric("gpuwatch_infiniband_port_data_received_bytes_total", "counter", "bytes", "Bytes received on an InfiniBand or RoCE port.", ("device", "port")),
    Metric("gpuwatch_infiniband_port_data_transmitted_bytes_total", "counter", "bytes", "Bytes sent on an InfiniBand or RoCE port.", ("device", "port")),
    Metric("gpuwatch_infiniband_symbol_errors_total", "counter", "count", "Symbol errors of an InfiniBand or RoCE port.", ("device", "port"), "counted"),
    Metric("gpuwatch_infiniband_link_downed_total", "counter", "count", "Times that an InfiniBand or RoCE port lost its link.", ("device", "port"), "counted"),
    # the agent itself
    Metric("gpuwatch_build_info", "info", "count", "Version of the agent.", ("version",)),
    Metric("gpuwatch_collector_failed", "gauge", "count", "1 while a collector fails, 0 once it works again.", ("collector",), "seen"),
    Metric("gpuwatch_nvml_call_seconds_total", "counter", "seconds", "Time spent in NVML calls by kind of call, all GPUs together.", ("call",), "history"),
    Metric("gpuwatch_messages_received_total", "counter", "count", "Messages received from hooks."),
    Metric("gpuwatch_messages_rejected_total", "counter", "count", "Messages from hooks that were rejected, by reason.", ("reason",), "seen"),
    Metric("gpuwatch_history_bytes", "gauge", "bytes", "Size of the history file."),
    Metric("gpuwatch_run_failures_total", "counter", "count", "Runs that were dropped after an error, or to make room (given_up), and parts of a sample that are missing, by step.", ("reason",), "counted"),
    Metric("gpuwatch_runs_kept_apart_total", "counter", "count", "Second live processes of a run and rank, each a run of its own.", when="counted"),
    Metric("gpuwatch_history_bad_rows_total", "counter", "count", "Unreadable rows that were deleted from the history.", when="counted"),
    Metric("gpuwatch_history_damaged_total", "counter", "count", "Damaged or removed history files, each replaced by a new one.", when="counted"),
    Metric("gpuwatch_history_failures_total", "counter", "count", "Failed commits to the history file, for example on a full disk.", when="counted"),
    Metric("gpuwatch_history_waiting_seconds", "gauge", "seconds", "Seconds of samples that wait in memory for the history's disk: what is served of them is not kept yet.", when="seen"),
    Metric("gpuwatch_notifications_sent_total", "counter", "count", "Notifications that the agent itself delivered; absent without --notify."),
    Metric("gpuwatch_notification_failures_total", "counter", "count", "Failed deliveries; each is retried."),
    Metric("gpuwatch_notifications_dropped_total", "counter", "count", "Notifications dropped after a day of retries, or because the queue was full."),
    Metric("gpuwatch_notifications_waiting", "gauge", "count", "Notifications in the delivery queue."),
    Metric("gpuwatch_otlp_requests_sent_total", "counter", "count", "Requests that the OpenTelemetry collector took; absent without --otlp."),
    Metric("gpuwatch_otlp_request_failures_total", "counter", "count", "Requests that the OpenTelemetry collector refused or did not answer; absent without --otlp."),
    Metric("gpuwatch_sample_timestamp_seconds", "gauge", "timestamp", "Unix time at which the served sample was taken."),
    Metric("gpuwatch_agent_cpu_seconds_total", "counter", "seconds", "CPU time of the agent itself."),
    Metric("gpuwatch_agent_resident_memory_bytes", "gauge", "bytes", "Resident memory of the agent itself."),
)  # fmt: skip
# fmt: skip above keeps one metric a line; line length is not checked in this table

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


def labels_of(sample: Sample) -> dict[str, str]:
    """Return a sample's labels by name."""
    return dict(zip(BY_NAME[sample.metric].labels, sample.labels, strict=True))
