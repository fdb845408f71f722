"""Panels about all GPUs of a site, from the recorded series, so that a thousand nodes answer at once."""

from __future__ import annotations

from gpuwatch_dashboards.panels.panel import Threshold
from gpuwatch_dashboards.panels.site_panel import Column, Link, SiteCurve, SitePanel, SiteUnit

LOST = "starved|idle|stalled"
"""Kinds of GPU time that is paid for and gives nothing."""
NO_PRICE = "No price is set: gpu_hour under [prices], then `gpuwatch rules --config`."
OWNER = "topk by (job, instance, gpu, UUID) (1, gpuwatch_gpu_owner_info{{{}}})"
BY_OWNER = "on (job, instance, gpu, UUID) group_left"
_NODES = 'instance=~"$instance"'
_RATE, _COST = "gpuwatch_gpu_seconds:rate5m", "gpuwatch_gpu_cost:per_hour"
_HOURS, _SPENT = "gpuwatch_gpu_hours:increase5m", "gpuwatch_gpu_cost:increase5m"


def _now(kinds: str, series: str = _RATE) -> str:
    return f'sum(node_kind:{series}{{kind=~"{kinds}", {_NODES}}})'


def _share(kind: str) -> str:
    return f"{_now(kind)} / ({_now('all')} > 0)"


def _over_range(level: str, label: str, kinds: str, chosen: str, series: str = _HOURS) -> str:
    """Return GPU-hours (or money) by a label over the dashboard's range.

    Recorded once a window, so that their sum is the range's: a series that was absent for a time adds nothing for it.
    """
    return f'sum by ({label}) (sum_over_time({level}_kind:{series}{{kind=~"{kinds}", {chosen}}}[$__range]))'


def _number(
    key: str, title: str, question: str, expr: str, unit: SiteUnit, warning: float | None = None, **more: str
) -> SitePanel:
    limits = () if warning is None else (Threshold(warning, "warning"),)
    return SitePanel(key, title, question, unit, "number", (SiteCurve(expr),), thresholds=limits, **more)  # type: ignore[arg-type]


def _spent(level: str, label: str, title: str, link: Link, chosen: str, more: tuple[SiteCurve, ...] = ()) -> SitePanel:
    """Return the table of who spent GPU-hours, and of what kind they were."""

    def hours(kinds: str) -> str:
        return _over_range(level, label, kinds, chosen)

    names = (Column("name", "Name"),) if more else ()
    return SitePanel(
        key=f"by_{label}",
        title=f"By {title.lower()}",
        question="Who used how many GPU-hours in this time range, and how many of them gave nothing?",
        unit="hours",
        shape="table",
        curves=(
            SiteCurve(hours("all"), "GPU-hours"),
            SiteCurve(f"{hours('useful')} / ({hours('all')} > 0)", "Useful", "ratio"),
            SiteCurve(hours("starved"), "Starved"),
            SiteCurve(hours("idle"), "Held idle"),
            SiteCurve(hours("stalled"), "Stalled"),
            SiteCurve(hours(LOST), "Lost"),
            SiteCurve(_over_range(level, label, LOST, chosen, _SPENT), "Lost money", "money"),
            *more,
        ),
        columns=(Column(label, title, link), *names),
        sort="Lost",
        empty="Nothing was recorded in this time range: it is, every five minutes, by the rules of `gpuwatch rules`.",
    )


