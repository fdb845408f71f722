"""Panels about a training run."""

from __future__ import annotations

from gpuwatch_dashboards.panels.fleet import BY_OWNER, NO_PRICE, OWNER
from gpuwatch_dashboards.panels.node import LOST
from gpuwatch_dashboards.panels.panel import Curve, Panel, Threshold, alerts, columns, detail, stack, stat, table
from gpuwatch_dashboards.query import Match, Query

_RUN = 'run="$run", rank=~"$rank"'
_SECONDS, _PHASES, _STEPS = "gpuwatch_run_seconds_total", "gpuwatch_step_phase_seconds_total", "gpuwatch_steps_total"
_INFO = (
    "rank", "instance", "name", "user", "job_id", "device", "timeline", "world_size", "num_workers", "version",
)  # fmt: skip
_NO_STEP = "No step has ended in this time range."
_NO_GPU = "This run holds no GPU."
_NO_WORKERS = "No loader workers: batches are loaded in the training process."
_NO_EVENTS = "No step was measured by device events: there is no device, or only the host's clock was used."
_STEP_BUCKETS = f"sum by (le) (rate(gpuwatch_step_seconds_bucket{{{_RUN}}}[$__rate_interval]))"


def _share(key: str, title: str, question: str, state: str, warning: str = "", runbook: str = "") -> Panel:
    """Return a state's share of all time in the dashboard's time range."""
    part = f'sum(increase({_SECONDS}{{{_RUN}, state="{state}"}}[$__range]))'
    share = f"{part} / (sum(increase({_SECONDS}{{{_RUN}}}[$__range])) > 0)"
    return stat(key, title, question, "ratio", share, warning, runbook=runbook)


