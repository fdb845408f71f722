"""Prometheus rules, as data: `ALERT_RULES` and the groups of recording rules. `gpuwatch.alert_rules` renders them."""

from gpuwatch.alerting.gpu_alerts import GPU_ALERTS
from gpuwatch.alerting.hours import STATE_GROUPS, hour_rules
from gpuwatch.alerting.node_alerts import NODE_ALERTS
from gpuwatch.alerting.rank_rules import RANK_RULES, STRAGGLER_ACROSS_NODES
from gpuwatch.alerting.recording import (
    BASELINE_INTERVAL_S,
    BASELINE_RULES,
    HEALTH_RULES,
    KIND_RULES,
    LEDGER_INTERVAL_S,
    LEVEL_RULES,
    LEVELS,
    PROGRESS_RULES,
    RUN_RULES,
    TRAINING_RULES,
    WHOLE_RULES,
)
from gpuwatch.alerting.rule import AlertRule, RecordingRule
from gpuwatch.alerting.run_alerts import RUN_ALERTS

__all__ = [
    "ALERT_GROUPS", "ALERT_RULES", "INTERVALS_S", "RECORDING_GROUPS", "RECORDING_RULES", "AlertRule", "RecordingRule",
]  # fmt: skip

RECORDING_GROUPS: dict[str, tuple[RecordingRule, ...]] = {
    "gpuwatch-gpus": WHOLE_RULES,
    **{f"gpuwatch-gpus-{kind}": rules for kind, rules in KIND_RULES.items()},
    "gpuwatch-levels": LEVEL_RULES,
    "gpuwatch-training": TRAINING_RULES,
    "gpuwatch-progress": PROGRESS_RULES,
    "gpuwatch-hours": hour_rules(LEVELS),
    **{f"gpuwatch-states-{number}": rules for number, rules in enumerate(STATE_GROUPS)},
    "gpuwatch-runs": RUN_RULES,
    "gpuwatch-ranks": RANK_RULES,
    "gpuwatch-health": HEALTH_RULES,
    "gpuwatch-baselines": BASELINE_RULES,
}
"""By the group's name. Prometheus evaluates groups side by side and a group's rules in their order."""
INTERVALS_S: dict[str, float] = {
    **{name: LEDGER_INTERVAL_S for name in RECORDING_GROUPS if name.startswith(("gpuwatch-gpus", "gpuwatch-levels"))},
    **{
        name: BASELINE_INTERVAL_S
        for name in RECORDING_GROUPS
        if name.startswith(("gpuwatch-states", "gpuwatch-baselines"))
    },
}
"""Of the groups that need not be evaluated as often as the alerts."""
ALERT_GROUPS: dict[str, tuple[AlertRule, ...]] = {
    "gpuwatch-alerts-starved": tuple(rule for rule in RUN_ALERTS if rule.name == "GpuStarved"),
    "gpuwatch-alerts-runs": (
        *(rule for rule in RUN_ALERTS if rule.name != "GpuStarved"),
        STRAGGLER_ACROSS_NODES,
    ),
    "gpuwatch-alerts-gpus": GPU_ALERTS,
    "gpuwatch-alerts-nodes": NODE_ALERTS,
}

ALERT_RULES: tuple[AlertRule, ...] = tuple(rule for rules in ALERT_GROUPS.values() for rule in rules)
RECORDING_RULES: tuple[RecordingRule, ...] = tuple(rule for rules in RECORDING_GROUPS.values() for rule in rules)
