"""Say why: `diagnose(window)` runs every rule and returns its findings, the root cause first."""

from __future__ import annotations

from dataclasses import dataclass
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
    gpu: str | None = None
    """UUID, for a finding about a GPU and not about a run."""


def diagnose(window: Window) -> list[Finding]:
    """Return what is wrong (or right) in this window: the most severe first, then by the share at stake.

    A rule whose signal was not measured says nothing.
    """
    from gpuwatch.rules import FALLBACK_RULES, RULES

    findings = [finding for rule in RULES if (finding := rule(window)) is not None]
    causes = {finding.cause for finding in findings}
    findings += [f for rule in FALLBACK_RULES if (f := rule(window)) is not None and not _explained(f, causes)]
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), -f.ratio))


def _explained(fallback: Finding, causes: set[str]) -> bool:
    """Whether a rule of the fallback's family ("input_…") has named the cause already."""
    family = fallback.cause.partition("_")[0] + "_"
    return any(cause.startswith(family) or cause == "epoch_start_pause" for cause in causes)
