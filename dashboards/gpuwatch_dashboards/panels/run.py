"""Panels about a training run."""

from gpuwatch_dashboards.panels.fleet import BY_OWNER, NO_PRICE, OWNER
from gpuwatch_dashboards.panels.node import LOST
from gpuwatch_dashboards.panels.panel import Curve, Panel, alerts, detail, line, stack, stat, table
from gpuwatch_dashboards.query import Match

_RUN = 'run="$run", rank=~"$rank", instance=~"$instance"'
# In Grafana the chosen nodes; on the pages, which show one rank, all of the run's.
_OF_RUN = 'run="$run", instance=~"$nodes"'
_SECONDS, _PHASES, _STEPS = "gpuwatch_run_seconds_total", "gpuwatch_step_phase_seconds_total", "gpuwatch_steps_total"
_FETCHES, _WORKERS = "gpuwatch_loader_fetches_total", "gpuwatch_loader_workers"
_INFO = (
    "rank", "instance", "name", "user", "job_id", "device", "timeline", "world_size", "num_workers", "version",
)  # fmt: skip
_NO_STEP = "No step has ended in this time range."
_NO_GPU = "This run holds no GPU."
_NO_WORKERS = "No loader workers: batches are loaded in the training process."
_NO_PHASE = "No phase other than eval and checkpoint was declared (w.phase)."
_NO_EVENTS = "No step was measured by device events: there is no device, or only the host's clock was used."
_ONLY_AGENT = "Not measured in this run, or not exported to Prometheus (start the agents with `--series full`)."


def _share(state: str) -> str:
    """Return a state's share of all time in the dashboard's time range."""
    part = f'sum(increase({_SECONDS}{{{_RUN}, state="{state}"}}[$__range]))'
    whole = f"sum(increase({_SECONDS}{{{_RUN}}}[$__range]))"
    return f"({part} or {whole} * 0) / ({whole} > 0)"


