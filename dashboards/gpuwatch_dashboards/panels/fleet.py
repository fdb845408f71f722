"""Panels about all GPUs of a site, from recorded series: a thousand nodes are answered quickly."""

from functools import partial

from gpuwatch_dashboards.panels.node import LOST
from gpuwatch_dashboards.panels.panel import Curve, Panel, stack, stat, table

NO_PRICE = "No price is configured: set gpu_hour under [prices], then run `gpuwatch rules --config`."
NOT_RECORDED = "Nothing recorded in this time range. The rules of `gpuwatch rules` record every five minutes."
OWNER = "topk by (job, instance, gpu, UUID) (1, gpuwatch_gpu_owner_info{{{}}})"
BY_OWNER = "on (job, instance, gpu, UUID) group_left"
_SELECTED = 'instance=~"$instance", user=~"$user", job_id=~"$job"'
_NODES = 'instance=~"$instance"'
_LAST_HOUR = 'last_over_time(owner_kind:gpuwatch_gpu_seconds:rate5m{{kind="all", {}}}[1h])'.format
# Without the nodes of which is known that in the last hour they had GPUs of others only.
_SILENT = (
    f'(up{{job="gpuwatch", {_NODES}}} == 0)\n'
    f"unless on (instance) ({_LAST_HOUR(_NODES)} unless on (instance) {_LAST_HOUR(_SELECTED)})"
)
_OWNED = f"gpuwatch_gpu_owner_info{{{_SELECTED}}}"
_GPUS = f"({_OWNED} * {BY_OWNER} () max by (job, instance, gpu, UUID) (gpuwatch_gpu_mig_ratio) or {_OWNED})"
"""1 for each GPU, for a MIG instance its share of one."""
_RATE, _COST = "owner_kind:gpuwatch_gpu_seconds:rate5m", "owner_kind:gpuwatch_gpu_cost:per_hour"
_HOURS, _SPENT = "owner_kind:gpuwatch_gpu_hours:increase5m", "owner_kind:gpuwatch_gpu_cost:increase5m"
_LOST = f'{{kind=~"{LOST}", {_SELECTED}}}'
_OWNER = ("instance", "run", "user", "job_id")
_LOSERS = ("kind", *_OWNER)
# A share of the GPUs there are: right after Prometheus' start the rates of five minutes are of less than five minutes.
_LOST_NOW = (
    f'({_RATE}{_LOST} / ignoring (kind) group_left () ({_RATE}{{kind="all", {_SELECTED}}} > 0)\n'
    f"* on ({', '.join(_OWNER)}) group_left () sum by ({', '.join(_OWNER)}) ({_GPUS}) > 0.005)"
)
_ALERT = ("alertname", "severity", "instance", "run", "rank", "gpu")


def _now(kinds: str, series: str = _RATE) -> str:
    return f'sum({series}{{kind=~"{kinds}", {_SELECTED}}})'


def _share(kind: str) -> str:
    """Return the share of a kind in all GPU time now."""
    return f"{_now(kind)} / ({_now('all')} > 0)"


def _over_range(label: str, kinds: str, series: str = _HOURS) -> str:
    """Return GPU-hours (or money) by a label over the dashboard's time range.

    Each window is recorded once, so that their sum is the range's; a series adds nothing for windows it is absent from.
    """
    return f'sum by ({label}) (sum_over_time({series}{{kind=~"{kinds}", {_SELECTED}}}[$__range]))'


def _of_losers(values: str) -> str:
    """Return values of the owners that lose most now."""
    return f"{values} and on ({', '.join(_LOSERS)}) topk(50, {_LOST_NOW})"


def _alerts() -> str:
    """Return the firing alerts with owners: their own labels, else the run's or GPU's. A run's is on all its nodes."""
    same, firing = f"or on ({', '.join(_ALERT)})", f'ALERTS{{alertstate="firing", {_NODES}'
    nameless = f'max by ({", ".join(_ALERT)}) ({firing}, user=""}})'
    owner = f"max by ({{}}, user, job_id) ({{}}{{{{{_SELECTED}}}}})"
    return (
        f'max by ({", ".join(_ALERT)}, user, job_id) ({firing}, user!="", user=~"$user", job_id=~"$job"}})\n'
        f'{same} max by ({", ".join(_ALERT)}, user, job_id) (ALERTS{{alertstate="firing", instance="", user=~"$user",\n'
        f'job_id=~"$job"}} and on (run) gpuwatch_run_info{{run!="", {_SELECTED}}})\n'
        f"{same} {nameless} * on (run) group_left (user, job_id)\n"
        f"topk by (run) (1, {owner.format('run', 'gpuwatch_run_info')})\n"
        f"{same} {nameless} * on (instance, gpu) group_left (user, job_id)\n"
        f"topk by (instance, gpu) (1, {owner.format('instance, gpu', 'gpuwatch_gpu_owner_info')})\n"
        f'{same} max by ({", ".join(_ALERT)}) ({firing}, user="", user=~"$user", job_id=~"$job"}})'
    )


