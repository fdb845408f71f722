"""Every number that a diagnosis compares with, once. Shares and ratios 0–1, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """When a cause is worth naming."""

    min_steps: int = 5
    """Fewer training steps than this prove nothing."""
    input_share: float = 0.10
    """A healthy loop gets its batch in a few per cent of the time; from here on the wait is worth a change."""
    input_share_critical: float = 0.40
    transfer_share: float = 0.10
    worker_busy: float = 0.80
    """CPU use of a loader worker, 1.0 = one core, from which it is the worker that is slow."""
    worker_sleeping: float = 0.50
    cores_exhausted: float = 0.90
    """Busy share of all cores from which more workers will not help."""
    fetch_on_cpu: float = 0.50
    """CPU over wall time of a fetch in the training process from which it computes rather than waits."""
    first_batch_factor: float = 10.0
    """A first batch this many times the median wait is a pause."""
    first_batch_min_s: float = 0.1
    first_batch_share: float = 0.05
    """Share of step time that first batches must take to matter."""
    phase_share: float = 0.20
    """Share of an evaluation or of checkpoints from which they are worth a change."""
    shm_used: float = 0.80
    """Used share of /dev/shm that is near full."""
    shm_used_critical: float = 0.95
    gpu_idle_s: float = 300.0
    """A GPU held by a process without work for this long is idle."""
    gpu_idle_utilization: float = 0.05
    saturated_share: float = 0.90
    """Share of compute from which there is nothing to gain outside of it."""
    gpu_busy: float = 0.90


THRESHOLDS = Thresholds()