RUN: tuple[Panel, ...] = (
    stat("up", "Running ranks").asks("How many ranks of the run are training now?", line("", "gpuwatch_run_up")),
    stat("run_input", "Input wait", "ratio", warning="input_share", runbook="GpuStarved").asks(
        "For what share of this time range did the run wait for data?", _share("input_wait")
    ),
    stat("run_compute", "Computing", "ratio").asks(
        "For what share of this time range did the run compute?", _share("compute")
    ),
    stat("run_stalled", "Stalled", "ratio", warning="stalled_share", runbook="RunStalled").asks(
        "For what share of this time range did the run make no progress?", _share("stalled")
    ),
    stat("run_steps", "Steps", empty=_NO_STEP).asks(
        "How many steps did the run complete in this time range?", f"max(increase({_STEPS}{{{_RUN}}}[$__range]))"
    ),
    stat("run_gpus_lost", "GPUs lost", warning="lost_gpus", empty=_NO_GPU).asks(
        "How many GPUs' worth of the run's time is currently starved, held idle or stalled?",
        f'sum(owner_kind:gpuwatch_gpu_seconds:rate5m{{kind=~"{LOST}", {_OF_RUN}}})',
    ),
    stat("run_lost_money", "Money lost per hour", "money/h", empty=NO_PRICE).asks(
        "What does the loss cost per hour?", f'sum(owner_kind:gpuwatch_gpu_cost:per_hour{{kind=~"{LOST}", {_OF_RUN}}})'
    ),
    stat("run_money", "Cost of the run", "money", empty=NO_PRICE).asks(
        "What did the run's GPUs cost in this time range? (Recorded every five minutes.)",
        f'sum(sum_over_time(owner_kind:gpuwatch_gpu_cost:increase5m{{kind="all", {_OF_RUN}}}[$__range]))',
    ),
    stat("run_oom_kills", "OOM kills", warning="missing", runbook="ShmNearlyFull").asks(
        "How many processes of the run did the kernel's OOM killer kill in this time range?",
        f"sum(increase(gpuwatch_run_oom_kills_total{{{_RUN}}}[$__range])) or vector(0)",
    ),
    stat("run_records_lost", "Lost records").asks(
        "How many step records did not reach the agent in this time range? Their time is still counted.",
        f"sum(increase(gpuwatch_step_records_lost_total{{{_RUN}}}[$__range])) or vector(0)",
    ),
    stack(
        "ledger",
        "Where the time goes",
        maximum=1.0,
        empty="The first second of this run has not been counted yet.",
        width=16,
    ).asks("How is the run's wall-clock time divided among states?", line("{state}", _SECONDS, _SECONDS)),
    detail("run_goodput", "Goodput of the job", "ratio", empty="Neither a scheduler job nor a resumed run.").asks(
        "What share of the job's wall-clock time, restarts included, was spent on new steps?",
        'max(job_id:gpuwatch_job_goodput:ratio and on (job_id) gpuwatch_job_start_timestamp_seconds{run="$run"})',
    ),
    stack("declared_phases", "Declared phases", empty=_NO_PHASE, more=True).asks(
        "What share of the wall-clock time goes to each phase that the training declares?",
        line("{phase}", "gpuwatch_phase_seconds_total", _SECONDS),
    ),
    detail("findings", "Findings", maximum=1.0, empty="Nothing found.").asks(
        "Which causes are active, and what share of the time does each affect?",
        line("{cause}", "gpuwatch_finding_evidence_ratio"),
    ),
    stack("step_time", "Step time", empty=_NO_STEP).asks(
        "How long does a step take, and which phase takes longest? Stacked: the mean by phase. Lines: p50 and p95 of "
        "the last minute.",
        line("{phase}", _PHASES, _STEPS),
        line("{percentile}", "gpuwatch_step_percentile_seconds", greatest=True, over_stack=True),
    ),
    Panel("loader_workers", "Loader workers", maximum=1.0, warning="worker_busy", empty=_NO_WORKERS).asks(
        "How much of one core does each loader worker use on average?",
        line("mean CPU of a worker", "gpuwatch_loader_worker_cpu_seconds_total", _WORKERS),
    ),
    detail("loader_queue", "Loader queue", maximum=1.0, empty=_NO_WORKERS).asks(
        "For what share of the training's batch requests was no batch ready?",
        line("no batch ready", "gpuwatch_loader_empty_fetches_total", _FETCHES),
    ),
    detail("loader_ready", "Batches ready", "1", empty=_NO_WORKERS).asks(
        "How many batches are ready when training asks for one? Near 0, the loader limits the training.",
        line(
            "mean queue depth",
            "gpuwatch_loader_ready_batches_total",
            _FETCHES,
            promql=f"sum(rate(gpuwatch_loader_ready_batches_total{{{_RUN}}}[$__rate_interval]))\n"
            f"/ (sum(rate({_FETCHES}{{{_RUN}}}[$__rate_interval])) > 0)",
        ),
    ),
    detail("loader_waits", "What loader workers wait for", maximum=1.0, empty=_ONLY_AGENT).asks(
        "What share of the loader workers is blocked on disk I/O, or runnable but waiting for a core?",
        line("disk", "gpuwatch_loader_workers_in_disk_wait", _WORKERS),
        line("a core", "gpuwatch_loader_worker_run_queue_seconds_total", _WORKERS),
    ),
    detail("loader_disk", "Disk traffic of the loader workers", empty="No loader workers, or none on a disk.").asks(
        "How much do the loader workers read from and write to disks? (Excluding page cache hits.)",
        line("read", "gpuwatch_loader_worker_read_bytes_total"),
        line("written", "gpuwatch_loader_worker_written_bytes_total"),
    ),
    detail("hidden_wait", "Hidden data wait", empty=_NO_EVENTS).asks(
        "For what share of the time did the host wait for data while the device still had work? This wait costs no time.",
        line("hidden", "gpuwatch_hidden_input_wait_seconds_total", _SECONDS),
    ),
    detail("coverage", "Coverage", maximum=1.0, empty=_ONLY_AGENT).asks(
        "What share of the steps was measured with device events, for what share was the wait for other ranks measured, "
        "for what share is the input wait unreliable, and for what share of the fetches was the CPU time sampled?",
        line("device events", "gpuwatch_device_steps_total", _STEPS),
        line("wait for ranks", "gpuwatch_comm_steps_total", _STEPS),
        line("input wait unreliable", "gpuwatch_unverified_steps_total", _STEPS),
        line("fetches sampled", "gpuwatch_fetches_sampled_total", _FETCHES),
    ),
    detail("hook_cost", "Cost of the hook", empty="The hook has not reported its cost yet.").asks(
        "How much of one core does gpuwatch use in the training process?",
        line("rank {rank}", "gpuwatch_hook_overhead_seconds_total"),
    ),
    detail("run_memory", "Memory of the run").asks(
        "Is the run's memory close to the limit of its cgroup?",
        line("cgroup", "gpuwatch_run_memory_used_bytes"),
        line("training processes", "gpuwatch_run_resident_memory_bytes"),
        line("limit", "gpuwatch_run_memory_limit_bytes", dashed=True),
    ),
    detail(
        "run_pressure",
        "Pressure in the run's cgroup",
        empty="The run has no cgroup of its own, or the kernel does not report pressure.",
    ).asks(
        "For what share of the time does at least one task in the run's cgroup wait for CPU, I/O or memory?",
        line("CPU", "gpuwatch_run_pressure_cpu_waiting_seconds_total"),
        line("I/O", "gpuwatch_run_pressure_io_waiting_seconds_total"),
        line("memory", "gpuwatch_run_pressure_memory_waiting_seconds_total"),
    ),
    Panel("throughput", "Throughput", empty=_NO_STEP).asks(
        "How many steps per second does each rank complete?", line("steps, rank {rank}", _STEPS)
    ),
    detail("samples", "Samples and tokens", empty="The batch size is unknown.").asks(
        "How many samples and tokens per second does the run train on?",
        line("samples", "gpuwatch_samples_total"),
        line("tokens", "gpuwatch_tokens_total"),
    ),
    detail(
        "mfu",
        "Model FLOPs utilisation",
        maximum=1.0,
        empty="No tensor core activity is measured: declare flops_per_step (or _sample, _token) and peak_flops.",
    ).asks(
        "What share of the device's peak FLOP/s did the run use in the last minute, declared and estimated (MFU)?",
        line("rank {rank}", "gpuwatch_run_mfu_ratio"),
        line("rank {rank}, estimated", "gpuwatch_run_mfu_estimated_ratio", dashed=True),
    ),
    Panel("step_usual", "Step time, long term", "s", empty=_NO_STEP, runbook="StepTimeRegressed").asks(
        "Has the run become slower? Mean of ten minutes over all ranks.",
        Curve("10 min mean", 'run:gpuwatch_step_seconds:mean10m{run="$run"}'),
    ),
    detail("rank_input", "Input wait by rank", maximum=1.0, runbook="Straggler").asks(
        "Do all ranks wait for data, or only some?",
        line("rank {rank}", _SECONDS, _SECONDS, (Match("state", "=", "input_wait"),)),
    ),
    detail("rank_step", "Step time by rank", empty=_NO_STEP, runbook="Straggler").asks(
        "Is one rank slower than the others?", line("rank {rank}", _PHASES, _STEPS)
    ),
    detail(
        "rank_excess",
        "Straggler",
        warning="straggler_share",
        critical="straggler_share_critical",
        empty="No rank delays the others.",
        runbook="Straggler",
    ).asks(
        "For what share of a step do all other ranks wait for this one?",
        line("rank {rank}", "gpuwatch_straggler_excess_ratio"),
    ),
    stack("run_gpu_ledger", "GPUs of the run by state", empty=_NO_GPU).asks(
        "How many of the run's GPUs compute, wait or idle?",
        Curve(
            "{state}",
            'sum by (state) (\nrate(gpuwatch_gpu_seconds_total{instance=~"$instance", gpu=~"$gpu"}[$__rate_interval])\n'
            f"* {BY_OWNER} ()\n" + OWNER.format(f'{_RUN}, gpu=~"$gpu"') + "\n)",
        ),
    ),
    table(
        "run_info", "About the run", columns=_INFO, empty="No run with this name exists in this time range.", width=12
    ).asks(
        "Who runs it, where, and with which settings?", f"max by ({', '.join(_INFO)}) (gpuwatch_run_info{{{_RUN}}})"
    ),
    table(
        "run_findings",
        "Findings now",
        "ratio",
        columns=("cause",),
        sort="Affected",
        empty="Nothing found.",
        runbook="causes",
        width=6,
    ).asks(
        "Which causes are active, and what share of the time does each affect? `gpuwatch top` shows advice.",
        Curve("Affected", f"max by (cause) (gpuwatch_finding_evidence_ratio{{{_OF_RUN}}})"),
    ),
    alerts("run_alerts", 'run="$run"', "instance", "rank"),
)
