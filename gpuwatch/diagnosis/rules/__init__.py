"""The causes that gpuwatch names, and `diagnose(window)`, which looks for all of them.

A rule has all about its cause; a file holds the rules of one subject. Adding one is a function and a line in `RULES`.
"""

from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from gpuwatch.diagnosis.finding import SEVERITIES, Finding, Rule
from gpuwatch.diagnosis.rules import device, input, input_rhythm, killed, progress
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.diagnosis.window import Window

RULES: tuple[Rule, ...] = (
    *(progress.hung, progress.stalled, progress.straggler),
    *(killed.worker_killed, killed.training_killed, killed.shm_exhaustion),
    *(input.input_single_process, input.input_handover, input.slow_worker, input.input_cpu, input.input_cpu_saturated),
    *(input.input_disk, input.input_network, input.artificial_limit, input.input_unexplained, input.outside_torch),
    *(input_rhythm.burst_every_n, input.too_many_workers, input_rhythm.epoch_start_pause),
    *(device.transfer_pageable, device.transfer_pcie, device.sync_every_step, device.step_waits, device.throttled),
    *(device.host_bound, device.eval_share, progress.checkpoint_interval, device.checkpoint_stall, device.phase_bound),
    *(device.mfu_mismatch, device.held_idle, device.memory_creep, device.gpu_saturated, device.compute_bound),
)
"""All rules, grouped. Of several causes that explain the same thing, the first one here is the most specific."""

BY_CAUSE = {rule.cause: rule for rule in RULES}
CAUSES = tuple(BY_CAUSE)

F = TypeVar("F", bound=Finding)


def diagnose(window: Window, thresholds: Thresholds = THRESHOLDS) -> list[Finding]:
    """Return what is wrong (or right) in this window: roots first, the most severe first, then by the share at stake.

    A consequence follows its root and names it. Nothing is predicted for a short run.
    """
    findings = [found for rule in RULES if (found := rule(window, thresholds)) is not None]
    if window.is_short:
        findings = [msgspec.structs.replace(each, predicted_speedup=None, predicted_range=None) for each in findings]
    causes = {finding.cause for finding in findings}
    return in_order([finding for finding in findings if not is_explained(finding, causes)])


def why_it_ended(window: Window, thresholds: Thresholds = THRESHOLDS) -> Finding | None:
    """Return why the run of this window has ended; None where no rule can prove it."""
    return next((found for rule in RULES if rule.ends_run and (found := rule(window, thresholds)) is not None), None)


def roots_of(cause: str) -> tuple[str, ...]:
    """Return the causes that can be the root of this one, the most specific first."""
    own = BY_CAUSE[cause]
    roots = (r for r in RULES if r.cause in own.explained_by or (cause in r.explains and not own.fallback))
    return tuple(root.cause for root in roots)


def is_explained(finding: Finding, causes: Collection[str]) -> bool:
    """Whether it says only that nothing is proven ("input_unexplained"), while one of these causes explains it."""
    has_cause = any(rule.cause in causes and finding.cause in rule.explains for rule in RULES)
    return has_cause and BY_CAUSE[finding.cause].fallback


_ROOTS = {cause: roots_of(cause) for cause in CAUSES}


def in_order(findings: Sequence[F]) -> list[F]:
    """Return the findings with their roots, as far as those are among them: each root, then its consequences."""
    causes = {finding.cause for finding in findings}
    reasons = {cause: finding.cause for finding in findings for cause in finding.because}
    roots = {of: next((root for root in _ROOTS.get(of, ()) if root in causes), reasons.get(of)) for of in causes}
    rooted = [msgspec.structs.replace(finding, root=roots[finding.cause]) for finding in findings]
    return after_roots(sorted(rooted, key=lambda f: (SEVERITIES.index(f.severity), -f.ratio)))


def after_roots(findings: Sequence[F], of_one_rank: bool = False) -> list[F]:
    """Return the findings in this order, but consequences after roots (`of_one_rank`: of their rank), circles last."""
    ordered: list[F] = []

    def take(finding: F) -> None:
        if finding not in ordered:
            ordered.append(finding)
            for each in findings:
                if each.root == finding.cause and (each.rank == finding.rank or not of_one_rank):
                    take(each)

    for finding in sorted(findings, key=lambda each: each.root is not None):
        take(finding)
    return ordered
