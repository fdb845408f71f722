"""The causes that gpuwatch names: one file, one pure function each. Adding one is a file here and a line below.

A rule looks at a `Window` and returns a `Finding`, or None when the cause is not there or its signal was not measured.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuwatch.diagnosis.finding import Finding
from gpuwatch.diagnosis.rules.artificial_limit import artificial_limit
from gpuwatch.diagnosis.rules.burst_every_n import burst_every_n
from gpuwatch.diagnosis.rules.checkpoint_stall import checkpoint_stall
from gpuwatch.diagnosis.rules.compute_bound import compute_bound
from gpuwatch.diagnosis.rules.epoch_start_pause import epoch_start_pause
from gpuwatch.diagnosis.rules.eval_share import eval_share
from gpuwatch.diagnosis.rules.gpu_saturated import gpu_saturated
from gpuwatch.diagnosis.rules.held_idle import held_idle
from gpuwatch.diagnosis.rules.host_bound import host_bound
from gpuwatch.diagnosis.rules.hung import hung
from gpuwatch.diagnosis.rules.input_cpu import input_cpu
from gpuwatch.diagnosis.rules.input_cpu_saturated import input_cpu_saturated
from gpuwatch.diagnosis.rules.input_disk import input_disk
from gpuwatch.diagnosis.rules.input_network import input_network
from gpuwatch.diagnosis.rules.input_single_process import input_single_process
from gpuwatch.diagnosis.rules.input_unexplained import input_unexplained
from gpuwatch.diagnosis.rules.memory_creep import memory_creep
from gpuwatch.diagnosis.rules.shm_exhaustion import shm_exhaustion
from gpuwatch.diagnosis.rules.slow_worker import slow_worker
from gpuwatch.diagnosis.rules.stalled import stalled
from gpuwatch.diagnosis.rules.straggler import straggler
from gpuwatch.diagnosis.rules.sync_every_step import sync_every_step
from gpuwatch.diagnosis.rules.throttled import throttled
from gpuwatch.diagnosis.rules.too_many_workers import too_many_workers
from gpuwatch.diagnosis.rules.training_killed import training_killed
from gpuwatch.diagnosis.rules.transfer_pageable import transfer_pageable
from gpuwatch.diagnosis.rules.transfer_pcie import transfer_pcie
from gpuwatch.diagnosis.rules.worker_killed import worker_killed
from gpuwatch.diagnosis.window import Window

Rule = Callable[[Window], "Finding | None"]

RULES: tuple[Rule, ...] = (
    hung,
    stalled,
    straggler,
    worker_killed,
    training_killed,
    shm_exhaustion,
    input_single_process,
    input_cpu,
    input_cpu_saturated,
    input_disk,
    input_network,
    artificial_limit,
    slow_worker,
    burst_every_n,
    too_many_workers,
    epoch_start_pause,
    transfer_pageable,
    transfer_pcie,
    sync_every_step,
    host_bound,
    eval_share,
    checkpoint_stall,
    held_idle,
    memory_creep,
    throttled,
    gpu_saturated,
    compute_bound,
)

FALLBACK_RULES: tuple[Rule, ...] = (input_unexplained,)
"""Rules that speak only where no other one has named a cause of the same family."""

ENDINGS: tuple[Rule, ...] = (worker_killed, training_killed)
"""Of these, what can end a run: asked when it has ended, the first that answers is why."""

CAUSES: tuple[str, ...] = tuple(rule.__name__ for rule in (*RULES, *FALLBACK_RULES))
"""Names of all causes: a rule's function is called what it finds."""
