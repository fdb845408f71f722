"""Copies to the device from memory that is not pinned."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule, speedup_without
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import TRANSFER


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="Findings")
def transfer_pageable(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when copies take a large share, and the loader is known not to pin its batches."""
    share, steps, loader = window.share(TRANSFER), window.steps, window.loader
    if share < thresholds.transfer_share or len(steps) < thresholds.min_steps or window.waits_hidden_in:
        return None
    if loader is None or loader.pin_memory is not False:
        return None
    copy_s = sum(steps.transfer_s) / len(steps)
    evidence = [
        Evidence("transfer", share, "ratio", f"copies to the device take {percent(share)} of the time ({duration(copy_s)} a step)"),
        Evidence("pinned", 0, "", "pin_memory=False: the driver copies each batch twice, and the host waits"),
    ]  # fmt: skip
    if loader.batch_bytes is not None and copy_s > 0:
        rate = loader.batch_bytes / copy_s
        evidence.append(Evidence("copy rate", rate, "bytes/s", f"the copies run at {rate / 1e9:.1f} GB/s"))
    return Finding(
        cause="transfer_pageable",
        severity="warning",
        title="batches are copied to the device from pageable memory",
        ratio=share,
        evidence=tuple(evidence),
        advice="DataLoader(pin_memory=True) with batch.to(device, non_blocking=True)",
        predicted_speedup=speedup_without(share),
    )
