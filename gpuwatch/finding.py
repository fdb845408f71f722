"""What a diagnosis says: a cause, the evidence that proves it, and the one change to make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    because: tuple[str, ...] = ()
    """Causes that this finding gives as its own reason already: they hang under it."""
    root: str | None = None
    """The cause that this one is a consequence of; None: it stands for itself."""
