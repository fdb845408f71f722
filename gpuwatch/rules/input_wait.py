"""What the input rules share: how much the input costs, and what feeding the step would take."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from statistics import median

from gpuwatch.diagnosis import Evidence, Severity
from gpuwatch.ledger import INPUT_WAIT
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


def workers_needed(fetch_s: float, rest_s: float) -> int:
    """Return how many workers deliver a batch as often as the step takes one."""
    return max(1, ceil(fetch_s / rest_s)) if rest_s > 0 else 1


def free_cores(window: Window) -> int | None:
    """Return the cores that stay for loader workers beside one for each rank; at least 1, None when not known."""
    cores = window.host.cpu_cores if window.host else None
    return None if cores is None else max(1, cores - window.local_world_size) // window.local_world_size or 1


def shm_cost(window: Window, workers: int) -> str:
    """Return what so many workers take of /dev/shm, e.g. "; takes up to 96 MiB of /dev/shm", empty when not known."""
    loader = window.loader
    if loader is None or loader.batch_bytes is None:
        return ""
    prefetch = loader.prefetch_factor or 2
    return f"; takes up to {size(workers * prefetch * loader.batch_bytes * window.local_world_size)} of /dev/shm"
