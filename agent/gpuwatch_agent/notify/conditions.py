"""Alerts that one node can decide without Prometheus, from its own snapshot: of runs, findings and hardware. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwatch import api
from gpuwatch.alerting.render import alerts, hold_s, template
from gpuwatch.alerting.thresholds import XIDS_OF_PROGRAMS, AlertThresholds, Prices
from gpuwatch.config import Config
from gpuwatch.diagnosis.finding import Severity
from gpuwatch.diagnosis.rates import money
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


def conditions(snapshot: Snapshot, now_s: float, config: Config) -> list[Condition]:
    """Return what is wrong now, as the rules of Prometheus would find it."""
    found: dict[str, Condition] = {}
    rows, thresholds = list(_rows(snapshot)), config.alerts
    for alert, key, since_s, title, lines, of, ratio in (
        *_lost_runs(snapshot.runs),
        *_of_findings(snapshot, thresholds),
        *_of_the_node(snapshot, now_s, thresholds),
    ):
        name = "/".join(str(part) for part in (alert, *key) if part is not None)
        hold, severity = hold_s(alert, thresholds), alerts()[alert]["labels"]["severity"]
        lines = [*_stake(rows, alert, of, ratio, config.prices), *(lines or [f"Do: {annotation(alert, 'advice')}"])]
        text = "\n".join(map(harmless, lines))
        # Of findings with one alert the most important one comes first.
        found.setdefault(name, Condition(name, alert, severity, hold, since_s, harmless(title), text))
    return list(found.values())


_Row = Mapping[str, str]
_Found = tuple[str, tuple[object, ...], float, str, Sequence[str], _Row, float]
"""(alert, subject, Unix time of first sign, title, lines (none: advice), labels of `_rows`, these GPUs' lost share)."""


def _owner(*whose: str | None) -> str:
    named = zip(("user", "job", "namespace", "pod"), whose, strict=False)
    return ", ".join(f"{what} {each}" for what, each in named if each)


def _rows(snapshot: Snapshot) -> Iterator[_Row]:
    """Yield the runs and the GPUs of the node, and whose they are."""
    models = {gpu.uuid: gpu.name for gpu in snapshot.gpus}
    for each in snapshot.runs:
        about = each.owner or api.Owner()
        owner = _owner(each.user, about.job or each.job, about.namespace, about.pod)
        yield {"run": each.run, "rank": str(each.rank), "owner": owner}
    for gpu, uuid, run, rank, *whose in snapshot.page.values("gpuwatch_gpu_owner_info"):
        yield dict(gpu=gpu, UUID=uuid, model=models.get(uuid, ""), run=run, rank=rank, owner=_owner(*whose))


def _stake(rows: Sequence[_Row], alert: str, of: _Row, ratio: float, prices: Prices) -> Iterator[str]:
    """Yield which GPUs it is about, whose they are, and the cost a day, if known; `of` is empty for the whole node."""
    rows = [each for each in rows if of.items() <= each.items()]
    gpus = [each for each in rows if "UUID" in each and (of or ":" not in each["gpu"])]  # else instances count twice
    if of and gpus:
        yield "GPUs: " + ", ".join(f"GPU {each['gpu']} ({each['UUID']})" for each in gpus)
    yield "Owner: " + ("; ".join(dict.fromkeys(each["owner"] for each in rows if each["owner"])) or "unknown")
    cost, models = annotation(alert, "cost"), [each["model"] for each in gpus]
    hours, price = (24 * ratio * sum(each.hourly(models)) for each in (Prices(gpu_hour=1.0), prices))
    if "{" not in cost:
        yield f"Cost: {cost}"
    elif hours and alert != "Straggler":  # which costs the other ranks'; else it is a query of Prometheus
        yield f"Cost: {hours:.1f} GPU-hours a day" + (f" ({money(price, prices.currency)})" if price else "")


def annotation(alert: str, name: str) -> str:
    return str(alerts()[alert]["annotations"][name])


def _of_findings(snapshot: Snapshot, thresholds: AlertThresholds) -> Iterator[_Found]:
    ranks = Counter[str | None](run.run for run in snapshot.runs if run.status == "running")
    for finding in snapshot.findings:
        alert, run, rank = BY_CAUSE[finding.cause].alert, finding.run, finding.rank
        of_each = thresholds.inefficient_gpus / max(1, ranks[run])
        least = {"GpuStarved": thresholds.starved_ratio, "RunInefficient": of_each}.get(alert or "")
        is_minor = least is not None and finding.ratio <= least and not BY_CAUSE[finding.cause].costs_later
        if alert is None or finding.severity == "info" or is_minor:
            continue
        who = f"run {finding.name or run}, rank {rank}: " if run else ""
        lines = [f"- {evidence.text}" for evidence in finding.evidence if evidence.text]
        body = [*lines, f"Cause: {finding.cause}", f"Do: {finding.advice}"]
        # Causes of one alert come and go: the key does not name them.
        title = f"{who}{finding.title} ({finding.ratio:.0%})"
        of = {"UUID": finding.gpu} if finding.gpu else {"run": run or "", "rank": str(rank)}
        ratio = 0.0 if BY_CAUSE[finding.cause].costs_later else finding.ratio
        yield alert, (run, rank, finding.gpu), finding.since_s or 0.0, title, body, of, ratio


def _lost_runs(runs: Sequence[api.Run]) -> Iterator[_Found]:
    for run in (run for run in runs if run.status == "lost"):
        alert, title = "GpuwatchTelemetryLost", "is no longer measured"
        why, do = [annotation(alert, "description")], annotation(alert, "advice")
        if (end := next((f for f in run.findings if BY_CAUSE[f.cause].ends_run), None)) is not None:
            alert, title, do = "RunKilled", end.title, end.advice
            why = [f"- {evidence.text}" for evidence in end.evidence]
        title, of = f"run {run.name}, rank {run.rank}: {title}", {"run": run.run, "rank": str(run.rank)}
        yield alert, (run.run, run.rank), run.last_message_s, title, [*why, f"Do: {do}"], of, 0.0


def _of_the_node(snapshot: Snapshot, now_s: float, thresholds: AlertThresholds) -> Iterator[_Found]:
    page = snapshot.page
    seen, expected = (page.values(f"gpuwatch_gpus_{each}").get(()) for each in ("seen", "expected"))
    lost = 0.0 if seen is None else (expected or 0.0) - seen
    if lost > 0:
        missing = (f"GPU {gpu.gpu} ({gpu.uuid})" for gpu in snapshot.gpus if not gpu.name and ":" not in gpu.gpu)
        title = f"{lost:g} GPU{'' if lost == 1 else 's'} fell off the bus: {', '.join(missing) or 'not known which'}"
        yield "GpuLost", (), now_s, title, (), {}, lost / (expected or 1.0)
    times = page.values("gpuwatch_gpu_last_xid_timestamp_seconds")
    for (gpu, uuid), number in page.values("gpuwatch_gpu_last_xid").items():
        xid, time_s = int(number), times.get((gpu, uuid))
        if time_s is not None and xid not in XIDS_OF_PROGRAMS and now_s - time_s < thresholds.xid_window_s:
            meaning = template("alerts.yml")["xids"].get(xid, "see NVIDIA's list of XIDs")
            title = f"GPU {gpu} ({uuid}) reported XID {xid}: {meaning}"
            yield "GpuXid", (uuid, xid), time_s, title, (), {"UUID": uuid}, 1.0
    sizes = page.values("gpuwatch_shm_size_bytes")
    for (mount,), used in page.values("gpuwatch_shm_used_bytes").items():
        size = sizes.get((mount,), 0.0)
        if size > 0 and used / size > thresholds.shm_used_ratio:
            title, of = f"/dev/shm ({mount}) is {used / size:.0%} full", {} if mount == "host" else {"run": mount}
            yield "ShmNearlyFull", (mount,), now_s, title, [f"Do: {BY_CAUSE['shm_exhaustion'].change}"], of, 0.0
    for each in snapshot.gpus:
        if each.state == ALLOCATED_UNUSED:
            profile = each.name.partition(" MIG ")[2]
            title = f"GPU {each.gpu} ({each.uuid}{profile and f', {profile}'}) is {each.owner}, and no process uses it"
            yield "GpuAllocatedUnused", (each.uuid,), now_s, title, (), {"UUID": each.uuid}, 1.0
