"""How much the wait for input costs a run: over the steps after each first batch, which a pass's start explains. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from gpuwatch.diagnosis.finding import Severity
from gpuwatch.diagnosis.thresholds import THRESHOLDS


@dataclass(frozen=True)
class InputWait:
    """The wait for input, over the steps after each first batch. Times in seconds a step."""

    share: float
    """Of all the window's time, 0–1."""
    wait_s: float
    rest_s: float
    """Transfer and compute: the step time without any wait."""
    hidden_s: float = 0.0
    """Wait that cost nothing, because the device was at work."""

    @property
    def fetch_s(self) -> float:
        """What a batch takes the loader, as the training thread sees it."""
        return self.wait_s + self.hidden_s

    @property
    def severity(self) -> Severity:
        return "critical" if self.share >= THRESHOLDS.input_share_critical else "warning"

    @property
    def speedup_bound(self) -> float:
        """Upper bound of the gain: a step without any wait."""
        return (self.wait_s + self.rest_s) / self.rest_s if self.rest_s > 0 else float("inf")


def steady_input_wait(
    share: float,
    waits_s: Sequence[float],
    rests_s: Sequence[float],
    firsts: Sequence[bool],
    hidden_s: Sequence[float] = (),
) -> InputWait | None:
    """Return the wait for input when it is worth a change and not only the first batches'; else None.

    `share` is input wait's share of the ledger; the columns are a step's wait, its transfer and compute, whether it is a first
    batch, and the hidden wait (empty where that was not measured).
    """
    later = [not first for first in firsts] or [True] * len(waits_s)
    count = sum(later)
    if count < THRESHOLDS.min_steps or share < THRESHOLDS.input_share:
        return None
    wait = sum(compress(waits_s, later)) / count
    rest = sum(compress(rests_s, later)) / count
    if wait < THRESHOLDS.input_share * (wait + rest):
        return None
    hidden = sum(compress(hidden_s, later)) / count
    return InputWait(share, wait, rest, hidden)
