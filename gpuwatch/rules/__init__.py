"""The causes that gpuwatch names: one file, one pure function each. Adding one is a file here and a line below.

A rule looks at a `Window` and returns a `Finding`, or None when the cause is not there or its signal was not measured.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuwatch.diagnosis import Finding
from gpuwatch.rules.checkpoint_stall import checkpoint_stall
from gpuwatch.rules.compute_bound import compute_bound
from gpuwatch.rules.epoch_start_pause import epoch_start_pause
from gpuwatch.rules.eval_share import eval_share
from gpuwatch.rules.gpu_saturated import gpu_saturated
from gpuwatch.rules.held_idle import held_idle
from gpuwatch.rules.input_cpu import input_cpu
from gpuwatch.rules.input_cpu_saturated import input_cpu_saturated
from gpuwatch.rules.input_single_process import input_single_process
from gpuwatch.rules.input_unexplained import input_unexplained
from gpuwatch.rules.shm_exhaustion import shm_exhaustion
from gpuwatch.rules.stalled import stalled
from gpuwatch.rules.transfer_pageable import transfer_pageable
from gpuwatch.window import Window

Rule = Callable[[Window], "Finding | None"]

RULES: tuple[Rule, ...] = (
    stalled,
    shm_exhaustion,
    input_single_process,
    input_cpu,
    input_cpu_saturated,
    epoch_start_pause,
    transfer_pageable,
    eval_share,
    checkpoint_stall,
    held_idle,
    gpu_saturated,
    compute_bound,
)

FALLBACK_RULES: tuple[Rule, ...] = (input_unexplained,)
"""Rules that speak only where no other one has named a cause of the same family."""

CAUSES: tuple[str, ...] = tuple(rule.__name__ for rule in (*RULES, *FALLBACK_RULES))
"""Names of all causes: a rule's function is called what it finds."""
