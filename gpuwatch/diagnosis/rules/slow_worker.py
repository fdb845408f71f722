"""One loader worker that works while the others wait for it: batches are taken in order."""

from __future__ import annotations

from statistics import median

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.input_wait import input_wait
from gpuwatch.diagnosis.rules.burst_every_n import round_correlation
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent


@rule(
    explains=("burst_every_n", "input_cpu", "input_unexplained"),
    explained_by=("stalled",),
    stacks="workers",
    alert="GpuStarved",
    runbook="GpuStarved",
    delays_rank="input",
)
def slow_worker(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits once in every round of the workers, and one of them alone is busy on the CPU.

    Batches are delivered in the order of the requests, so that the queues of the faster workers fill up and they wait.
    """
    wait, ratios = input_wait(window, thresholds), window.busy_ratios
    if wait is None or len(ratios) < 3 or window.workers != len(ratios):
        return None
    if (round_correlation(window, thresholds, len(ratios)) or 0.0) < thresholds.burst_correlation:
        return None
    busiest, *others = sorted(ratios, reverse=True)
    usual = median(others)
    if busiest < thresholds.worker_busy or usual > thresholds.worker_uneven * busiest:
        return None
    text = f"one worker is busy {percent(busiest)} of the time, the other {len(others)} {percent(usual)} (median)"
    return Finding(
        cause="slow_worker",
        severity=wait.severity,
        title="one loader worker is slow, and the others wait for it",
        ratio=wait.share,
        evidence=(wait.evidence, Evidence("slowest worker", busiest, "ratio", text)),
        advice="spread expensive items and large shards over the workers, or bound the work of one item: this worker's part of the data costs more",
        predicted_speedup=wait.speedup_bound,
    )
