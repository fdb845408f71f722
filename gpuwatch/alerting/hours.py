"""What is recorded for weeks: GPU-hours and money by kind for every level, GPUs by state. Pure data.

One sample a window, whose sum over a week is the week: the windows of consecutive samples touch and do not overlap. A thousand
nodes' week is then 2,016 samples a series, which a page reads in less than a second.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuwatch.alerting.rule import RecordingRule
from gpuwatch.ledger import GPU_STATES

_STATES_A_GROUP = 4
_STATE_RULES = tuple(
    RecordingRule(
        "state:gpuwatch_gpu_seconds:rate<ledger_window_s>",
        f'sum(rate(gpuwatch_gpu_seconds_total{{state="{state}"}}[<ledger_window_s>]))',
        (("state", state),),
    )
    for state in GPU_STATES
)
STATE_GROUPS: tuple[tuple[RecordingRule, ...], ...] = tuple(
    _STATE_RULES[first : first + _STATES_A_GROUP] for first in range(0, len(_STATE_RULES), _STATES_A_GROUP)
)
"""All states of a thousand nodes' GPUs are 120,000 series, which a single group reads in two seconds."""
_WINDOW_HOURS = "<ledger_window_seconds> / 3600"


def hour_rules(levels: Iterable[str]) -> tuple[RecordingRule, ...]:
    """Return the rules of a group that is evaluated once a window."""
    return tuple(_over_the_window(prefix, "seconds:rate<ledger_window_s>", "hours") for prefix in _kinds(levels))


def money_rules(levels: Iterable[str]) -> tuple[RecordingRule, ...]:
    """Return what that group records beside, where a price is configured."""
    return tuple(_over_the_window(prefix, "cost:per_hour", "cost") for prefix in _kinds(levels))


def _over_the_window(prefix: str, rate: str, what: str) -> RecordingRule:
    return RecordingRule(
        f"{prefix}:gpuwatch_gpu_{what}:increase<ledger_window_s>", f"{prefix}:gpuwatch_gpu_{rate} * {_WINDOW_HOURS}"
    )


def _kinds(levels: Iterable[str]) -> list[str]:
    return ["kind" if level == "fleet" else f"{level}_kind" for level in levels]
