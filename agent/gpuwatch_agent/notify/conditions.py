"""The alerts that one node can decide by itself, from its own snapshot: of runs and findings, and of its hardware. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuwatch import api
from gpuwatch.alerting.render import severity
from gpuwatch.alerting.thresholds import XIDS, XIDS_OF_PROGRAMS, AlertThresholds
from gpuwatch.diagnosis.rules import ENDINGS
from gpuwatch_agent.exporter import Page

_BY_CAUSE = {
    "artificial_limit": ("GpuStarved", "starved_for_s"),
    "slow_worker": ("GpuStarved", "starved_for_s"),
    "held_idle": ("GpuHeldIdle", "idle_for_s"),
    "stalled": ("RunStalled", "stalled_for_s"),
    "hung": ("RunHung", "hung_for_s"),
    "straggler": ("Straggler", "straggler_for_s"),
    "epoch_start_pause": ("EpochPauses", "epoch_pause_for_s"),
    "shm_exhaustion": ("ShmForecast", "shm_forecast_for_s"),
    "throttled": ("GpuThrottled", "throttled_for_s"),
}
"""The alert of a finding, and the threshold for how long it must hold. `input_…` are GpuStarved too."""

_ENDINGS = [rule.__name__ for rule in ENDINGS]


@dataclass(frozen=True)
class Condition:
    """Something that is wrong now, and becomes an alert when it has been so for `hold_s`."""

    key: str
    """One alert of one run, rank or GPU: notified once."""
    alert: str
    severity: str
    hold_s: float
    since_s: float
    """Unix time of its first sign."""
    title: str
    body: str


def alert_of(cause: str) -> str | None:
    """Return the alert that covers a cause; None: findings of it notify no one."""
    return "GpuStarved" if cause.startswith("input_") else _BY_CAUSE.get(cause, (None, ""))[0]


def conditions(
    runs: Sequence[api.Run], findings: Sequence[api.Finding], thresholds: AlertThresholds
) -> list[Condition]:
    """Return what is wrong now."""
    found = [each for finding in findings if (each := _of_finding(finding, thresholds)) is not None]
    found += _lost_runs(runs, thresholds)
    return list({condition.key: condition for condition in found}.values())


def _of_finding(finding: api.Finding, thresholds: AlertThresholds) -> Condition | None:
    cause = finding.cause
    alert = alert_of(cause)
    if alert is None or (alert == "GpuStarved" and finding.ratio <= thresholds.starved_ratio):
        return None
    hold = "starved_for_s" if alert == "GpuStarved" else _BY_CAUSE[cause][1]
    run, rank, gpu = finding.run, finding.rank, finding.gpu
    who = f"run {finding.name or run}, rank {rank}: " if run else ""
    lines = [f"- {evidence.text}" for evidence in finding.evidence if evidence.text]
    lines += [f"Cause: {cause}", f"Do: {finding.advice}"]
    # Causes of one family come and go for one and the same alert: the key does not name them.
    key = "/".join(str(part) for part in (alert, run, rank, gpu) if part is not None)
    return Condition(
        key,
        alert,
        severity(alert),
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
                severity("GpuwatchTelemetryLost"),
                thresholds.telemetry_for_s,
                run.last_message_s,
                f"run {run.name}, rank {run.rank}: " + ("is no longer measured" if found is None else found.title),
                "\n".join([*why, f"Owner: {run.user or 'unknown'}", f"Do: {do}"]),
            )


def hardware_conditions(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    """Yield what is wrong with the node itself, as the rules of Prometheus would find it."""
    yield from _gpus_lost(page, now_s, thresholds)
    yield from _xids(page, now_s, thresholds)
    yield from _shm(page, now_s, thresholds)


def _gpus_lost(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    seen, expected = page.value("gpuwatch_gpus_seen"), page.value("gpuwatch_gpus_expected")
    if seen is None or expected is None or expected <= seen:
        return
    lost = expected - seen
    title = f"{lost:g} GPU{'' if lost == 1 else 's'} fell off the bus"
    body = "Do: drain the node; dmesg -T | grep -i xid says why; reset the GPU or reboot"
    yield Condition("GpuLost", "GpuLost", severity("GpuLost"), thresholds.gpu_lost_for_s, now_s, title, body)


def _xids(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    times = page.values("gpuwatch_gpu_last_xid_timestamp_seconds")
    for (gpu, uuid), number in page.values("gpuwatch_gpu_last_xid").items():
        xid, time_s = int(number), times.get((gpu, uuid))
        if time_s is None or xid in XIDS_OF_PROGRAMS or now_s - time_s >= thresholds.xid_window_s:
            continue
        what = XIDS.get(xid, "see NVIDIA's list of XIDs")
        title = f"GPU {gpu} ({uuid}) reported XID {xid}: {what}"
        body = "Do: end the run on it, drain the node, reset the GPU (nvidia-smi --gpu-reset -i N)"
        yield Condition(f"GpuXid/{uuid}/{xid}", "GpuXid", severity("GpuXid"), thresholds.xid_for_s, time_s, title, body)


def _shm(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    sizes = page.values("gpuwatch_shm_size_bytes")
    for (mount,), used in page.values("gpuwatch_shm_used_bytes").items():
        size = sizes.get((mount,), 0.0)
        if size > 0 and used / size > thresholds.shm_used_ratio:
            title = f"/dev/shm ({mount}) is {used / size:.0%} full"
            body = "Do: enlarge it (docker run --shm-size), or lower num_workers or prefetch_factor"
            key = f"ShmNearlyFull/{mount}"
            yield Condition(key, "ShmNearlyFull", severity("ShmNearlyFull"), thresholds.shm_for_s, now_s, title, body)
