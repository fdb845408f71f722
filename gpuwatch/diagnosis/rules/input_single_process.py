"""`num_workers=0`: batches are made in the training process, while the device waits."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.input_wait import expectation, limited, make_plan, rounded, wait_evidence
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent


def input_single_process(window: Window) -> Finding | None:
    """Found when training waits for a loader that is known to have no workers."""
    wait = window.input_wait
    if wait is None or window.loader is None or window.loader.num_workers != 0:
        return None
    evidence = [
        wait_evidence(window, wait),
        Evidence("loader workers", 0, "", "num_workers=0"),
    ]
    computing = window.fetch_cpu_ratio is None or window.fetch_cpu_ratio >= THRESHOLDS.fetch_on_cpu
    if window.fetch_cpu_ratio is not None:
        share = percent(min(1.0, window.fetch_cpu_ratio))
        text = f"{share} of a fetch is work for the CPU (decoding, augmenting)"
        if not computing:
            text = f"only {share} of a fetch is work for the CPU: it waits for the disk, the network or a lock"
        evidence.append(Evidence("fetch on CPU", window.fetch_cpu_ratio, "ratio", text))
    plan = make_plan(window, wait, on_cpu=computing)
    return Finding(
        cause="input_single_process",
        severity=wait.severity,
        title="batches are made in the training process",
        ratio=wait.share,
        evidence=tuple(evidence),
        advice=f"DataLoader(num_workers={plan.workers}, persistent_workers=True){limited(plan)}{expectation(plan)}",
        predicted_speedup=rounded(plan)[1],
        predicted_range=rounded(plan),
    )
