"""Panels about all GPUs of a site, from recorded series: a thousand nodes are answered quickly."""

from __future__ import annotations

from gpuwatch_dashboards.panels.node import LOST
from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold, alerts, columns, stat

NO_PRICE = "No price is configured: set gpu_hour under [prices], then run `gpuwatch rules --config`."
NOT_RECORDED = "Nothing was recorded in this time range. The rules of `gpuwatch rules` record it every five minutes."
OWNER = "topk by (job, instance, gpu, UUID) (1, gpuwatch_gpu_owner_info{{{}}})"
BY_OWNER = "on (job, instance, gpu, UUID) group_left"
_NODES = 'instance=~"$instance"'
_RATE, _COST = "gpuwatch_gpu_seconds:rate5m", "gpuwatch_gpu_cost:per_hour"
_HOURS, _SPENT = "gpuwatch_gpu_hours:increase5m", "gpuwatch_gpu_cost:increase5m"


def _now(kinds: str, series: str = _RATE) -> str:
    return f'sum(node_kind:{series}{{kind=~"{kinds}", {_NODES}}})'


def _share(kind: str, title: str, question: str, warning: str = "", runbook: str = "") -> Panel:
    """Return the share of a kind in all GPU time now."""
    return stat(kind, title, question, "ratio", f"{_now(kind)} / ({_now('all')} > 0)", warning, runbook=runbook)


def _over_range(level: str, label: str, kinds: str, selected: str, series: str = _HOURS) -> str:
    """Return GPU-hours (or money) by a label over the dashboard's time range.

    Each window is recorded once, so that their sum is the range's; a series adds nothing for windows it is absent from.
    """
    by = f" by ({label})" if label else ""
    return f'sum{by} (sum_over_time({level}_kind:{series}{{kind=~"{kinds}", {selected}}}[$__range]))'


def _spent(level: str, label: str, selected: str, more: tuple[Curve, ...] = ()) -> Panel:
    """Return the table of GPU-hours by user, job, node or run, and by kind."""

    def hours(kinds: str) -> str:
        return _over_range(level, label, kinds, selected)

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
            Curve(promql=_over_range(level, label, LOST, selected, _SPENT), legend="Lost money", unit="money"),
            *more,
        ),
        columns=columns(label, *(("name",) if more else ())),
        sort="Lost",
        empty=NOT_RECORDED,
        width=12,
    )


FLEET: tuple[Panel, ...] = (
    stat("gpus", "GPUs", "How many GPUs are there?", "1", f"round({_now('all')})"),
    stat("nodes", "Nodes", "How many nodes have an agent?", "1", f'count(node_kind:{_RATE}{{kind="all", {_NODES}}})'),
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
        _over_range("node", "", LOST, _NODES),
    ),
    stat(
        "cost",
        "Money lost",
        "What did these GPU-hours cost?",
        "money",
        _over_range("node", "", LOST, _NODES, _SPENT),
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
    Panel(
        key="gpus_by_kind",
        title="GPUs by use",
        question="How much GPU time of the site is useful, starved, held idle or stalled, as a number of GPUs? The rest "
        "is start-up, evaluation, checkpoints, unallocated or not attributed.",
        unit="1",
        kind="stack",
        curves=(
            Curve(promql=f'kind:{_RATE}{{kind!="all"}}', legend="{kind}"),
            Curve(
                promql=f'label_replace(sum(kind:{_RATE}{{kind="all"}}) - sum(kind:{_RATE}{{kind!="all"}}), '
                '"kind", "rest", "", "")',
                legend="{kind}",
            ),
        ),
        width=14,
    ),
    alerts("fleet_alerts", "", "instance", "run", "rank", "gpu"),
    Panel(
        key="worst_gpus",
        title="Worst GPUs now",
        question="Which GPUs lose the largest share of their time, and who holds them?",
        unit="ratio",
        kind="table",
        curves=(
            Curve(
                promql="topk(50, sum by (instance, gpu, user, job_id, run) (\n"
                f'gpu_kind:gpuwatch_gpu_seconds:share5m{{kind=~"{LOST}", {_NODES}}}\n'
                f"* {BY_OWNER} (user, job_id, run)\n" + OWNER.format('user=~"$user", job_id=~"$job"') + "\n) > 0)",
                legend="Lost now",
            ),
        ),
        columns=columns("instance", "gpu", "user", "job_id", "run"),
        sort="Lost now",
        thresholds=(Threshold("lost_share"), Threshold("lost_share_critical", "critical")),
        empty="No GPU is starved, held idle or stalled.",
        runbook="GpuHeldIdle",
        width=14,
    ),
    Panel(
        key="cost_by_kind",
        title="Cost per hour",
        question="How much of the site's cost is for GPUs that compute?",
        unit="money/h",
        kind="stack",
        curves=(Curve(promql=f'kind:{_COST}{{kind!="all"}}', legend="{kind}"),),
        empty=NO_PRICE,
        width=9,
    ),
    Panel(
        key="fleet_states",
        title="GPUs by state",
        question="How many GPUs compute, wait, or are held by a process that does not use them?",
        unit="1",
        kind="stack",
        curves=(Curve(promql=f"state:{_RATE}", legend="{state}"),),
        empty=NOT_RECORDED,
        width=24,
    ),
    _spent("user", "user", 'user=~"$user", user!=""'),
    _spent("job", "job_id", 'job_id=~"$job", job_id!=""'),
    _spent("node", "instance", _NODES),
    _spent(
        "run",
        "run",
        'run!=""',
        (Curve(promql='topk by (run) (1, max by (run, name) (gpuwatch_run_info{job_id=~"$job", user=~"$user"}))'),),
    ),
)
"""Stacks are of the whole site, whichever nodes are selected: a few series instead of those of a thousand nodes."""
