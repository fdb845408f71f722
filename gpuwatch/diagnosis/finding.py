"""What a diagnosis gives: a verdict, and findings: a cause, the evidence that proves it, and the one change to make."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


class Verdict(msgspec.Struct, frozen=True):
    """What decides."""

    state: str
    """input, transfer, compute, eval, checkpoint, startup, host, stalled, other or unknown."""
    ratio: float
    """That state's share of the window's time, 0–1."""
    sentence: str
    """For people, e.g. "input-bound: 62% of the time training waited for data"."""


class Evidence(msgspec.Struct, frozen=True):
    """One measured number that supports a finding."""

    what: str
    value: float
    unit: str
    """"ratio" (0–1), "s", "bytes", "cores", "" for a plain number."""
    text: str
    """The same for people, e.g. "data wait 38% of the time"."""


class Finding(msgspec.Struct, frozen=True):
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
    """Upper bound of the gain in throughput, 1.0 = none; None: not predicted."""
    predicted_range: tuple[float, float] | None = None
    """Lowest and highest gain that the evidence allows; None: the gain is only bounded."""
    gpu: str | None = None
    """UUID, for a finding about a GPU and not about a run."""
    rank: int | None = None
    """The rank that is the cause, for a straggler; None: every rank has its own findings."""
    because: tuple[str, ...] = ()
    """Causes that this finding gives as its own reason: they are its consequences in a list."""
    root: str | None = None
    """The cause that this one is a consequence of; None: it is a root itself."""

    @property
    def gain(self) -> str:
        """Return the predicted throughput, e.g. "1.20× to 2.40×", "up to 2.60×"; empty where there is no gain to expect."""
        if self.predicted_range is not None and self.predicted_range[1] >= 1.05:
            low, high = self.predicted_range
            return f"{low:.2f}× to {high:.2f}×" if high - low >= 0.05 else f"{high:.2f}×"
        if self.predicted_speedup is None or self.predicted_speedup < 1.05:
            return ""
        return f"up to {self.predicted_speedup:.2f}×"
