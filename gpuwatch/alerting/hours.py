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


def hour_rules(levels: Iterable[str]) -> tuple[RecordingRule, ...]:
    """Return the rules of a group that is evaluated once a window."""
    return (
        STATE_RULE,
        *(_over_the_window(prefix, "seconds:rate<ledger_window_s>", "hours") for prefix in _kinds(levels)),
    )


def money_rules(levels: Iterable[str]) -> tuple[RecordingRule, ...]:
    """Return what that group records beside, where a price is configured."""
    return tuple(_over_the_window(prefix, "cost:per_hour", "cost") for prefix in _kinds(levels))


def _over_the_window(prefix: str, rate: str, what: str) -> RecordingRule:
    return RecordingRule(
        f"{prefix}:gpuwatch_gpu_{what}:increase<ledger_window_s>", f"{prefix}:gpuwatch_gpu_{rate} * {_WINDOW_HOURS}"
    )


def _kinds(levels: Iterable[str]) -> list[str]:
    return ["kind" if level == "fleet" else f"{level}_kind" for level in levels]