FLEET_NOW: tuple[SitePanel, ...] = (
    _number("gpus", "GPUs", "How many GPUs are there?", f"count(gpuwatch_gpu_info{{{_NODES}}})", "1"),
    _number("useful", "Useful", "Which share of all GPU time is computing now?", _share("useful"), "ratio"),
    _number(
        "starved", "Starved", "Which share waits for input now?", _share("starved"), "ratio", 0.1, runbook="GpuStarved"
    ),
    _number(
        "idle",
        "Held idle",
        "Which share is held by a process that does nothing?",
        _share("idle"),
        "ratio",
        0.1,
        runbook="GpuHeldIdle",
    ),
    _number(
        "stalled",
        "Stalled",
        "Which share belongs to runs that make no progress?",
        _share("stalled"),
        "ratio",
        0.02,
        runbook="RunStalled",
    ),
    _number(
        "lost_gpus", "GPUs lost", "How many GPUs' worth of time is starved, idle or stalled now?", _now(LOST), "1", 1.0
    ),
    _number(
        "lost_money",
        "Lost money",
        "What does that cost an hour?",
        _now(LOST, _COST),
        "money/h",
        empty=NO_PRICE,
    ),
    _number(
        "agents_down",
        "Agents down",
        "How many nodes does nobody watch?",
        f'count(up{{job="gpuwatch", {_NODES}}} == 0) or vector(0)',
        "1",
        1.0,
        runbook="GpuwatchAgentDown",
    ),
)

FLEET_OVER_TIME: tuple[SitePanel, ...] = (
    SitePanel(
        key="gpus_by_kind",
        title="GPUs by what they do",
        question="How many GPUs' worth of time is useful, starved, held idle or stalled, in the whole site? The rest is start-up, "
        "evaluation, checkpoints, unallocated or not attributed.",
        unit="1",
        shape="stack",
        curves=(
            SiteCurve(f'kind:{_RATE}{{kind!="all"}}', "{kind}"),
            SiteCurve(f'sum(kind:{_RATE}{{kind="all"}}) - sum(kind:{_RATE}{{kind!="all"}})', "rest"),
        ),
    ),
    SitePanel(
        key="gpus_by_state",
        title="GPUs by state",
        question="What do all GPUs of the site do, state by state?",
        unit="1",
        shape="stack",
        curves=(SiteCurve("state:gpuwatch_gpu_seconds:rate5m", "{state}"),),
    ),
    SitePanel(
        key="cost_by_kind",
        title="What it costs an hour",
        question="How much of the site's money is spent on GPUs that compute?",
        unit="money/h",
        shape="stack",
        curves=(SiteCurve(f'kind:{_COST}{{kind!="all"}}', "{kind}"),),
        empty=NO_PRICE,
    ),
)
"""Of the whole site, whichever nodes are chosen: a few series, where a thousand nodes' would be read for as long as the range."""

FLEET_WHO: tuple[SitePanel, ...] = (
    _spent("user", "user", "User", "user", 'user=~"$user", user!=""'),
    _spent("job", "job_id", "Job", "job", 'job_id=~"$job", job_id!=""'),
    _spent("node", "instance", "Node", "node", _NODES),
    _spent(
        "run",
        "run",
        "Run",
        "run",
        'run!=""',
        (SiteCurve('topk by (run) (1, max by (run, name) (gpuwatch_run_info{job_id=~"$job", user=~"$user"}))'),),
    ),
)

FLEET_WORST: tuple[SitePanel, ...] = (
    SitePanel(
        key="worst_gpus",
        title="Worst GPUs now",
        question="Which GPUs give the least for what they cost, and whose are they?",
        unit="ratio",
        shape="table",
        curves=(
            SiteCurve(
                "topk(50, sum by (instance, gpu, user, job_id, run) (\n"
                f'gpu_kind:gpuwatch_gpu_seconds:share5m{{kind=~"{LOST}", {_NODES}}}\n'
                f"* {BY_OWNER} (user, job_id, run)\n" + OWNER.format('user=~"$user", job_id=~"$job"') + "\n) > 0)",
                "Lost now",
            ),
        ),
        columns=(
            Column("instance", "Node", "node"),
            Column("gpu", "GPU"),
            Column("user", "User", "user"),
            Column("job_id", "Job", "job"),
            Column("run", "Run", "run"),
        ),
        sort="Lost now",
        thresholds=(Threshold(0.2, "warning"), Threshold(0.8, "critical")),
        empty="No GPU is starved, held idle or stalled.",
        runbook="GpuHeldIdle",
    ),
)
