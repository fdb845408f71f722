"""Training waits for input and no rule can prove why: said as such."""

from __future__ import annotations

from gpuwatch.diagnosis import Evidence, Finding
from gpuwatch.rules.input_wait import steady_input_wait, wait_evidence
from gpuwatch.thresholds import THRESHOLDS
from gpuwatch.window import Window


def input_unexplained(window: Window) -> Finding | None:
    """Found when training waits for data; the advice follows from what is known of the workers."""
    wait = steady_input_wait(window)
    if wait is None:
        return None
    evidence = [wait_evidence(window, wait)]
    advice = "look at what a fetch does: capture stacks of the loader while it waits (py-spy dump --pid …)"
    if window.worker_cpu_ratios:
        mean = sum(window.worker_cpu_ratios) / len(window.worker_cpu_ratios)
        text = f"{len(window.worker_cpu_ratios)} loader workers are on the CPU {mean:.0%} of the time on average"
        evidence.append(Evidence("worker CPU", mean, "ratio", text))
        if mean < THRESHOLDS.worker_sleeping:
            advice = (
                "the workers mostly sleep: they wait for storage, the network or a lock, so cores do not limit them; "
                f"try num_workers {len(window.worker_cpu_ratios)} → {2 * len(window.worker_cpu_ratios)}, and look at "
                "what they wait for (py-spy dump --pid …)"
            )
    elif window.fetch_cpu_ratio is not None and (window.loader is None or window.loader.num_workers is None):
        on_cpu = window.fetch_cpu_ratio >= THRESHOLDS.fetch_on_cpu
        share = f"{min(1.0, window.fetch_cpu_ratio):.0%}"
        text = (
            f"{share} of a fetch is work for the CPU"
            if on_cpu
            else f"only {share} of a fetch is work for the CPU: it waits"
        )
        evidence.append(Evidence("fetch on CPU", window.fetch_cpu_ratio, "ratio", text))
        advice = (
            "make batches beside the training instead of in it: a DataLoader with num_workers, or a prefetching thread"
        )
    return Finding(
        cause="input_unexplained",
        severity=wait.severity,
        title="training waits for data; what holds the loader up is not proven",
        ratio=wait.share,
        evidence=tuple(evidence),
        advice=advice,
        predicted_speedup=round(wait.speedup_bound, 2) if wait.rest_s else None,
    )