def _spent(level: str, label: str, *names: str) -> Panel:
    """Return the table of GPU-hours by user, job, node or run; `names` is PromQL of the label `name` of its rows."""
    hours = partial(_over_range, label)
    labels = (label, *("name" for _ in names))
    return table(f"by_{level}", f"By {level}", "hours", columns=labels, sort="Lost", empty=NOT_RECORDED, width=12).asks(
        "How many GPU-hours did each user, job, node or run hold in this time range, and how many were lost?",
        Curve("GPU-hours", hours("all")),
        Curve("Useful", f"{hours('useful')} / ({hours('all')} > 0)", "ratio"),
        Curve("Starved", hours("starved")),
        Curve("Held idle", hours("idle")),
        Curve("Stalled", hours("stalled")),
        Curve("Lost", hours(LOST)),
        Curve("Lost money", _over_range(label, LOST, _SPENT), "money"),
        Curve("GPUs now", f"sum by ({label}) ({_GPUS})", "1"),
        *names,
    )


FLEET: tuple[Panel, ...] = (
    stat("gpus", "GPUs").asks("How many GPUs are there?", f"sum(max by (instance, gpu, UUID) ({_GPUS}))"),
    stat("nodes", "Nodes").asks("How many nodes with GPUs have an agent?", f"count(count by (instance) ({_OWNED}))"),
    stat("useful", "Useful", "ratio").asks("What share of all GPU time is computing now?", _share("useful")),
    stat("starved", "Starved", "ratio", warning="input_share", runbook="GpuStarved").asks(
        "What share of all GPU time is waiting for input now?", _share("starved")
    ),
    stat("idle", "Held idle", "ratio", warning="idle_share", runbook="GpuHeldIdle").asks(
        "What share of all GPU time is held by an idle process now?", _share("idle")
    ),
    stat("stalled", "Stalled", "ratio", warning="stalled_share", runbook="RunStalled").asks(
        "What share of all GPU time belongs to runs without progress now?", _share("stalled")
    ),
    stat("lost_gpus", "GPUs lost", warning="lost_gpus").asks(
        "How many GPUs' worth of time is currently starved, held idle or stalled?", f"{_share(LOST)} * sum({_GPUS})"
    ),
    stat("lost_money", "Money lost per hour", "money/h", empty=NO_PRICE).asks(
        "What does the currently lost GPU time cost per hour?", _now(LOST, _COST)
    ),
    stat("lost", "GPU-hours lost", "hours").asks(
        "How many GPU-hours in this time range were starved, held idle or stalled?", _over_range("", LOST)
    ),
    stat("cost", "Money lost", "money", empty=NO_PRICE).asks(
        "What did the GPU-hours lost in this time range cost?", _over_range("", LOST, _SPENT)
    ),
    stat("agents_down", "Agents down", warning="missing", runbook="GpuwatchAgentDown").asks(
        "On how many nodes does the agent not answer Prometheus?", f"count({_SILENT}) or vector(0)"
    ),
    table(
        "lost_now",
        "GPU time lost now",
        columns=(*_LOSERS, "cause"),
        sort="GPUs lost",
        empty="No GPU is starved, held idle or stalled.",
        runbook="GpuHeldIdle",
        width=24,
    ).asks(
        "Whose GPUs are currently starved, held idle or stalled, for how long, why, and at what cost? Unit: GPUs "
        "(2 = two GPU-seconds lost per second). The cause is the run's largest finding.",
        Curve(
            "GPUs lost",
            f"topk(50, {_LOST_NOW} * on (run) group_left (cause)\n"
            f"(topk by (run) (1, max by (run, cause) (gpuwatch_finding_evidence_ratio{{{_NODES}}})) * 0 + 1)\n"
            f"or on ({', '.join(_LOSERS)}) {_LOST_NOW})",
        ),
        Curve("For", _of_losers(f"time() - owner_kind:gpuwatch_gpu_lost_since:timestamp{_LOST}"), "s"),
        Curve("Cost per hour", _of_losers(f"{_COST}{_LOST}"), "money/h"),
    ),
    table("fleet_alerts", "Alerts", columns=(*_ALERT, "user", "job_id"), empty="No alert is firing.", width=15).asks(
        "Which alerts are firing, and who owns the runs and GPUs?", _alerts()
    ),
    table(
        "silent_nodes",
        "Nodes that do not answer",
        columns=("instance",),
        empty="All nodes answer.",
        runbook="GpuwatchAgentDown",
        width=9,
    ).asks("On which nodes does the agent not answer Prometheus?", f"max by (instance) ({_SILENT})"),
    stack("gpus_by_kind", "GPUs by use", width=14).asks(
        "How many GPUs' worth of time is useful, starved, held idle or stalled? The rest is start-up, evaluation, "
        "checkpoints, unallocated or not attributed.",
        Curve("{kind}", f'sum by (kind) ({_RATE}{{kind!="all", {_SELECTED}}})'),
        Curve(
            "{kind}", f'label_replace({_now("all")} - sum({_RATE}{{kind!="all", {_SELECTED}}}), "kind", "rest", "", "")'
        ),
    ),
    stack("cost_by_kind", "Cost per hour", "money/h", empty=NO_PRICE, width=10).asks(
        "How is the cost of GPUs divided into useful and lost time?",
        Curve("{kind}", f'sum by (kind) ({_COST}{{kind!="all", {_SELECTED}}})'),
    ),
    stack("fleet_states", "GPUs by state", empty=NOT_RECORDED, width=24).asks(
        "How many GPUs' worth of time is spent in each ledger state?",
        Curve("{state}", f"sum by (state) (owner_state:gpuwatch_gpu_seconds:rate5m{{{_SELECTED}}})"),
    ),
    _spent("user", "user"),
    _spent("job", "job_id"),
    _spent("node", "instance"),
    _spent("run", "run", f"topk by (run) (1, max by (run, name) (gpuwatch_run_info{{{_SELECTED}}}))"),
)
