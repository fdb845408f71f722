"""A long first batch of every pass over the loader: workers start, buffers fill."""

from __future__ import annotations

from statistics import median

from gpuwatch.diagnosis.finding import Evidence, Finding, rule, speedup_without
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent


@rule(
    explains=("input_unexplained",),
    explained_by=(),
    stacks="workers",
    alert="EpochPauses",
    runbook="EpochPauses",
)
def epoch_start_pause(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when, over two passes or more, training waits far longer for first batches than for later ones."""
    steps = window.steps
    firsts = [wait for wait, first in zip(steps.data_wait_s, steps.epoch_start, strict=True) if first]
    later = [wait for wait, first in zip(steps.data_wait_s, steps.epoch_start, strict=True) if not first]
    if len(firsts) < 2 or len(later) < thresholds.min_steps or window.waits_hidden_in:
        return None
    usual, pause = median(later), median(firsts)
    lost = sum(max(0.0, first - usual) for first in firsts)
    whole = sum(steps.data_wait_s) + sum(steps.transfer_s) + sum(steps.compute_s)
    share = lost / whole if whole > 0 else 0.0
    if pause < max(thresholds.first_batch_min_s, thresholds.first_batch_factor * usual):
        return None
    if share < thresholds.first_batch_share:
        return None
    who, loader = "a worker" if window.workers else "the dataset", window.loader
    advice = f"shorten what {who} does before its first item (opening files, shuffling an index), or make passes longer"
    if loader is not None and loader.num_workers and not loader.persistent_workers:
        advice = "persistent_workers=True: the workers, and what they have loaded, then live on from pass to pass"
    return Finding(
        cause="epoch_start_pause",
        severity="critical" if share >= thresholds.input_share_critical else "warning",
        title="every pass over the loader begins with a pause",
        ratio=share,
        evidence=(
            Evidence("first batch", pause, "s", f"the first batch of a pass takes {duration(pause)}, later ones {duration(usual)} (medians)"),
            Evidence("passes", len(firsts), "", f"{len(firsts)} passes; the pauses take {percent(share)} of the step time"),
        ),
        advice=advice,
        predicted_speedup=speedup_without(share),
    )  # fmt: skip
