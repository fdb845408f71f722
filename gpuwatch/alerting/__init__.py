"""Prometheus rules, as data: `ALERT_RULES` and the recording rules. `gpuwatch.alert_rules` renders them."""

from gpuwatch.alerting.gpu_alerts import GPU_ALERTS
from gpuwatch.alerting.hours import hour_rules
from gpuwatch.alerting.node_alerts import NODE_ALERTS
from gpuwatch.alerting.rank_rules import RANK_RULES
from gpuwatch.alerting.recording import BASELINE_RULES, LEDGER_RULES, LEVELS, RUN_RULES
from gpuwatch.alerting.rule import AlertRule, RecordingRule
from gpuwatch.alerting.run_alerts import RUN_ALERTS

__all__ = [
    "ALERT_RULES",
    "BASELINE_RULES",
    "HOUR_RULES",
    "LEDGER_RULES",
    "RANK_RULES",
    "RECORDING_RULES",
    "RUN_RULES",
    "AlertRule",
    "RecordingRule",
]

ALERT_RULES: tuple[AlertRule, ...] = (*RUN_ALERTS, *GPU_ALERTS, *NODE_ALERTS)
HOUR_RULES: tuple[RecordingRule, ...] = hour_rules(LEVELS, priced=False)
RECORDING_RULES: tuple[RecordingRule, ...] = (*LEDGER_RULES, *HOUR_RULES, *RUN_RULES, *BASELINE_RULES, *RANK_RULES)
