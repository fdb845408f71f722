"""What the agent tells people by itself: the alerts of Prometheus that one node can decide, from its own snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuwatch import api
from gpuwatch.alert_rules import ALERT_RULES, AlertThresholds
from gpuwatch.rules import ENDINGS

SEVERITY = {rule.name: rule.severity for rule in ALERT_RULES}

_BY_CAUSE = {
    "held_idle": ("GpuHeldIdle", "idle_for_s"),
    "stalled": ("RunStalled", "stalled_for_s"),
    "hung": ("RunHung", "hung_for_s"),
    "straggler": ("Straggler", "straggler_for_s"),
    "epoch_start_pause": ("EpochPauses", "epoch_pause_for_s"),
    "shm_exhaustion": ("ShmForecast", "shm_forecast_for_s"),
    "throttled": ("GpuThrottled", "throttled_for_s"),
}
"""The alert of a finding, and the threshold that says how long it must hold. Causes of the input family are GpuStarved."""

_ENDINGS = [rule.__name__ for rule in ENDINGS]


@dataclass(frozen=True)
class Condition:
    """Something that is wrong now, and becomes an alert when it has been so for `hold_s`."""

    key: str
    """One alert of one run, rank or GPU: told once."""
    alert: str
    severity: str
    hold_s: float
    since_s: float
    """Unix time of its first sign."""
    title: str
    body: str


def conditions(
    runs: Sequence[api.Run], findings: Sequence[api.Finding], thresholds: AlertThresholds
) -> list[Condition]:
    """Return what is wrong now."""
    found = [each for finding in findings if (each := _of_finding(finding, thresholds)) is not None]
    found += _lost_runs(runs, thresholds)
    return list({condition.key: condition for condition in found}.values())


def _of_finding(finding: api.Finding, thresholds: AlertThresholds) -> Condition | None:
    cause = finding.cause
    if cause.startswith("input_"):
        alert, hold = "GpuStarved", "starved_for_s"
        if finding.ratio <= thresholds.starved_ratio:
            return None
    elif cause in _BY_CAUSE:
        alert, hold = _BY_CAUSE[cause]
    else:
        return None
    run, rank, gpu = finding.run, finding.rank, finding.gpu
    who = f"run {finding.name or run}, rank {rank}: " if run else ""
    lines = [f"- {evidence.text}" for evidence in finding.evidence if evidence.text]
    lines += [f"Cause: {cause}", f"Do: {finding.advice}"]
    # Causes of one family come and go for one and the same alert: the key does not name them.
    key = "/".join(str(part) for part in (alert, run, rank, gpu) if part is not None)
    return Condition(
        key,
        alert,
        SEVERITY[alert],
        getattr(thresholds, hold),
        finding.since_s or 0.0,
        f"{who}{finding.title} ({finding.ratio:.0%})",
        "\n".join(lines),
    )


def _lost_runs(runs: Sequence[api.Run], thresholds: AlertThresholds) -> Iterator[Condition]:
    for run in runs:
        if run.status == "lost":
            found = next((f for f in run.findings if f.cause in _ENDINGS), None)
            why = ["Its process died, or its messages stopped without a good-bye."]
            do = "see whether the process lives; its last words are in its own log, the kernel's in dmesg -T"
            if found is not None:
                why, do = [f"- {evidence.text}" for evidence in found.evidence], found.advice
            yield Condition(
                f"GpuwatchTelemetryLost/{run.run}/{run.rank}",
                "GpuwatchTelemetryLost",
                SEVERITY["GpuwatchTelemetryLost"],
                thresholds.telemetry_for_s,
                run.last_message_s,
                f"run {run.name}, rank {run.rank}: " + ("is no longer measured" if found is None else found.title),
                "\n".join([*why, f"Owner: {run.user or 'unknown'}", f"Do: {do}"]),
            )
