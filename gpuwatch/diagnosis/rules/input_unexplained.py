"""Training waits for input and no rule can prove why: reported as such."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.input_wait import blocked_evidence, input_wait, queue_evidence
from gpuwatch.diagnosis.prediction import plan_for
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent
from gpuwatch.host.blocked import QUEUE


@rule(
    explains=("burst_every_n",),
    explained_by=("stalled",),
    stacks="workers",
    alert="GpuStarved",
    runbook="GpuStarved",
    delays_rank="input",
    fallback=True,
)
def input_unexplained(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for data; the advice follows from what is known of the workers."""
    wait = input_wait(window, thresholds)
    if wait is None:
        return None
    evidence, gain = [wait.evidence, *queue_evidence(window)], None
    advice = "capture the loader's stacks while training waits, to see what a fetch does (gpuwatch stacks)"
    ratios, fetch = window.worker_cpu_ratios, window.fetch_cpu_ratio
    if ratios:
        mean = sum(ratios) / len(ratios)
        text = f"{len(ratios)} loader workers are on the CPU {percent(mean)} of the time on average"
        evidence.append(Evidence("worker CPU", mean, "ratio", text))
        if window.worker_waits is not None:
            kind, share = max(window.worker_waits.items(), key=lambda item: item[1])
            text = f"most often they were found at: {kind} ({percent(share)} of the samples)"
            evidence.append(Evidence("workers blocked on", share, "ratio", text))
        if blocked_evidence(window, thresholds, QUEUE, "workers idle", "their queue") is not None:
            advice = (
                "send fewer and larger tensors, collate in the worker, and leave one core to the training thread: batches are ready, but "
                "taking them over is slow"
            )
        elif mean < thresholds.worker_sleeping:
            advice = "find out what the workers wait for, storage, the network or a lock (gpuwatch stacks): they mostly sleep, so cores do not limit them"
            plan = plan_for(window, wait, on_cpu=False)
            if window.workers and plan.workers > window.workers:
                advice += f"; if each waits independently, num_workers {window.workers} → {plan.workers}{plan.note}"
                gain = (1.0, plan.gain[1])
    elif fetch is not None and window.workers is None:
        text = f"{percent(min(1.0, fetch))} of a fetch is CPU work"
        text = text if fetch >= thresholds.fetch_on_cpu else f"only {text}: it waits"
        evidence.append(Evidence("fetch on CPU", fetch, "ratio", text))
        advice = "make batches in the background: a DataLoader with num_workers, or a prefetching thread"
    return Finding(
        cause="input_unexplained",
        severity=wait.severity,
        title="training waits for data; the reason is not proven",
        ratio=wait.share,
        evidence=tuple(evidence),
        advice=advice,
        predicted_speedup=gain[1] if gain else wait.speedup_bound,
        predicted_range=gain,
    )
