"""Every number that a diagnosis or a panel compares with, once. Shares and ratios 0–1, times in seconds."""

from dataclasses import dataclass, fields
from typing import Literal

from gpuwatch.errors import ConfigError


@dataclass(frozen=True)
class Thresholds:
    """When a cause is worth reporting, and from what value a panel warns."""

    min_steps: int = 5  # With fewer training steps, a rule finds nothing.
    min_device_steps: int = 3  # With fewer steps on the device timeline, rules about the device find nothing.
    short_run_s: float = 5.0  # A run with less time in steps than this gets no prediction.
    short_run_steps: int = 30  # A run with fewer training steps than this gets no prediction.
    input_share: float = 0.15  # Share of input wait from which a run is input-bound, and a change is worthwhile.
    input_share_mild: float = 0.05  # Share of input wait from which a verdict of "mostly compute" mentions it.
    input_share_critical: float = 0.40  # Share of input wait, or of host time, from which a finding is critical.
    transfer_share: float = 0.10  # Share of time in copies to the device from which a change is worthwhile.
    worker_busy: float = 0.80  # CPU use of a loader worker (1.0 = one core) from which the worker itself is the limit.
    worker_sleeping: float = 0.50  # Mean CPU use of loader workers below which they mostly wait for something else.
    cores_exhausted: float = 0.90  # Busy share of all cores from which more workers do not help.
    quota_used_up: float = 0.50  # Share of throttled periods from which the CPU quota is the limit.
    fetch_on_cpu: float = 0.50  # Share of a fetch spent on a CPU from which the fetch computes rather than waits.
    worker_waiting: float = 0.50  # Share of samples with workers blocked on a resource, from which it is the limit.
    worker_uneven: float = 0.50  # CPU use of the other workers relative to the busiest, below which that one is slow.
    worker_ahead: float = 0.50  # Share of waits in which later batches were ready, from which a single worker is late.
    disk_busy: float = 0.80  # Share of time in which a disk has I/O in progress, from which it is fully used.
    network_bytes_per_s: float = 100e3  # Receive rate below which the dataset is not read over the network.
    cpu_pressure: float = 0.50  # Share of time in which a task waits for a CPU (PSI), from which cores are too few.
    workers_per_core: float = 2.0  # Loader workers per core available to the process, from which there are too many.
    burst_correlation: float = 0.50  # Autocorrelation of the wait at a lag of `num_workers` from which it is in bursts.
    burst_share: float = 0.50  # How concentrated the wait is in one of `num_workers` steps: 0 (even) to 1 (all of it).
    first_batch_factor: float = 10.0  # Multiple of the median wait from which the wait for a first batch is a pause.
    first_batch_min_s: float = 0.1  # A shorter wait for a first batch is no pause, unless all of them are much time.
    first_batch_share: float = 0.05  # Share of step time that first batches must take for a finding.
    pcie_bytes_per_s: float = 8e9  # Rate of copies from pinned memory from which the PCIe bus is the limit.
    host_wait_share: float = 0.10  # Share of time in which the device waits for host code that is worth a change.
    step_idle: float = 0.30  # Share of a step on the CPU in which no thread is runnable, from which it is blocked.
    device_bubbles: float = 0.30  # Share of compute without a kernel, by the driver, from which the host is too slow.
    drained_share: float = 0.90  # Share of steps ending with an idle device from which every step synchronises.
    kept_up_share: float = 0.50  # Share of steps that the device runs as launched, from which the host sets the pace.
    phase_share: float = 0.20  # Share of time in evaluation, checkpoints or a declared phase that is worth a change.
    checkpoint_gain: float = 0.05  # Gain in throughput from which another interval between checkpoints is worthwhile.
    checkpoint_interruptions: float = 2  # Interruptions of a job from which their mean interval is used.
    shm_used: float = 0.80  # Used share of /dev/shm, now or with full worker queues, from which it is a warning.
    shm_used_critical: float = 0.90  # Used share of /dev/shm from which a worker may die; also used by ShmNearlyFull.
    straggler_share: float = 0.05  # Excess of a rank's own time, as a share of the step, that makes it a straggler.
    straggler_share_critical: float = 0.20  # Excess of a straggler, as a share of the step, from which it is critical.
    rank_pace: float = 0.10  # Ranks whose step times differ by more are not compared: none is a straggler.
    gpu_idle_s: float = 300.0  # A GPU that a process has held without work for this long is idle.
    gpu_idle_utilization: float = 0.05  # Utilisation up to which a GPU counts as idle.
    saturated_share: float = 0.90  # Share of compute from which there is nothing left to gain outside of compute.
    gpu_busy: float = 0.90  # Utilisation from which a GPU counts as busy.
    mfu_gap: float = 0.15  # Difference of declared and measured MFU from which a declared number is wrong.
    throttled_share: float = 0.50  # Share of time with throttled clocks from which a GPU counts as throttled.
    power_fallen: float = 0.60  # Power relative to the run's steps, below which a fully used GPU does no work.
    memory_creep_s: float = 600.0  # Memory use of a GPU must have grown for this long to count as a leak.
    memory_creep_rises: int = 5  # Number of increases without a decrease, from which growing memory use is a leak.
    memory_creep_share: float = 0.05  # Share of the GPU's memory by which its use must have grown to count as a leak.
    idle_share: float = 0.10  # Share of all GPU time held by an idle process, from which a panel warns.
    stalled_share: float = 0.02  # Share of all time without progress from which a panel warns.
    lost_gpus: int = 1  # Lost GPU time, as a number of GPUs, from which a panel warns.
    missing: int = 1  # Missing GPUs or agents from which a panel warns.
    memory_used: float = 0.95  # Used share of a node's memory from which a panel warns.
    sample_age_s: float = 120.0  # Age of an agent's last sample from which a panel warns.

    def severity(self, lost: float) -> Literal["critical", "warning"]:
        """Return how severe it is to lose this share of the time."""
        return "critical" if lost >= self.input_share_critical else "warning"

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not value >= 0:
                raise ConfigError(f"{each.name} = {value}: cannot be negative")
            is_share = isinstance(each.default, float) and 0 < each.default <= 1
            if is_share and not each.name.endswith(("_s", "_per_core")) and value > 1:
                raise ConfigError(f"{each.name} = {value}: a share is from 0 to 1, e.g. {each.default}")


THRESHOLDS = Thresholds()  # The defaults. A site's own, by [thresholds] of its file, are passed as a value.
