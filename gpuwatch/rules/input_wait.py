"""What the input rules share: how much the input costs, and what feeding the step would take."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from gpuwatch.diagnosis import Evidence, Severity
from gpuwatch.ledger import INPUT_WAIT
from gpuwatch.prediction import Plan, plan
from gpuwatch.thresholds import THRESHOLDS
from gpuwatch.units import duration, percent, size
from gpuwatch.window import Window


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
        """Upper bound of the gain from feeding the step in time."""
        return (self.wait_s + self.rest_s) / self.rest_s if self.rest_s > 0 else float("inf")


def steady_input_wait(window: Window) -> InputWait | None:
    """Return the wait for input when it is worth a change and not only the first batches'; else None."""
    share = window.share(INPUT_WAIT)
    steps = window.steps
    later = [index for index in range(len(steps)) if not (steps.epoch_start and steps.epoch_start[index])]
    if len(later) < THRESHOLDS.min_steps or share < THRESHOLDS.input_share:
        return None
    wait = sum(steps.data_wait_s[index] for index in later) / len(later)
    rest = sum(steps.transfer_s[index] + steps.compute_s[index] for index in later) / len(later)
    if wait < THRESHOLDS.input_share * (wait + rest):
        return None
    hidden = sum(steps.hidden_wait_s[index] for index in later) / len(later) if steps.hidden_wait_s else 0.0
    return InputWait(share, wait, rest, hidden)


def median_wait_s(window: Window) -> float:
    return median(window.steps.data_wait_s) if len(window.steps) else 0.0


def wait_evidence(window: Window, wait: InputWait) -> Evidence:
    step_s = wait.wait_s + wait.rest_s
    return Evidence(
        "input wait",
        wait.share,
        "ratio",
        f"training waited for data {percent(wait.share)} of the time "
        f"({duration(wait.wait_s)} of a {duration(step_s)} step)",
    )


def make_plan(window: Window, wait: InputWait, *, on_cpu: bool) -> Plan:
    """Return the workers that feed the step, and what to expect of them."""
    return plan(window, wait.wait_s, wait.rest_s, on_cpu=on_cpu, hidden_s=wait.hidden_s)


def expectation(found: Plan) -> str:
    """Return what goes with a plan's advice, e.g. "; expect a step of 40 ms to 52 ms; takes up to 96 MiB of /dev/shm"."""
    low, high = found.step_s
    text = f"; expect a step of {duration(low)}" + (f" to {duration(high)}" if high > 1.05 * low else "")
    if found.queue_bytes is not None:
        text += f"; takes up to {size(found.queue_bytes)} of /dev/shm"
    return text


def limited(found: Plan) -> str:
    """Return what keeps a plan below the workers that would feed the step, e.g. " (9 would feed it: limited by cores)"."""
    return f" ({found.needed} would feed the step, limited by {found.limit})" if found.limit is not None else ""


def rounded(found: Plan) -> tuple[float, float]:
    """Return the plan's lowest and highest gain."""
    return round(found.speedup[0], 2), round(found.speedup[1], 2)


def waits_at(window: Window, kind: str) -> float | None:
    """Return the share of looks in which the workers stood at this; None where they were not looked at."""
    return None if window.worker_waits is None else window.worker_waits.get(kind, 0.0)
