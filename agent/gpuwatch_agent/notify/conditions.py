"""The alerts that one node can decide without Prometheus, from its own snapshot: of runs, findings and hardware. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuwatch import api
from gpuwatch.alerting.render import hold_s, severity
from gpuwatch.alerting.thresholds import XIDS, XIDS_OF_PROGRAMS, AlertThresholds
from gpuwatch.diagnosis.finding import Severity
from gpuwatch.diagnosis.rules import BY_CAUSE
from gpuwatch.ledger.states import ALLOCATED_UNUSED
from gpuwatch_agent.exporter import Page, Snapshot


@dataclass(frozen=True)
class Condition:
    """Something that is wrong now, and becomes an alert when it has been so for `hold_s`."""

    key: str
    """One alert of one run, rank or GPU: notified once."""
    alert: str
    severity: Severity
    hold_s: float
    since_s: float
    """Unix time of its first sign."""
    title: str
    body: str


def conditions(snapshot: Snapshot, now_s: float, thresholds: AlertThresholds) -> list[Condition]:
    """Return what is wrong now, as the rules of Prometheus would find it."""
    page = snapshot.page
    found = [
        *_of_findings(snapshot.findings, thresholds),
        *_lost_runs(snapshot.runs, thresholds),
        *_lost_gpus(page, now_s, thresholds),
        *_xids(page, now_s, thresholds),
        *_shm(page, now_s, thresholds),
        *_unused(snapshot.gpus, now_s, thresholds),
    ]
    return list({condition.key: condition for condition in found}.values())


def _condition(
    alert: str, key: Sequence[object], since_s: float, title: str, body: str, thresholds: AlertThresholds
) -> Condition:
    name = "/".join(str(part) for part in (alert, *key) if part is not None)
    return Condition(name, alert, severity(alert), hold_s(alert, thresholds), since_s, title, body)


def _of_findings(findings: Sequence[api.Finding], thresholds: AlertThresholds) -> Iterator[Condition]:
    for finding in findings:
        alert = BY_CAUSE[finding.cause].alert
        if alert is None or (alert == "GpuStarved" and finding.ratio <= thresholds.starved_ratio):
            continue
        if (
            alert == "RunInefficient"
            and finding.ratio <= thresholds.inefficient_gpus
            and finding.cause != "memory_creep"
        ):
            continue
        run, rank = finding.run, finding.rank
        who = f"run {finding.name or run}, rank {rank}: " if run else ""
        lines = [f"- {evidence.text}" for evidence in finding.evidence if evidence.text]
        body = "\n".join([*lines, f"Cause: {finding.cause}", f"Do: {finding.advice}"])
        # Causes of one alert come and go: the key does not name them.
        title = f"{who}{finding.title} ({finding.ratio:.0%})"
        yield _condition(alert, (run, rank, finding.gpu), finding.since_s or 0.0, title, body, thresholds)


def _lost_runs(runs: Sequence[api.Run], thresholds: AlertThresholds) -> Iterator[Condition]:
    for run in (run for run in runs if run.status == "lost"):
        end = next((f for f in run.findings if BY_CAUSE[f.cause].ends_run), None)
        why = ["Its process died, or its messages stopped before it closed the run."]
        do = "check whether the process is alive; see its own log, and the kernel's (dmesg -T)"
        if end is not None:
            why, do = [f"- {evidence.text}" for evidence in end.evidence], end.advice
        title = f"run {run.name}, rank {run.rank}: " + ("is no longer measured" if end is None else end.title)
        body = "\n".join([*why, f"Owner: {run.user or 'unknown'}", f"Do: {do}"])
        alert = "GpuwatchTelemetryLost" if end is None else "RunKilled"
        yield _condition(alert, (run.run, run.rank), run.last_message_s, title, body, thresholds)


def _lost_gpus(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    lost = (page.value("gpuwatch_gpus_expected") or 0.0) - (page.value("gpuwatch_gpus_seen") or 0.0)
    if page.value("gpuwatch_gpus_seen") is not None and lost > 0:
        title = f"{lost:g} GPU{'' if lost == 1 else 's'} fell off the bus"
        body = "Do: drain the node; dmesg -T | grep -i xid shows the reason; reset the GPU or reboot"
        yield _condition("GpuLost", (), now_s, title, body, thresholds)


def _xids(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    times = page.values("gpuwatch_gpu_last_xid_timestamp_seconds")
    for (gpu, uuid), number in page.values("gpuwatch_gpu_last_xid").items():
        xid, time_s = int(number), times.get((gpu, uuid))
        if time_s is None or xid in XIDS_OF_PROGRAMS or now_s - time_s >= thresholds.xid_window_s:
            continue
        title = f"GPU {gpu} ({uuid}) reported XID {xid}: {XIDS.get(xid, 'see the list of XIDs by NVIDIA')}"
        body = "Do: end the run on it, drain the node, reset the GPU (nvidia-smi --gpu-reset -i N)"
        yield _condition("GpuXid", (uuid, xid), time_s, title, body, thresholds)


def _shm(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    sizes = page.values("gpuwatch_shm_size_bytes")
    for (mount,), used in page.values("gpuwatch_shm_used_bytes").items():
        size = sizes.get((mount,), 0.0)
        if size > 0 and used / size > thresholds.shm_used_ratio:
            title = f"/dev/shm ({mount}) is {used / size:.0%} full"
            body = "Do: enlarge it (docker run --shm-size), or lower num_workers or prefetch_factor"
            yield _condition("ShmNearlyFull", (mount,), now_s, title, body, thresholds)


def _unused(gpus: Sequence[api.Gpu], now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    for gpu in gpus:
        if gpu.state == ALLOCATED_UNUSED:
            title = f"GPU {gpu.gpu} ({gpu.uuid}) is {gpu.owner}, and no process uses it"
            body = "Do: ask for fewer GPUs, or release the allocation"
            yield _condition("GpuAllocatedUnused", (gpu.uuid,), now_s, title, body, thresholds)