RUN: tuple[Panel, ...] = (
    stat("up", "Running ranks", "How many ranks are training now?", "1", Curve(Query("gpuwatch_run_up"))),
    _share(
        "run_input",
        "Input wait",
        "For which share of this time range did it wait for data?",
        "input_wait",
        "input_share",
        "GpuStarved",
    ),
    _share("run_compute", "Computing", "For which share of this time range did it compute?", "compute"),
    _share(
        "run_stalled",
        "Stalled",
        "For which share of this time range did it make no progress?",
        "stalled",
        "stalled_share",
        "RunStalled",
    ),
    stat(
        "run_steps",
        "Steps",
        "How many steps did it complete in this time range?",
        "1",
        f"max(increase({_STEPS}{{{_RUN}}}[$__range]))",
        empty=_NO_STEP,
    ),
    stat(
        "run_gpus_lost",
        "GPUs lost",
        "How much of its GPU time is starved, held idle or stalled now, as a number of GPUs?",
        "1",
        f'sum(run_kind:gpuwatch_gpu_seconds:rate5m{{kind=~"{LOST}", run="$run"}})',
        "lost_gpus",
        empty=_NO_GPU,
    ),
    stat(
        "run_lost_money",
        "Lost money",
        "What does that cost per hour?",
        "money/h",
        f'sum(run_kind:gpuwatch_gpu_cost:per_hour{{kind=~"{LOST}", run="$run"}})',
        empty=NO_PRICE,
    ),
    stat(
        "run_money",
        "Cost of the run",
        "What did its GPUs cost in this time range? (Recorded every five minutes.)",
        "money",
        'sum(sum_over_time(run_kind:gpuwatch_gpu_cost:increase5m{kind="all", run="$run"}[$__range]))',
        empty=NO_PRICE,
    ),
    stat(
        "run_oom_kills",
        "OOM kills",
        "How many of its processes did the kernel's OOM killer end in this time range?",
        "1",
        f"sum(increase(gpuwatch_run_oom_kills_total{{{_RUN}}}[$__range])) or vector(0)",
        "missing",
        runbook="ShmNearlyFull",
    ),
    stat(
        "run_records_lost",
        "Lost records",
        "How many step records did not arrive in this time range? Their time is in the ledger all the same.",
        "1",
        f"sum(increase(gpuwatch_step_records_lost_total{{{_RUN}}}[$__range]))",
    ),
    stack(
        key="ledger",
        title="Where the time goes",
        question="Which share of wall time goes to computing, and which to waiting?",
        unit="ratio",
        curves=(Curve(Query(_SECONDS, by=("state",), over=Query(_SECONDS)), "{state}"),),
        maximum=1.0,
        empty="The first second of this run has not been counted yet.",
        width=16,
    ),
    stack(
        key="declared_phases",
        title="Declared phases",
        question="Which share of wall time goes to each phase that the training declares by name?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_phase_seconds_total", by=("phase",), over=Query(_SECONDS)), "{phase}"),),
        empty="No phase is declared by name (w.phase).",
        more=True,
    ),
    detail(
        key="findings",
        title="Findings",
        question="Which causes are active, and what share of the time does each affect?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_finding_evidence_ratio", by=("cause",)), "{cause}"),),
        maximum=1.0,
        empty="Nothing found.",
    ),
    stack(
        key="step_time",
        title="Step time",
        question="How long is one step, and which phase takes longest? Stacked: the mean by phase; lines: p50 and p95 of the "
        "last minute.",
        unit="s",
        curves=(
            Curve(Query(_PHASES, by=("phase",), over=Query(_STEPS)), "{phase}"),
            Curve(
                Query("gpuwatch_step_percentile_seconds", by=("percentile",), greatest=True),
                "{percentile}",
                over_stack=True,
            ),
        ),
        empty=_NO_STEP,
    ),
    Panel(
        key="loader_workers",
        title="Loader workers",
        question="Does each worker of the loader use a whole core?",
        unit="ratio",
        curves=(
            Curve(
                Query("gpuwatch_loader_worker_cpu_seconds_total", over=Query("gpuwatch_loader_workers")),
                "mean CPU of a worker",
            ),
        ),
        maximum=1.0,
        thresholds=(Threshold("worker_busy"),),
        empty=_NO_WORKERS,
    ),
    detail(
        key="loader_queue",
        title="Loader queue",
        question="At which share of its requests does training find no batch ready?",
        unit="ratio",
        curves=(
            Curve(
                Query("gpuwatch_loader_empty_fetches_total", over=Query("gpuwatch_loader_fetches_total")),
                "no batch ready",
            ),
        ),
        maximum=1.0,
        empty=_NO_WORKERS,
    ),
    detail(
        key="loader_ready",
        title="Batches ready",
        question="How many batches are ready when training asks for one? Near 0: the loader limits it.",
        unit="1",
        curves=(
            Curve(
                Query("gpuwatch_loader_ready_batches_total", over=Query("gpuwatch_loader_fetches_total")),
                "mean queue depth",
                f"sum(rate(gpuwatch_loader_ready_batches_total{{{_RUN}}}[$__rate_interval]))\n"
                f"/ (sum(rate(gpuwatch_loader_fetches_total{{{_RUN}}}[$__rate_interval])) > 0)",
            ),
        ),
        empty=_NO_WORKERS,
    ),
    detail(
        key="loader_waits",
        title="What loader workers wait for",
        question="Which share of the workers is blocked by the disk, or is ready to run and has no core?",
        unit="ratio",
        curves=(
            Curve(Query("gpuwatch_loader_workers_in_disk_wait", over=Query("gpuwatch_loader_workers")), "disk"),
            Curve(
                Query("gpuwatch_loader_worker_run_queue_seconds_total", over=Query("gpuwatch_loader_workers")), "a core"
            ),
        ),
        maximum=1.0,
        empty=_NO_WORKERS,
    ),
    detail(
        key="loader_disk",
        title="Disk traffic of the loader workers",
        question="How much do they read from disks? The page cache is not counted.",
        unit="bytes/s",
        curves=(
            Curve(Query("gpuwatch_loader_worker_read_bytes_total"), "read"),
            Curve(Query("gpuwatch_loader_worker_written_bytes_total"), "written"),
        ),
        empty=_NO_WORKERS,
    ),
    detail(
        key="hidden_wait",
        title="Hidden data wait",
        question="For which share of the time did the host wait for data while the device still had work? It costs nothing.",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_hidden_input_wait_seconds_total", over=Query(_SECONDS)), "hidden"),),
        empty=_NO_EVENTS,
    ),
    detail(
        key="coverage",
        title="Coverage",
        question="Which share of the steps was measured by device events, which had its wait for other ranks measured, and "
        "for which is the input wait not certain? And of which share of the fetches was the CPU time sampled?",
        unit="ratio",
        curves=(
            Curve(Query("gpuwatch_device_steps_total", over=Query(_STEPS)), "device events"),
            Curve(Query("gpuwatch_comm_steps_total", over=Query(_STEPS)), "wait for ranks"),
            Curve(Query("gpuwatch_unverified_steps_total", over=Query(_STEPS)), "not certain"),
            Curve(
                Query("gpuwatch_fetches_sampled_total", over=Query("gpuwatch_loader_fetches_total")), "fetches sampled"
            ),
        ),
        maximum=1.0,
        empty=_NO_EVENTS,
    ),
    detail(
        key="hook_cost",
        title="Cost of the hook",
        question="How much of one core does gpuwatch itself take in the training process?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_hook_overhead_seconds_total", by=("rank",)), "rank {rank}"),),
        empty="The hook has not reported its cost yet.",
    ),
    detail(
        key="run_memory",
        title="Memory of the run",
        question="Is it close to the limit of its control group?",
        unit="bytes",
        curves=(
            Curve(Query("gpuwatch_run_memory_used_bytes"), "control group"),
            Curve(Query("gpuwatch_run_resident_memory_bytes"), "training processes"),
            Curve(Query("gpuwatch_run_memory_limit_bytes"), "limit", dashed=True),
        ),
    ),
    detail(
        key="run_pressure",
        title="Pressure in the run's control group",
        question="For which share of the time does some task of the run wait for CPU, I/O or memory?",
        unit="ratio",
        curves=(
            Curve(Query("gpuwatch_run_pressure_cpu_waiting_seconds_total"), "CPU"),
            Curve(Query("gpuwatch_run_pressure_io_waiting_seconds_total"), "I/O"),
            Curve(Query("gpuwatch_run_pressure_memory_waiting_seconds_total"), "memory"),
        ),
        empty="The run has no control group of its own, or the kernel does not report pressure.",
    ),
    Panel(
        key="throughput",
        title="Throughput",
        question="How many steps per second does training complete?",
        unit="1/s",
        curves=(Curve(Query(_STEPS, by=("rank",)), "steps, rank {rank}"),),
        empty=_NO_STEP,
    ),
    detail(
        key="samples",
        title="Samples and tokens",
        question="How many samples and tokens per second does it train on?",
        unit="1/s",
        curves=(
            Curve(Query("gpuwatch_samples_total"), "samples"),
            Curve(Query("gpuwatch_tokens_total"), "tokens"),
        ),
        empty="The size of a batch is not known.",
    ),
    detail(
        key="mfu",
        title="Model FLOPs utilisation",
        question="Which share of the device's declared peak does training reach? The mean of the last minute (MFU).",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_run_mfu_ratio", by=("rank",)), "rank {rank}"),),
        maximum=1.0,
        empty="Not known: declare flops_per_step (or _sample, _token) and peak_flops in gpuwatch.Watch().",
    ),
    Panel(
        key="step_percentiles",
        title="Step time, percentiles",
        question="Are some steps much longer than most? (Estimated from a histogram's buckets.)",
        unit="s",
        curves=tuple(
            Curve(promql=f"histogram_quantile({share}, {_STEP_BUCKETS})", legend=f"p{share * 100:.0f}")
            for share in (0.5, 0.95, 0.99)
        ),
        empty=_NO_STEP,
    ),
    Panel(
        key="step_usual",
        title="Step time, long term",
        question="Has it become slower? The mean of ten minutes.",
        unit="s",
        curves=(Curve(promql='run:gpuwatch_step_seconds:mean10m{run="$run"}', legend="10 min mean"),),
        empty=_NO_STEP,
        runbook="StepTimeRegressed",
    ),
    detail(
        key="rank_input",
        title="Input wait by rank",
        question="Does one rank wait for data, or do all?",
        unit="ratio",
        curves=(
            Curve(
                Query(_SECONDS, ("rank",), (Match("state", "=", "input_wait"),), Query(_SECONDS, ("rank",))),
                "rank {rank}",
            ),
        ),
        maximum=1.0,
        runbook="Straggler",
    ),
    detail(
        key="rank_step",
        title="Step time by rank",
        question="Is one rank slower than the others?",
        unit="s",
        curves=(Curve(Query(_PHASES, ("rank",), over=Query(_STEPS, ("rank",))), "rank {rank}"),),
        empty=_NO_STEP,
        runbook="Straggler",
    ),
    detail(
        key="rank_excess",
        title="Straggler",
        question="For which share of a step do the other ranks wait for this one?",
        unit="ratio",
        curves=(Curve(Query("gpuwatch_straggler_excess_ratio", ("rank",)), "rank {rank}"),),
        thresholds=(Threshold("straggler_share"), Threshold("straggler_share_critical", "critical")),
        empty="No rank delays the others.",
        runbook="Straggler",
    ),
    stack(
        key="run_gpu_ledger",
        title="GPUs of the run by state",
        question="How many of the run's GPUs compute or wait?",
        unit="1",
        curves=(
            Curve(
                promql='sum by (state) (\nrate(gpuwatch_gpu_seconds_total{instance=~"$instance", gpu=~"$gpu"}[$__rate_interval])\n'
                f"* {BY_OWNER} ()\n" + OWNER.format('run="$run", instance=~"$instance", gpu=~"$gpu"') + "\n)",
                legend="{state}",
            ),
        ),
        empty=_NO_GPU,
    ),
    table(
        key="run_info",
        title="About the run",
        question="Whose run is it, where, and with which loader?",
        curves=(Curve(promql=f"max by ({', '.join(_INFO)}) (gpuwatch_run_info{{{_RUN}}})"),),
        columns=columns(*_INFO),
        empty="No run of this name was seen in this time range.",
        width=12,
    ),
    table(
        key="run_findings",
        title="Findings now",
        question="Which causes are active, and what share of the time does each affect? `gpuwatch top` shows advice.",
        unit="ratio",
        curves=(Curve(promql='max by (cause) (gpuwatch_finding_evidence_ratio{run="$run"})', legend="Affected"),),
        columns=columns("cause"),
        sort="Affected",
        empty="Nothing found.",
        runbook="causes",
        width=6,
    ),
    alerts("run_alerts", 'run="$run"', "instance", "rank"),
)
