"""Panels about all GPUs of a site, from recorded series: a thousand nodes are answered quickly."""

from __future__ import annotations

from gpuwatch_dashboards.panels.node import LOST
from gpuwatch_dashboards.panels.panel import Curve, Panel, columns, stack, stat, table

NO_PRICE = "No price is configured: set gpu_hour under [prices], then run `gpuwatch rules --config`."
NOT_RECORDED = "Nothing was recorded in this time range. The rules of `gpuwatch rules` record it every five minutes."
OWNER = "topk by (job, instance, gpu, UUID) (1, gpuwatch_gpu_owner_info{{{}}})"
BY_OWNER = "on (job, instance, gpu, UUID) group_left"
_SELECTED = 'instance=~"$instance", user=~"$user", job_id=~"$job"'
_NODES = 'instance=~"$instance"'
_GPUS = f"gpuwatch_gpu_owner_info{{{_SELECTED}}}"
_RATE, _COST = "owner_kind:gpuwatch_gpu_seconds:rate5m", "owner_kind:gpuwatch_gpu_cost:per_hour"
_HOURS, _SPENT = "owner_kind:gpuwatch_gpu_hours:increase5m", "owner_kind:gpuwatch_gpu_cost:increase5m"
_LOST = f'{{kind=~"{LOST}", {_SELECTED}}}'
_LOST_NOW = f"({_RATE}{_LOST} > 0.005)"
_LOSERS = ("kind", "instance", "run", "user", "job_id")
_ALERT = ("alertname", "severity", "instance", "run", "rank", "gpu")


def _now(kinds: str, series: str = _RATE) -> str:
    return f'sum({series}{{kind=~"{kinds}", {_SELECTED}}})'


def _share(kind: str, title: str, question: str, warning: str = "", runbook: str = "") -> Panel:
    """Return the share of a kind in all GPU time now."""
    return stat(kind, title, question, "ratio", f"{_now(kind)} / ({_now('all')} > 0)", warning, runbook=runbook)


def _over_range(label: str, kinds: str, series: str = _HOURS) -> str:
    """Return GPU-hours (or money) by a label over the dashboard's time range.

    Each window is recorded once, so that their sum is the range's; a series adds nothing for windows it is absent from.
    """
    by = f" by ({label})" if label else ""
    return f'sum{by} (sum_over_time({series}{{kind=~"{kinds}", {_SELECTED}}}[$__range]))'


def _of_losers(values: str) -> str:
    """Return values of the owners that lose most now."""
    return f"{values} and on ({', '.join(_LOSERS)}) topk(50, {_LOST_NOW})"


def _alerts() -> str:
    """Return the firing alerts with their owners: the alert's own labels, else the run's or the GPU's owner."""
    same, firing = f"or on ({', '.join(_ALERT)})", f'ALERTS{{alertstate="firing", {_NODES}'
    nameless = f'max by ({", ".join(_ALERT)}) ({firing}, user=""}})'
    owner = f"max by ({{}}, user, job_id) ({{}}{{{{{_SELECTED}}}}})"
    return (
        f'max by ({", ".join(_ALERT)}, user, job_id) ({firing}, user!="", user=~"$user", job_id=~"$job"}})\n'
        f"{same} {nameless} * on (run) group_left (user, job_id)\n"
        f"topk by (run) (1, {owner.format('run', 'gpuwatch_run_info')})\n"
        f"{same} {nameless} * on (instance, gpu) group_left (user, job_id)\n"
        f"topk by (instance, gpu) (1, {owner.format('instance, gpu', 'gpuwatch_gpu_owner_info')})\n"
        f'{same} max by ({", ".join(_ALERT)}) ({firing}, user="", user=~"$user", job_id=~"$job"}})'
    )


def _spent(level: str, label: str, more: tuple[Curve, ...] = ()) -> Panel:
    """Return the table of GPU-hours by user, job, node or run, and by kind. A row without a name: not known whose."""

    def hours(kinds: str) -> str:
        return _over_range(label, kinds)

    return Panel(
        key=f"by_{level}",
        title=f"By {level}",
        question="Who held how many GPU-hours in this time range, and how many of them were lost?",
        unit="hours",
        kind="table",
        curves=(
            Curve(promql=hours("all"), legend="GPU-hours"),
            Curve(promql=f"{hours('useful')} / ({hours('all')} > 0)", legend="Useful", unit="ratio"),
            Curve(promql=hours("starved"), legend="Starved"),
            Curve(promql=hours("idle"), legend="Held idle"),
            Curve(promql=hours("stalled"), legend="Stalled"),
            Curve(promql=hours(LOST), legend="Lost"),
            Curve(promql=_over_range(label, LOST, _SPENT), legend="Lost money", unit="money"),
            Curve(promql=f'sum by ({label}) ({_RATE}{{kind="all", {_SELECTED}}})', legend="GPUs now", unit="1"),
            *more,
        ),
        columns=columns(label, *(("name",) if more else ())),
        sort="Lost",
        empty=NOT_RECORDED,
        width=12,
    )


