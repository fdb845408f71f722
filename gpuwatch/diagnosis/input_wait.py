"""What the wait for input costs a run, and the evidence that the input rules share. Times in seconds a step."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwatch.diagnosis.finding import Evidence, Severity
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import INPUT_WAIT


@dataclass(frozen=True)
class InputWait:
    """The wait for input, first batches left out: `epoch_start_pause` is about those."""

    share: float
    """Of all the window's time, 0–1."""
    wait_s: float
    rest_s: float
    """Transfer and compute: the step without any wait."""
    hidden_s: float
    """Wait that cost nothing, because the device was at work."""
    severity: Severity

    @property
    def speedup_bound(self) -> float | None:
        """Upper bound of the gain: a step without any wait. None where the step is nothing else."""
        return round((self.wait_s + self.rest_s) / self.rest_s, 2) if self.rest_s else None

    @property
    def evidence(self) -> Evidence:
        text = f"training waited for data {percent(self.share)} of the time"
        mean = f"on average {duration(self.wait_s)} of a {duration(self.wait_s + self.rest_s)} step"
        return Evidence("input wait", self.share, "ratio", f"{text} ({mean})")


def input_wait(window: Window, thresholds: Thresholds) -> InputWait | None:
    """Return the wait for input; None when it is not worth a change, is only that of first batches, or is not known."""
    share, step = window.share(INPUT_WAIT), window.mean_step
    if window.waits_hidden_in is not None or step.steps < thresholds.min_steps or share < thresholds.input_share:
        return None
    if step.wait_s < thresholds.input_share * (step.wait_s + step.rest_s):
        return None
    severity: Severity = "critical" if share >= thresholds.input_share_critical else "warning"
    return InputWait(share, step.wait_s, step.rest_s, step.hidden_s, severity)


def queue_evidence(window: Window) -> tuple[Evidence, ...]:
    """Return how often no batch was ready when one was requested; nothing without workers."""
    empty, ready = window.empty_fetch_ratio, window.ready_batches
    if empty is None or ready is None:
        return ()
    text = f"the queue was empty at {percent(empty)} of the fetches ({ready:.1f} batches ready on average)"
    return (Evidence("empty queue", empty, "ratio", text),)


def blocked_evidence(window: Window, thresholds: Thresholds, kind: str, what: str, on: str) -> Evidence | None:
    """Return the share of samples in which workers were blocked on one of `gpuwatch.host.blocked.WAITS`.

    None where that is too rare to hold them up, or was not sampled.
    """
    share = 0.0 if window.worker_waits is None else window.worker_waits.get(kind, 0.0)
    if share < thresholds.worker_waiting:
        return None
    return Evidence(what, share, "ratio", f"workers were blocked on {on} in {percent(share)} of the samples")
