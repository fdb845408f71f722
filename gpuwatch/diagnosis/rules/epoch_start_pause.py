"""A long first batch of every pass over the loader: workers start, buffers fill."""

from __future__ import annotations

from statistics import median

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent


def epoch_start_pause(window: Window) -> Finding | None:
    """Found when, over two passes or more, first batches keep training waiting far longer than later ones do."""
    steps = window.steps
    firsts = [wait for wait, first in zip(steps.data_wait_s, steps.epoch_start, strict=True) if first]
    later = [wait for wait, first in zip(steps.data_wait_s, steps.epoch_start, strict=True) if not first]
    if len(firsts) < 2 or len(later) < THRESHOLDS.min_steps or window.waits_hidden_in:
        return None
    usual = median(later)
    pause = median(firsts)
    lost = sum(max(0.0, first - usual) for first in firsts)
    whole = sum(steps.data_wait_s) + sum(steps.transfer_s) + sum(steps.compute_s)
    share = lost / whole if whole > 0 else 0.0
    if pause < max(THRESHOLDS.first_batch_min_s, THRESHOLDS.first_batch_factor * usual):
        return None
    if share < THRESHOLDS.first_batch_share:
        return None
    loader = window.loader
    if loader is not None and loader.num_workers and not loader.persistent_workers:
        advice = "persistent_workers=True: workers and what they hold then live on from pass to pass"
    elif loader is not None and loader.num_workers and loader.persistent_workers:
        advice = "shorten what a worker does before its first item (opening files, shuffling an index), or make passes longer"
    else:
        advice = "shorten what the dataset does before its first item (opening files, shuffling an index), or make passes longer"
    return Finding(
        cause="epoch_start_pause",
        severity="critical" if share >= THRESHOLDS.input_share_critical else "warning",
        title="every pass over the loader begins with a pause",
        ratio=share,
        evidence=(
            Evidence("first batch", pause, "s", f"the first batch of a pass takes {duration(pause)}, later ones {duration(usual)} (medians)"),
            Evidence("passes", len(firsts), "", f"{len(firsts)} passes; the pauses take {percent(share)} of the step time"),
        ),
        advice=advice,
        predicted_speedup=round(1 / (1 - share), 2) if share < 0.99 else None,
    )  # fmt: skip
