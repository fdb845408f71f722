"""Every number that a diagnosis or a panel compares with, once. Shares and ratios 0–1, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gpuwatch.errors import ConfigError


@dataclass(frozen=True)
class Thresholds:
    """When a cause is worth naming, and from when on a panel warns."""

    min_steps: int = 5
    """Fewer training steps than this prove nothing."""
    min_device_steps: int = 3
    """The same for what the device's own timeline has measured in each of them."""
    input_share: float = 0.10
    """A healthy loop gets its batch in a few per cent of the time; from here on the wait is worth a change."""
    input_share_critical: float = 0.40
    """From here on the wait for input is critical."""
    transfer_share: float = 0.10
    """Share of time in copies to the device from which they are worth a change."""
    worker_busy: float = 0.80
    """CPU use of a loader worker, 1.0 = one core, from which it is the worker that is slow."""
    worker_sleeping: float = 0.50
    """CPU use of the workers on average, below which they mostly wait for something else."""
    cores_exhausted: float = 0.90
    """Busy share of all cores from which more workers will not help."""
    quota_used_up: float = 0.50
    """Share of a CPU quota's periods in which it is used up, from which it is what limits the workers."""
    fetch_on_cpu: float = 0.50
    """CPU over wall time of a fetch in the training process from which it computes rather than waits."""
    worker_waiting: float = 0.50
    """Share of the looks at a run's loader workers in which they stood at one thing, from which that holds them up."""
    worker_uneven: float = 0.50
    """CPU use of the other workers over that of the busiest one, below which it alone is the slow one."""
    disk_busy: float = 0.80
    """Share of time in which a disk has work, from which it has none left to give."""
    network_bytes_per_s: float = 100e3
    """Less than this a second is not a data set that comes over the network."""
    cpu_pressure: float = 0.50
    """Share of time in which some task waits for a CPU, from which there are more tasks than cores."""
    workers_per_core: float = 2.0
    """Loader workers for each core that the process may use, from which they are too many."""
    burst_correlation: float = 0.50
    """Autocorrelation of the wait for data at a lag of `num_workers` steps from which batches come in bursts."""
    burst_share: float = 0.50
    """How much of the wait is in the slowest one of every `num_workers` steps, from 0 (spread evenly) to 1 (all of it)."""
    first_batch_factor: float = 10.0
    """A first batch this many times the median wait is a pause."""
    first_batch_min_s: float = 0.1
    """A shorter one is none, whatever the usual wait."""
    first_batch_share: float = 0.05
    """Share of step time that first batches must take to matter."""
    pcie_bytes_per_s: float = 8e9
    """Rate of copies from pinned memory from which it is the bus that limits them."""
    host_wait_share: float = 0.10
    """Share of time in which the device waited for the host's code."""
    device_bubbles: float = 0.30
    """Share of compute in which the driver sees no kernel, from which the host launches too slowly."""
    drained_share: float = 0.90
    """Share of steps at whose end the device had nothing left to do."""
    kept_up_share: float = 0.50
    """Share of steps in which the device ran each kernel as it was launched, from which the host's code sets the pace."""
    phase_share: float = 0.20
    """Share of an evaluation or of checkpoints from which they are worth a change."""
    shm_used: float = 0.80
    """Used share of /dev/shm that is near full."""
    shm_used_critical: float = 0.95
    """Used share of /dev/shm from which the next batch may kill a worker."""
    straggler_share: float = 0.05
    """Share of the step by which a rank is later than the others from which it holds them up."""
    straggler_share_critical: float = 0.20
    """From here on it is critical."""
    rank_pace: float = 0.10
    """Ranks whose steps take the same time but for this share go in step."""
    gpu_idle_s: float = 300.0
    """A GPU held by a process without work for this long is idle."""
    gpu_idle_utilization: float = 0.05
    """Utilisation up to which a GPU does no work."""
    saturated_share: float = 0.90
    """Share of compute from which there is nothing to gain outside of it."""
    gpu_busy: float = 0.90
    """Utilisation from which the driver calls a GPU busy."""
    throttled_share: float = 0.50
    """Share of time in which a GPU's clocks are held down."""
    power_fallen: float = 0.60
    """Power over what the run usually draws, below which a GPU at full utilisation does no work."""
    memory_creep_s: float = 600.0
    """Device memory must have grown for this long to be called creeping."""
    memory_creep_rises: int = 5
    """How often it must have risen in that time, without falling."""
    memory_creep_share: float = 0.05
    """Share of the GPU's memory by which it must have grown."""
    idle_share: float = 0.10
    """Share of all GPU time held by a process that does nothing, from which a panel warns."""
    stalled_share: float = 0.02
    """Share of all time without progress from which a panel warns."""
    lost_share: float = 0.20
    """Share of a GPU's time starved, held idle or stalled from which a panel warns."""
    lost_share_critical: float = 0.80
    """From here on it is critical."""
    lost_gpus: int = 1
    """GPUs' worth of lost time from which a panel warns."""
    missing: int = 1
    """GPUs or agents that were there and are gone, from which a panel warns."""
    memory_used: float = 0.95
    """Used share of a node's memory from which a panel warns."""
    sample_age_s: float = 120.0
    """Age of an agent's last sample from which a panel warns."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not value >= 0:
                raise ConfigError(f"{each.name} = {value}: cannot be negative")
            if (
                isinstance(each.default, float)
                and 0 < each.default <= 1
                and not each.name.endswith(("_s", "_per_core"))
                and value > 1
            ):
                raise ConfigError(f"{each.name} = {value}: a share is from 0 to 1, e.g. {each.default}")


THRESHOLDS = Thresholds()
"""What every rule compares with."""


def use(chosen: Thresholds) -> None:
    """Let every rule of this process compare with these numbers: once, at its start, before anything is diagnosed."""
    for each in fields(Thresholds):
        object.__setattr__(THRESHOLDS, each.name, getattr(chosen, each.name))
