"""One loader worker that works while the others wait for it: batches are taken in order."""

from __future__ import annotations

from statistics import median

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.burst_every_n import autocorrelation, longest_pass
from gpuwatch.diagnosis.rules.input_wait import wait_evidence
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window


def slow_worker(window: Window) -> Finding | None:
    """Found when training waits once in every round of the workers, and one of them alone is busy on the CPU.

    Batches come in the order in which they were asked for, so that the fast workers' queues fill up and they stand still.
    """
    wait, ratios, loader = window.input_wait, (window.worker_busy_ratios or window.worker_cpu_ratios), window.loader
    if wait is None or not ratios or len(ratios) < 3 or loader is None or loader.num_workers != len(ratios):
        return None
    waits = longest_pass(window)
    if len(waits) < max(4 * len(ratios), THRESHOLDS.min_steps):
        return None
    if autocorrelation(waits, len(ratios)) < THRESHOLDS.burst_correlation:
        return None
    busiest, *others = sorted(ratios, reverse=True)
    usual = median(others)
    if busiest < THRESHOLDS.worker_busy or usual > THRESHOLDS.worker_uneven * busiest:
        return None
    return Finding(
        cause="slow_worker",
        severity=wait.severity,
        title="one loader worker is late again and again, and the others wait for it",
        ratio=wait.share,
        evidence=(
            wait_evidence(window, wait),
            Evidence("slowest worker", busiest, "ratio", f"one worker is busy {busiest:.0%} of the time, the other {len(others)} {usual:.0%} (median)"),
        ),
        advice=(
            "its part of the data costs more: shards or files of uneven size, or single items without a bound; spread them, or bound "
            "the work of one item"
        ),
        predicted_speedup=round(wait.speedup_bound, 2) if wait.rest_s else None,
    )  # fmt: skip
