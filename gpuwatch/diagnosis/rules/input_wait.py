"""What the input rules share: the words for a wait, and what feeding the step would take."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence
from gpuwatch.diagnosis.input_wait import InputWait
from gpuwatch.diagnosis.prediction import Plan, plan
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent, size


def wait_evidence(window: Window, wait: InputWait) -> Evidence:
    step_s = wait.wait_s + wait.rest_s
    return Evidence(
        "input wait",
        wait.share,
        "ratio",
        f"training waited for data {percent(wait.share)} of the time "
        f"({duration(wait.wait_s)} of an average step of {duration(step_s)})",
    )


def queue_evidence(window: Window) -> tuple[Evidence, ...]:
    """Return how often no batch was ready when one was asked for; nothing without workers."""
    empty, ready = window.empty_fetch_ratio, window.ready_batches
    if empty is None or ready is None:
        return ()
    text = f"no batch was ready at {percent(empty)} of the fetches ({ready:.1f} on average)"
    return (Evidence("empty queue", empty, "ratio", text),)


def make_plan(window: Window, wait: InputWait, *, on_cpu: bool) -> Plan:
    """Return the workers that feed the step, and what to expect of them."""
    return plan(window, wait.wait_s, wait.rest_s, on_cpu=on_cpu, hidden_s=wait.hidden_s)


def expectation(found: Plan) -> str:
    """Return what goes with a plan's advice, e.g. "; expect a step of 40 ms to 52 ms; takes up to 96 MiB of /dev/shm"."""
    low, high = found.step_s
    text = f"; expect a step of {duration(low)}" + (f" to {duration(high)}" if high > 1.05 * low else "")
    if found.queue_bytes is not None:
        text += f"; takes up to {size(found.queue_bytes)} of /dev/shm"
    if found.memory_bytes is not None:
        text += f" and {size(found.memory_bytes)} of memory in all"
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
