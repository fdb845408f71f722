"""What is recorded for weeks: GPU-hours and money by kind for every level, GPUs by state. Pure data.

One sample a window, whose sum over a week is the week: the windows of consecutive samples touch and do not overlap. A thousand
nodes' week is then 2,016 samples a series, which a page reads in less than a second.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuwatch.alerting.rule import RecordingRule

STATE_RULE = RecordingRule(
    "state:gpuwatch_gpu_seconds:rate<ledger_window_s>",
    "sum by (state) (rate(gpuwatch_gpu_seconds_total[<ledger_window_s>]))",
)
_WINDOW_HOURS = "<ledger_window_seconds> / 3600"


def hour_rules(levels: Iterable[str], priced: bool) -> tuple[RecordingRule, ...]:
    """Return the rules of a group that is evaluated once a window; money only where a price is configured."""
    prefixes = ["kind" if level == "fleet" else f"{level}_kind" for level in levels]
    hours = [
        RecordingRule(
            f"{prefix}:gpuwatch_gpu_hours:increase<ledger_window_s>",
            f"{prefix}:gpuwatch_gpu_seconds:rate<ledger_window_s> * {_WINDOW_HOURS}",
        )
        for prefix in prefixes
    ]
    money = [
        RecordingRule(
            f"{prefix}:gpuwatch_gpu_cost:increase<ledger_window_s>",
            f"{prefix}:gpuwatch_gpu_cost:per_hour * {_WINDOW_HOURS}",
        )
        for prefix in prefixes
    ]
    return (STATE_RULE, *hours, *(money if priced else []))
