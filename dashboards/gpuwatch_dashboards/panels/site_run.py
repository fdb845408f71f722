"""Panels about one run for Grafana, beside those that every page has (run.py)."""

from __future__ import annotations

from gpuwatch_dashboards.panels.fleet import BY_OWNER, LOST, NO_PRICE, OWNER
from gpuwatch_dashboards.panels.panel import Threshold
from gpuwatch_dashboards.panels.site_panel import Column, SiteCurve, SitePanel, SiteUnit

_RUN = 'run="$run", rank=~"$rank"'
_WAITING = ', state="input_wait"'
_NO_STEP = "No step has ended in this time range."
_NO_GPU = "This run holds no GPU."


def _number(
    key: str, title: str, question: str, unit: SiteUnit, expr: str, warning: float | None = None, **more: str
) -> SitePanel:
    limits = () if warning is None else (Threshold(warning, "warning"),)
    return SitePanel(key, title, question, unit, "number", (SiteCurve(expr),), thresholds=limits, **more)  # type: ignore[arg-type]


def _share(state: str) -> str:
    """Return a state's share of all time in the dashboard's range."""
    part = f'sum(increase(gpuwatch_run_seconds_total{{{_RUN}, state="{state}"}}[$__range]))'
    return f"{part} / (sum(increase(gpuwatch_run_seconds_total{{{_RUN}}}[$__range])) > 0)"


def _quantile(share: float) -> SiteCurve:
    buckets = f"sum by (le) (rate(gpuwatch_step_seconds_bucket{{{_RUN}}}[$__rate_interval]))"
    return SiteCurve(f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f}")


def _by_rank(metric: str, more: str = "") -> str:
    return f"sum by (rank) (rate({metric}{{{_RUN}{more}}}[$__rate_interval]))"


RUN_NOW: tuple[SitePanel, ...] = (
    _number("up", "Ranks that run", "Does it still train?", "1", f"sum(gpuwatch_run_up{{{_RUN}}})"),
    _number(
        "run_input",
        "Input wait",
        "Which share of the time in this range did it wait for data?",
        "ratio",
        _share("input_wait"),
        0.1,
        runbook="GpuStarved",
    ),
    _number("run_compute", "Computing", "Which share did it compute?", "ratio", _share("compute")),
    _number(
        "run_stalled",
        "Stalled",
        "Which share did it make no progress?",
        "ratio",
        _share("stalled"),
        0.01,
        runbook="RunStalled",
    ),
    _number(
        "run_steps",
        "Steps",
        "How many steps did it take in this range?",
        "1",
        f"max(increase(gpuwatch_steps_total{{{_RUN}}}[$__range]))",
        empty=_NO_STEP,
    ),
    _number(
        "run_gpus_lost",
        "GPUs lost",
        "How many GPUs' worth of its time is starved, idle or stalled?",
        "1",
        f'sum(run_kind:gpuwatch_gpu_seconds:rate5m{{kind=~"{LOST}", run="$run"}})',
        1.0,
        empty=_NO_GPU,
    ),
    _number(
        "run_lost_money",
        "Lost money",
        "What does that cost an hour?",
        "money/h",
        f'sum(run_kind:gpuwatch_gpu_cost:per_hour{{kind=~"{LOST}", run="$run"}})',
        empty=NO_PRICE,
    ),
    _number(
        "run_money",
        "Cost of the run",
        "What did its GPUs cost in this range? (In steps of five minutes.)",
        "money",
        'sum(sum_over_time(run_kind:gpuwatch_gpu_cost:increase5m{kind="all", run="$run"}[$__range]))',
        empty=NO_PRICE,
    ),
)

