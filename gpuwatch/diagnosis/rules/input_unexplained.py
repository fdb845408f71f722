"""Training waits for input and no rule can prove why: said as such."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.input_wait import (
    expectation,
    limited,
    make_plan,
    queue_evidence,
    rounded,
    wait_evidence,
    waits_at,
)
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.host.blocked import QUEUE


def input_unexplained(window: Window) -> Finding | None:
    """Found when training waits for data; the advice follows from what is known of the workers."""
    wait = window.input_wait
    if wait is None:
        return None
    evidence = [wait_evidence(window, wait), *queue_evidence(window)]
    gain = None
    advice = "look at what a fetch does: capture stacks of the loader while it waits (gpuwatch stacks)"
    if window.worker_cpu_ratios:
        mean = sum(window.worker_cpu_ratios) / len(window.worker_cpu_ratios)
        text = f"{len(window.worker_cpu_ratios)} loader workers are on the CPU {mean:.0%} of the time on average"
        evidence.append(Evidence("worker CPU", mean, "ratio", text))
        if window.worker_waits is not None:
            stood, share = max(window.worker_waits.items(), key=lambda item: item[1])
            evidence.append(
                Evidence("workers stand at", share, "ratio", f"found most often at: {stood} ({share:.0%} of the looks)")
            )
        if (waits_at(window, QUEUE) or 0.0) >= THRESHOLDS.worker_waiting:
            advice = (
                "the workers have batches ready: it is taking them over that takes the time; send fewer and larger tensors, "
                "collate in the worker, and see that the training thread has a core of its own"
            )
        elif mean < THRESHOLDS.worker_sleeping:
            have = window.loader.num_workers if window.loader is not None else None
            plan = make_plan(window, wait, on_cpu=False)
            look = "look at what they wait for (gpuwatch stacks)"
            advice = f"the workers mostly sleep: they wait for storage, the network or a lock, so cores do not limit them; {look}"
            if have and plan.workers > have:
                advice += f", or, if each waits for itself, num_workers {have} → {plan.workers}{limited(plan)}{expectation(plan)}"
                gain = (1.0, rounded(plan)[1])
    elif window.fetch_cpu_ratio is not None and (window.loader is None or window.loader.num_workers is None):
        on_cpu = window.fetch_cpu_ratio >= THRESHOLDS.fetch_on_cpu
        work = f"{min(1.0, window.fetch_cpu_ratio):.0%} of a fetch is work for the CPU"
        text = work if on_cpu else f"only {work}: it waits"
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
        predicted_speedup=gain[1] if gain else (round(wait.speedup_bound, 2) if wait.rest_s else None),
        predicted_range=gain,
    )
