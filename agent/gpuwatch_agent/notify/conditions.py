"""The alerts that one node can decide without Prometheus, from its own snapshot: of runs, findings and hardware. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuwatch import api
from gpuwatch.alerting.render import alerts, hold_s, template
from gpuwatch.alerting.thresholds import XIDS_OF_PROGRAMS, AlertThresholds
from gpuwatch.diagnosis.finding import Severity
from gpuwatch.diagnosis.rules import BY_CAUSE
from gpuwatch.formatting import harmless
from gpuwatch.ledger.states import ALLOCATED_UNUSED
from gpuwatch_agent.exporter import Snapshot


@dataclass(frozen=True)
class Condition:
    """Something that is wrong now, and becomes an alert when it has been so for `hold_s`."""

    key: str  # one alert of one run, rank or GPU: notified once
    alert: str
    severity: Severity
    hold_s: float
    since_s: float  # Unix time of its first sign
    title: str
    body: str


def conditions(snapshot: Snapshot, now_s: float, thresholds: AlertThresholds) -> list[Condition]:
    """Return what is wrong now, as the rules of Prometheus would find it."""
    found: dict[str, Condition] = {}
    for alert, key, since_s, title, lines in (
        *_lost_runs(snapshot.runs),
        *_of_findings(snapshot.findings, thresholds),
        *_of_the_node(snapshot, now_s, thresholds),
    ):
        name = "/".join(str(part) for part in (alert, *key) if part is not None)
        hold, severity = hold_s(alert, thresholds), alerts()[alert]["labels"]["severity"]
        text = "\n".join(map(harmless, lines or [f"Do: {annotation(alert, 'advice')}"]))
        # Of findings with one alert the most important one comes first.
        found.setdefault(name, Condition(name, alert, severity, hold, since_s, harmless(title), text))
    return list(found.values())


_Found = tuple[str, tuple[object, ...], float, str, Sequence[str]]
"""(alert, what it is about, Unix time of its first sign, title, lines; none: the alert's advice)."""


def annotation(alert: str, name: str) -> str:
    return str(alerts()[alert]["annotations"][name])


def _of_findings(findings: Sequence[api.Finding], thresholds: AlertThresholds) -> Iterator[_Found]:
    for finding in findings:
        alert, run, rank = BY_CAUSE[finding.cause].alert, finding.run, finding.rank
        least = {"GpuStarved": thresholds.starved_ratio, "RunInefficient": thresholds.inefficient_gpus}.get(alert or "")
        is_minor = least is not None and finding.ratio <= least and not BY_CAUSE[finding.cause].costs_later
        if alert is None or finding.severity == "info" or is_minor:
            continue
        who = f"run {finding.name or run}, rank {rank}: " if run else ""
        lines = [f"- {evidence.text}" for evidence in finding.evidence if evidence.text]
        body = [*lines, f"Cause: {finding.cause}", f"Do: {finding.advice}"]
        # Causes of one alert come and go: the key does not name them.
        title = f"{who}{finding.title} ({finding.ratio:.0%})"
        yield alert, (run, rank, finding.gpu), finding.since_s or 0.0, title, body


def _lost_runs(runs: Sequence[api.Run]) -> Iterator[_Found]:
    for run in (run for run in runs if run.status == "lost"):
        alert, title = "GpuwatchTelemetryLost", "is no longer measured"
        why, do = [annotation(alert, "description")], annotation(alert, "advice")
        if (end := next((f for f in run.findings if BY_CAUSE[f.cause].ends_run), None)) is not None:
            alert, title, do = "RunKilled", end.title, end.advice
            why = [f"- {evidence.text}" for evidence in end.evidence]
        body = [*why, f"Owner: {run.user or 'unknown'}", f"Do: {do}"]
        yield alert, (run.run, run.rank), run.last_message_s, f"run {run.name}, rank {run.rank}: {title}", body


def _of_the_node(snapshot: Snapshot, now_s: float, thresholds: AlertThresholds) -> Iterator[_Found]:
    page = snapshot.page
    seen, expected = (page.values(f"gpuwatch_gpus_{each}").get(()) for each in ("seen", "expected"))
    lost = 0.0 if seen is None else (expected or 0.0) - seen
    if lost > 0:
        yield "GpuLost", (), now_s, f"{lost:g} GPU{'' if lost == 1 else 's'} fell off the bus", ()
    times = page.values("gpuwatch_gpu_last_xid_timestamp_seconds")
    for (gpu, uuid), number in page.values("gpuwatch_gpu_last_xid").items():
        xid, time_s = int(number), times.get((gpu, uuid))
        if time_s is not None and xid not in XIDS_OF_PROGRAMS and now_s - time_s < thresholds.xid_window_s:
            meaning = template("alerts.yml")["xids"].get(xid, "see NVIDIA's list of XIDs")
            title = f"GPU {gpu} ({uuid}) reported XID {xid}: {meaning}"
            yield "GpuXid", (uuid, xid), time_s, title, ()
    sizes = page.values("gpuwatch_shm_size_bytes")
    for (mount,), used in page.values("gpuwatch_shm_used_bytes").items():
        size = sizes.get((mount,), 0.0)
        if size > 0 and used / size > thresholds.shm_used_ratio:
            body = [f"Do: {BY_CAUSE['shm_exhaustion'].change}"]
            yield "ShmNearlyFull", (mount,), now_s, f"/dev/shm ({mount}) is {used / size:.0%} full", body
    for each in snapshot.gpus:
        if each.state == ALLOCATED_UNUSED:
            profile = each.name.partition(" MIG ")[2]
            title = f"GPU {each.gpu} ({each.uuid}{profile and f', {profile}'}) is {each.owner}, and no process uses it"
            yield "GpuAllocatedUnused", (each.uuid,), now_s, title, ()
