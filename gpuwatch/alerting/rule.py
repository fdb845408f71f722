"""What a rule is. `<name>` in a rule's texts stands for a field of `AlertThresholds`: every number exists once, there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecordingRule:
    """One recorded series. `record` is named level:metric:operation, its window included."""

    record: str
    expr: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class AlertRule:
    """One alert. Its runbook is the file of its name in docs/runbooks."""

    name: str
    severity: str
    """`critical`: GPUs stand still or nobody is watching them. `warning`: GPU time is being lost."""
    expr: str
    for_field: str
    """The field of `AlertThresholds` that says how long the expression must hold."""
    summary: str
    """One line with the number."""
    description: str
    owner: str
    cause: str
    advice: str
    lost_gpus: str | None
    """PromQL for how many GPUs' worth of work is lost, `%f` being the alert's value; None: cannot be told."""
    keep: bool = True
    """Whether the alert is held for `keep_firing_for_s`: false where a vanished series already is what fires it."""
    lost_arguments: str = "$value"
    """Go template arguments for the verbs of `lost_gpus`."""
