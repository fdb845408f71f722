"""Which findings a look at stacks explains, and whose stacks. Pure: a literal table."""

from __future__ import annotations

WORKERS, TRAINING, ALL_RANKS = "workers", "training", "all ranks"
"""Of the rank's loader workers (the training process where there are none), of its training process, of every rank's on the node."""

LOOK_AT: dict[str, str] = {
    "input_single_process": WORKERS,
    "input_cpu": WORKERS,
    "input_cpu_saturated": WORKERS,
    "input_disk": WORKERS,
    "input_network": WORKERS,
    "input_unexplained": WORKERS,
    "artificial_limit": WORKERS,
    "slow_worker": WORKERS,
    "burst_every_n": WORKERS,
    "epoch_start_pause": WORKERS,
    "host_bound": TRAINING,
    "sync_every_step": TRAINING,
    "checkpoint_stall": TRAINING,
    "eval_share": TRAINING,
    "straggler": ALL_RANKS,
    "stalled": ALL_RANKS,
    "hung": ALL_RANKS,
}
