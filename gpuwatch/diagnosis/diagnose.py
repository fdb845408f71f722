"""Say why: `diagnose(window)` runs every rule and returns its findings, the root cause first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from gpuwatch.diagnosis.finding import SEVERITIES, Evidence, Finding, Severity
from gpuwatch.diagnosis.rules import FALLBACK_RULES, RULES
from gpuwatch.diagnosis.window import Window

F = TypeVar("F", bound=Finding)
_INPUT = (
    "input_single_process", "input_cpu", "input_cpu_saturated", "input_disk", "input_network", "artificial_limit",
    "slow_worker", "input_unexplained",
)  # fmt: skip
ROOTS: dict[str, tuple[str, ...]] = {
    "stalled": ("hung", "shm_exhaustion"),
    "too_many_workers": ("input_cpu_saturated",),
    "burst_every_n": _INPUT,
    "input_cpu": ("slow_worker",),
    "host_bound": ("sync_every_step",),
    "gpu_saturated": ("throttled",),
    **{cause: ("stalled",) for cause in _INPUT},
}
"""By consequence: the causes that explain it, the most telling first. Only what has no root is shown first."""
_FALLBACKS = {rule.__name__ for rule in FALLBACK_RULES}


def diagnose(window: Window) -> list[Finding]:
    """Return what is wrong (or right) in this window: roots first, the most severe before, then by the share at stake.

    A consequence follows its root and names it. A rule whose signal was not measured says nothing.
    """
    findings = [finding for rule in RULES if (finding := rule(window)) is not None]
    causes = {finding.cause for finding in findings}
    findings += [f for rule in FALLBACK_RULES if (f := rule(window)) is not None]
    return in_order([finding for finding in findings if not is_explained(finding, causes)])


def in_order(findings: Sequence[F]) -> list[F]:
    """Return the findings with their roots, as far as those are among them: each root, then what hangs under it."""
    causes = {finding.cause for finding in findings}
    told = {cause: finding.cause for finding in findings for cause in finding.because}
    rooted = [
        msgspec.structs.replace(
            finding,
            root=next((root for root in ROOTS.get(finding.cause, ()) if root in causes), told.get(finding.cause)),
        )
        for finding in findings
    ]
    waiting = sorted(rooted, key=lambda f: (SEVERITIES.index(f.severity), -f.ratio))
    ordered: list[F] = []

    def take(finding: F) -> None:
        ordered.append(finding)
        for each in waiting:
            if each.root == finding.cause:
                take(each)

    for finding in waiting:
        if finding.root is None:
            take(finding)
    return ordered


def is_explained(finding: Finding, causes: Collection[str]) -> bool:
    """Whether it says that nothing is proven ("input_unexplained"), while one of these causes of its family is."""
    family = finding.cause.partition("_")[0] + "_"
    return finding.cause in _FALLBACKS and any(
        (cause.startswith(family) and cause not in _FALLBACKS)
        or cause in ("epoch_start_pause", "artificial_limit", "slow_worker")
        for cause in causes
    )


__all__ = ["ROOTS", "SEVERITIES", "Evidence", "Finding", "Severity", "diagnose", "in_order", "is_explained"]
