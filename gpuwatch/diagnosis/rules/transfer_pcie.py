"""Copies to the device that run as fast as the bus allows."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule, speedup_without
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent, size
from gpuwatch.ledger.states import TRANSFER


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="Findings")
def transfer_pcie(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when copies from pinned memory take a large share, at a rate that only the bus limits."""
    share, steps, loader = window.share(TRANSFER), window.steps, window.loader
    if share < thresholds.transfer_share or len(steps) < thresholds.min_steps:
        return None
    if loader is None or loader.pin_memory is not True or loader.batch_bytes is None:
        return None
    copy_s = sum(steps.transfer_s) / len(steps)
    if copy_s <= 0 or loader.batch_bytes / copy_s < thresholds.pcie_bytes_per_s:
        return None
    rate = loader.batch_bytes / copy_s
    return Finding(
        cause="transfer_pcie",
        severity="warning",
        title="copies to the device saturate the bus",
        ratio=share,
        evidence=(
            Evidence("transfer", share, "ratio", f"copies to the device take {percent(share)} of the time ({duration(copy_s)} a step)"),
            Evidence("copy rate", rate, "bytes/s", f"batches of {size(loader.batch_bytes)} are copied from pinned memory at {rate / 1e9:.1f} GB/s"),
        ),
        advice="send fewer bytes (uint8 images, converted and normalised on the device), or copy the next batch on a separate stream during compute",
        predicted_speedup=speedup_without(share),
    )  # fmt: skip
