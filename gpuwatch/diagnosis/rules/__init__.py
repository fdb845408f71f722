"""The causes that gpuwatch names, and `diagnose(window)`, which looks for all of them.

One file, one rule: everything about a cause is in its file. Adding one is a file and a line in `RULES`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from gpuwatch.diagnosis.finding import SEVERITIES, Finding, Rule
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
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.diagnosis.window import Window

RULES: tuple[Rule, ...] = (
    hung,
    stalled,
    straggler,
    worker_killed,
    training_killed,
    shm_exhaustion,
    input_single_process,
    slow_worker,
    input_cpu,
    input_cpu_saturated,
    input_disk,
    input_network,
    artificial_limit,
    input_unexplained,
    burst_every_n,
    too_many_workers,
    epoch_start_pause,
    transfer_pageable,
    transfer_pcie,
    sync_every_step,
    throttled,
    host_bound,
    eval_share,
    checkpoint_stall,
    held_idle,
    memory_creep,
    gpu_saturated,
    compute_bound,
)
"""All rules. Of several causes that explain the same thing, the first one here is the most telling."""

BY_CAUSE = {rule.cause: rule for rule in RULES}
CAUSES = tuple(BY_CAUSE)

F = TypeVar("F", bound=Finding)


def diagnose(window: Window, thresholds: Thresholds = THRESHOLDS) -> list[Finding]:
    """Return what is wrong (or right) in this window: roots first, the most severe first, then by the share at stake.

    A consequence follows its root and names it.
    """
    findings = [found for rule in RULES if (found := rule(window, thresholds)) is not None]
    causes = {finding.cause for finding in findings}
    return in_order([finding for finding in findings if not is_explained(finding, causes)])


def why_it_ended(window: Window, thresholds: Thresholds = THRESHOLDS) -> Finding | None:
    """Return why the run of this window has ended; None where no rule can prove it."""
    return next((found for rule in RULES if rule.ends_run and (found := rule(window, thresholds)) is not None), None)


def roots_of(cause: str) -> tuple[str, ...]:
    """Return the causes that can be the root of this one, the most telling first."""
    own = BY_CAUSE[cause]
    return tuple(
        root.cause for root in RULES if root.cause in own.explained_by or (cause in root.explains and not own.fallback)
    )


def is_explained(finding: Finding, causes: Collection[str]) -> bool:
    """Whether it says only that nothing is proven ("input_unexplained"), while one of these causes is the explanation."""
    rule = BY_CAUSE.get(finding.cause)
    if rule is None or not rule.fallback:
        return False
    return any(finding.cause in BY_CAUSE[cause].explains for cause in causes if cause in BY_CAUSE)


_ROOTS = {cause: roots_of(cause) for cause in CAUSES}


def in_order(findings: Sequence[F]) -> list[F]:
    """Return the findings with their roots, as far as those are among them: each root, then its consequences."""
    causes = {finding.cause for finding in findings}
    reasons = {cause: finding.cause for finding in findings for cause in finding.because}
    rooted = [
        msgspec.structs.replace(
            finding,
            root=next((root for root in _ROOTS.get(finding.cause, ()) if root in causes), reasons.get(finding.cause)),
        )
        for finding in findings
    ]
    by_weight = sorted(rooted, key=lambda f: (SEVERITIES.index(f.severity), -f.ratio))
    ordered: list[F] = []

    def take(finding: F) -> None:
        ordered.append(finding)
        for each in by_weight:
            if each.root == finding.cause:
                take(each)

    for finding in by_weight:
        if finding.root is None:
            take(finding)
    return ordered