RUN_WHO: tuple[SitePanel, ...] = (
    SitePanel(
        key="run_info",
        title="Who and how",
        question="Whose run is it, where, and with which loader?",
        unit="1",
        shape="table",
        curves=(
            SiteCurve(
                "max by (rank, instance, name, user, job_id, device, timeline, world_size, num_workers, version) "
                f"(gpuwatch_run_info{{{_RUN}}})"
            ),
        ),
        columns=(
            Column("rank", "Rank"),
            Column("instance", "Node", "node"),
            Column("name", "Name"),
            Column("user", "User", "user"),
            Column("job_id", "Job"),
            Column("device", "Device"),
            Column("timeline", "Clock of"),
            Column("world_size", "Ranks"),
            Column("num_workers", "Loader workers"),
            Column("version", "gpuwatch"),
        ),
        empty="No run of this name was heard of in this time range.",
    ),
    SitePanel(
        key="run_findings",
        title="Findings now",
        question="Which causes are active, and what share of time does each concern? Advice is in `gpuwatch top`.",
        unit="ratio",
        shape="table",
        curves=(SiteCurve('max by (cause) (gpuwatch_finding_evidence_ratio{run="$run"})', "Concerns"),),
        columns=(Column("cause", "Cause"),),
        sort="Concerns",
        empty="Nothing found.",
        runbook="causes",
    ),
)

RUN_STEPS: tuple[SitePanel, ...] = (
    SitePanel(
        key="step_percentiles",
        title="Step time, percentiles",
        question="Are some steps much longer than most? (Estimated from a histogram's buckets.)",
        unit="s",
        shape="lines",
        curves=(_quantile(0.5), _quantile(0.95), _quantile(0.99)),
        empty=_NO_STEP,
    ),
    SitePanel(
        key="step_usual",
        title="Step time against its own past",
        question="Has it become slower?",
        unit="s",
        shape="lines",
        curves=(SiteCurve('run:gpuwatch_step_seconds:mean10m{run="$run"}', "mean of 10 minutes"),),
        empty=_NO_STEP,
        runbook="StepTimeRegressed",
    ),
    SitePanel(
        key="samples",
        title="Samples and tokens",
        question="How much does it learn from in a second?",
        unit="1/s",
        shape="lines",
        curves=(
            SiteCurve(f"sum(rate(gpuwatch_samples_total{{{_RUN}}}[$__rate_interval]))", "samples"),
            SiteCurve(f"sum(rate(gpuwatch_tokens_total{{{_RUN}}}[$__rate_interval]))", "tokens"),
        ),
        empty="Batches do not tell their size.",
    ),
)

RUN_RANKS: tuple[SitePanel, ...] = (
    SitePanel(
        key="rank_input",
        title="Input wait by rank",
        question="Does one rank wait for data, or do all?",
        unit="ratio",
        shape="lines",
        curves=(
            SiteCurve(
                f"{_by_rank('gpuwatch_run_seconds_total', _WAITING)}\n/ on (rank)\n"
                f"({_by_rank('gpuwatch_run_seconds_total')} > 0)",
                "rank {rank}",
            ),
        ),
        maximum=1.0,
        runbook="Straggler",
    ),
    SitePanel(
        key="rank_step",
        title="Step time by rank",
        question="Is one rank slower than the others?",
        unit="s",
        shape="lines",
        curves=(
            SiteCurve(
                f"{_by_rank('gpuwatch_step_seconds_sum')}\n/ on (rank)\n({_by_rank('gpuwatch_step_seconds_count')} > 0)",
                "rank {rank}",
            ),
        ),
        empty=_NO_STEP,
        runbook="Straggler",
    ),
    SitePanel(
        key="rank_excess",
        title="Straggler",
        question="By which share of the step do the others wait for one rank?",
        unit="ratio",
        shape="lines",
        curves=(SiteCurve(f"gpuwatch_straggler_excess_ratio{{{_RUN}}}", "rank {rank}"),),
        empty="No rank holds the others up.",
        runbook="Straggler",
    ),
)

RUN_GPUS: tuple[SitePanel, ...] = (
    SitePanel(
        key="run_gpu_ledger",
        title="Where its GPUs' time goes",
        question="What do the GPUs do that this run holds?",
        unit="1",
        shape="stack",
        curves=(
            SiteCurve(
                "sum by (state) (\nrate(gpuwatch_gpu_seconds_total[$__rate_interval])\n"
                f"* {BY_OWNER} ()\n" + OWNER.format('run="$run", gpu=~"$gpu"') + "\n)",
                "{state}",
            ),
        ),
        empty=_NO_GPU,
    ),
)
