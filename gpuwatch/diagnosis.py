"""Say why: `diagnose(window)` runs every rule and returns its findings, the root cause first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpuwatch.window import Window

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True)
class Evidence:
    """One measured number that supports a finding."""

    what: str
    value: float
    unit: str
    """"ratio" (0–1), "s", "bytes", "cores", "" for a plain number."""
    text: str
    """The same for people, e.g. "data wait 38% of the time"."""


@dataclass(frozen=True)
class Finding:
    """A cause, proven by evidence, with the one change to make."""

    cause: str
    severity: Severity
    title: str
    """The cause in a few words, e.g. "the loader is the bottleneck: it runs in the training process"."""
    ratio: float
    """The share of time (or of a capacity) at stake, 0–1: what findings are ordered by."""
    evidence: tuple[Evidence, ...]
    advice: str
    """One concrete change, with what it costs."""
    predicted_speedup: float | None = None
    """Upper bound of the gain in throughput, 1.0 = none; None: cannot be said."""
    predicted_range: tuple[float, float] | None = None
    """Lowest and highest gain that the evidence allows, for advice whose outcome is calculated and not only bounded."""
    gpu: str | None = None
    """UUID, for a finding about a GPU and not about a run."""
    rank: int | None = None
    """The rank that is the cause, for a straggler."""
    root: str | None = None
    """The cause that this one is a consequence of; None: it stands for itself."""


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


def diagnose(window: Window) -> list[Finding]:
    """Return what is wrong (or right) in this window: roots first, the most severe before, then by the share at stake.

    A consequence follows its root and names it. A rule whose signal was not measured says nothing.
    """
    from gpuwatch.rules import FALLBACK_RULES, RULES

    findings = [finding for rule in RULES if (finding := rule(window)) is not None]
    causes = {finding.cause for finding in findings}
    findings += [f for rule in FALLBACK_RULES if (f := rule(window)) is not None and not _explained(f, causes)]
    return in_order(findings)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with their roots, as far as those are among them: each root, then what hangs under it."""
    causes = {finding.cause for finding in findings}
    rooted = [
        replace(finding, root=next((root for root in ROOTS.get(finding.cause, ()) if root in causes), None))
        for finding in findings
    ]
    waiting = sorted(rooted, key=lambda f: (SEVERITIES.index(f.severity), -f.ratio))
    ordered: list[Finding] = []

    def take(finding: Finding) -> None:
        ordered.append(finding)
        for each in waiting:
            if each.root == finding.cause:
                take(each)

    for finding in waiting:
        if finding.root is None:
            take(finding)
    return ordered


def _explained(fallback: Finding, causes: set[str]) -> bool:
    """Whether a rule of the fallback's family ("input_…") has named the cause already."""
    family = fallback.cause.partition("_")[0] + "_"
    return any(
        cause.startswith(family) or cause in ("epoch_start_pause", "artificial_limit", "slow_worker")
        for cause in causes
    )
