"""What the wait for input costs a run, and what the rules about it share. Times in seconds a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gpuwatch.diagnosis.finding import Evidence, Finding, Severity, measured, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import HostFacts, Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import INPUT_WAIT

input_rule = partial(rule, explained_by=("stalled",), stacks="workers", alert="GpuStarved", runbook="GpuStarved", delays_rank="input")  # fmt: skip
"""Makes a rule about a slow loader, which has these facts in common with all of them."""


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

    def finding(
        self, cause: str, title: str, *evidence: Evidence, advice: str, gain: tuple[float, float] | None = None
    ) -> Finding:
        """Return the finding of a reason for this wait. `gain`: what the advice brings; None: at most a step without any wait."""
        return Finding(
            cause=cause,
            severity=self.severity,
            title=title,
            ratio=self.share,
            evidence=(self.evidence, *evidence),
            advice=advice,
            predicted_speedup=gain[1] if gain else self.speedup_bound,
            predicted_range=gain,
        )


def input_wait(window: Window, thresholds: Thresholds) -> InputWait | None:
    """Return the wait for input; None when it is not worth a change, is only that of first batches, or is not known.

    Where only optimizer steps bound the steps, it is not known what the time between them is.
    """
    return None if window.bounded_by_optimizer else waited(window, thresholds)


def waited(window: Window, thresholds: Thresholds) -> InputWait | None:
    """The same, whatever bounds the steps."""
    share, step = window.share(INPUT_WAIT), window.mean_step
    if window.waits_hidden_in is not None or step.steps < thresholds.min_steps or share < thresholds.input_share:
        return None
    if step.wait_s < thresholds.input_share * (step.wait_s + step.rest_s):
        return None
    severity: Severity = "critical" if share >= thresholds.input_share_critical else "warning"
    return InputWait(share, step.wait_s, step.rest_s, step.hidden_s, severity)


def queue_evidence(window: Window) -> list[Evidence]:
    """Return how often no batch was ready when one was requested; nothing without workers."""
    ready = f"({window.ready_batches:.1f} batches ready on average)" if window.ready_batches is not None else ""
    return measured(
        "empty queue", window.empty_fetch_ratio, f"the next batch was not ready at {{}} of the fetches {ready}"
    )


def place_evidence(window: Window, what: str = "a fetch") -> list[Evidence]:
    """Return the user's own function in which the training thread was most often, while it waited for a batch."""
    place = window.fetch_place
    return [] if place is None else measured("hottest function", place.ratio, f"{{}} of {what} is in {place}")


def cpu_evidence(host: HostFacts) -> list[Evidence]:
    """Return how busy the node's cores are, and how often a task waited for one."""
    busy = measured("CPU busy", host.cpu_busy_ratio, "the node's cores are {} busy")
    return busy + measured("CPU pressure", host.cpu_pressure_ratio, "some task waited for a CPU {} of the time")


def blocked_evidence(window: Window, thresholds: Thresholds, kind: str, what: str, on: str) -> Evidence | None:
    """Return the share of samples in which workers were blocked on one of `gpuwatch.host.blocked.WAITS`.

    None where that is too rare to hold them up, or was not sampled.
    """
    share = (window.worker_waits or {}).get(kind, 0.0)
    found = measured(what, share, f"workers were blocked on {on} in {{}} of the samples")
    return found[0] if share >= thresholds.worker_waiting else None