FLEET: tuple[Panel, ...] = (
    stat("gpus", "GPUs", "How many GPUs are there?", "1", f"count(count by (instance, gpu, UUID) ({_GPUS}))"),
    stat("nodes", "Nodes", "How many nodes with GPUs have an agent?", "1", f"count(count by (instance) ({_GPUS}))"),
    _share("useful", "Useful", "Which share of all GPU time is computing now?"),
    _share("starved", "Starved", "Which share is waiting for input now?", "input_share", "GpuStarved"),
    _share("idle", "Held idle", "Which share is held by an idle process now?", "idle_share", "GpuHeldIdle"),
    _share("stalled", "Stalled", "Which share belongs to runs without progress?", "stalled_share", "RunStalled"),
    stat(
        "lost_gpus",
        "GPUs lost",
        "How much GPU time is starved, held idle or stalled now, as a number of GPUs?",
        "1",
        _now(LOST),
        "lost_gpus",
    ),
    stat("lost_money", "Lost money", "What does that cost per hour?", "money/h", _now(LOST, _COST), empty=NO_PRICE),
    stat(
        "lost",
        "GPU-hours lost",
        "How many GPU-hours in this time range were starved, idle or stalled?",
        "hours",
        _over_range("", LOST),
    ),
    stat(
        "cost",
        "Money lost",
        "What did these GPU-hours cost?",
        "money",
        _over_range("", LOST, _SPENT),
        empty=NO_PRICE,
    ),
    stat(
        "agents_down",
        "Agents down",
        "On how many nodes does the agent not answer?",
        "1",
        f'count(up{{job="gpuwatch", {_NODES}}} == 0) or vector(0)',
        "missing",
        runbook="GpuwatchAgentDown",
    ),
    table(
        key="lost_now",
        title="GPU time lost now",
        question="Whose GPUs are starved, held idle or stalled now, for how long, why, and what does it cost? As a number "
        "of GPUs: 2 are two GPU-seconds lost every second. The cause is the run's largest finding.",
        curves=(
            Curve(
                promql=f"topk(50, {_LOST_NOW} * on (run) group_left (cause)\n"
                f"(topk by (run) (1, max by (run, cause) (gpuwatch_finding_evidence_ratio{{{_NODES}}})) * 0 + 1)\n"
                f"or on ({', '.join(_LOSERS)}) {_LOST_NOW})",
                legend="GPUs lost",
            ),
            Curve(
                promql=_of_losers(f"time() - owner_kind:gpuwatch_gpu_lost_since:timestamp{_LOST}"),
                legend="For",
                unit="s",
            ),
            Curve(promql=_of_losers(f"{_COST}{_LOST}"), legend="Cost per hour", unit="money/h"),
        ),
        columns=columns(*_LOSERS, "cause"),
        sort="GPUs lost",
        empty="No GPU is starved, held idle or stalled.",
        runbook="GpuHeldIdle",
        width=24,
    ),
    table(
        key="fleet_alerts",
        title="Alerts",
        question="Which alerts are firing now, and whose are the runs and GPUs?",
        curves=(Curve(promql=_alerts()),),
        columns=columns(*_ALERT, "user", "job_id"),
        empty="No alert is firing.",
        width=15,
    ),
    table(
        key="silent_nodes",
        title="Nodes that do not answer",
        question="On which nodes does Prometheus get no answer from the agent?",
        curves=(Curve(promql=f'max by (instance) (up{{job="gpuwatch", {_NODES}}} == 0)'),),
        columns=columns("instance"),
        empty="All nodes answer.",
        runbook="GpuwatchAgentDown",
        width=9,
    ),
    stack(
        key="gpus_by_kind",
        title="GPUs by use",
        question="How much GPU time is useful, starved, held idle or stalled, as a number of GPUs? The rest is start-up, "
        "evaluation, checkpoints, unallocated or not attributed.",
        unit="1",
        curves=(
            Curve(promql=f'sum by (kind) ({_RATE}{{kind!="all", {_SELECTED}}})', legend="{kind}"),
            Curve(
                promql=f'label_replace({_now("all")} - sum({_RATE}{{kind!="all", {_SELECTED}}}), "kind", "rest", "", "")',
                legend="{kind}",
            ),
        ),
        width=14,
    ),
    stack(
        key="cost_by_kind",
        title="Cost per hour",
        question="How much of the cost is for GPUs that compute?",
        unit="money/h",
        curves=(Curve(promql=f'sum by (kind) ({_COST}{{kind!="all", {_SELECTED}}})', legend="{kind}"),),
        empty=NO_PRICE,
        width=10,
    ),
    stack(
        key="fleet_states",
        title="GPUs by state, whole site",
        question="How many GPUs compute, wait, or are held by a process that does not use them? Of all nodes and owners, "
        "whatever is selected above.",
        unit="1",
        curves=(Curve(promql="state:gpuwatch_gpu_seconds:rate5m", legend="{state}"),),
        empty=NOT_RECORDED,
        width=24,
    ),
    _spent("user", "user"),
    _spent("job", "job_id"),
    _spent("node", "instance"),
    _spent(
        "run",
        "run",
        (
            Curve(
                promql='topk by (run) (1, max by (run, name) (gpuwatch_run_info{instance=~"$instance", job_id=~"$job", user=~"$user"}))'
            ),
        ),
    ),
)
