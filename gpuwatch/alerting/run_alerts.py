"""Alerts about training runs. Evaluation, checkpoints, compilation and start-up are states of their own and never fire."""

from __future__ import annotations

from gpuwatch.alerting.rule import AlertRule
from gpuwatch.alerting.texts import CAUSE, NAMED_OWNER, NAMED_RUN, RANK_OWNER, RUN, RUN_OWNER, STACKS, WHOLE_RUN

_RANKS = "count(gpuwatch_run_up{run=%q} == 1)"

RUN_ALERTS: tuple[AlertRule, ...] = (
    AlertRule(
        name="GpuStarved",
        severity="warning",
        # Name and owner are labels here, not queries of the texts: a storage that is slow for all makes an alert for every rank.
        # Of a framework that queues its work, waits by the host's clock say nothing of the device.
        expr="""\
(
  run_rank_state:gpuwatch_run_training_seconds:share<starved_window_s>{state="input_wait"} > <starved_ratio>
  and ignoring (state)
  run_rank:gpuwatch_run_training_seconds:increase<starved_window_s> >= <starved_min_training_seconds>
  unless on (job, instance, run, rank)
  gpuwatch_run_info{timeline="host", device=~"(jax|tensorflow).*"}
)
* on (job, instance, run, rank) group_left (name, user, job_id)
(
  topk by (job, instance, run, rank) (1, gpuwatch_run_info)
  or on (job, instance, run, rank)
  gpuwatch_ledger_watermark_timestamp_seconds * 0 + 1
)""",
        for_field="starved_for_s",
        summary="Run " + NAMED_RUN + " waits for input {{ $value | humanizePercentage }} of its training time",
        description="Of the training time in the last <starved_window_s>, {{ $value | humanizePercentage }} went by with no "
        "batch to train on. Evaluation, checkpoints and start-up are not counted.",
        owner=NAMED_OWNER,
        cause=CAUSE,
        advice="the finding's own advice, with numbers, is on the dashboard and in `gpuwatch top`; the runbook has it by cause",
        lost_gpus="vector(%f)",
    ),
    AlertRule(
        name="RunStalled",
        severity="critical",
        # A step within the last window means that it moves again, whatever the share still says. A rank that waits while another
        # one evaluates or saves is not stuck.
        expr="""\
run_rank:gpuwatch_run_stalled:share<stalled_window_s> > <stalled_ratio>
unless run_rank:gpuwatch_steps:increase<stalled_for_s> > 0
unless on (job, run) run:gpuwatch_run_phases:increase<stalled_window_s> > 0""",
        for_field="stalled_for_s",
        summary="Run " + RUN + " makes no progress: {{ $value | humanizePercentage }} of the last <stalled_window_s> stalled",
        description="No step has ended for more than ten times the run's usual step, outside any declared phase.",
        owner=RANK_OWNER,
        cause=CAUSE,
        advice="take the stacks of all ranks before ending it (" + STACKS + " on each of its nodes): a hung collective and a dead "
        "loader worker look alike here; an evaluation or export in the loop should be declared",
        lost_gpus="vector(%f)",
    ),
    AlertRule(
        name="RunHung",
        severity="critical",
        expr="""\
count by (job, run) (run_rank:gpuwatch_run_stalled:share<stalled_window_s> > <stalled_ratio>) > 1
and
count by (job, run) (run_rank:gpuwatch_run_stalled:share<stalled_window_s> > <stalled_ratio>)
== count by (job, run) (gpuwatch_run_up == 1)
unless sum by (job, run) (run_rank:gpuwatch_steps:increase<stalled_for_s>) > 0""",
        for_field="hung_for_s",
        summary="Run " + WHOLE_RUN + " hangs: all {{ $value }} ranks stand still",
        description="No rank has finished a step in <stalled_window_s>, in no declared phase. Utilisation may read 100% all "
        "the while: a rank that waits in a collective spins.",
        owner=RUN_OWNER,
        cause=CAUSE,
        advice="the rank that is not in the collective is the culprit: compare the stacks of all ranks (" + STACKS + " on each of its "
        "nodes), then restart from the last checkpoint",
        lost_gpus="vector(%f)",
    ),
    AlertRule(
        name="Straggler",
        severity="warning",
        # The late rank's own series, which is there only while it is found to be late.
        expr="gpuwatch_straggler_excess_ratio > 0",
        for_field="straggler_for_s",
        summary="Run " + WHOLE_RUN + " waits for one slow rank, rank {{ $labels.rank }} on {{ $labels.instance }}: "
        "{{ $value | humanizePercentage }} of every step",
        description="All ranks step as fast as the slowest one, so that every GPU of the run waits for it.",
        owner=RUN_OWNER,
        cause=CAUSE,
        advice="look at that rank's input, node and GPU first: the other ranks are not at fault",
        lost_gpus="%f * ((" + _RANKS + " - 1) or vector(1))",
        lost_arguments="$value $labels.run",
    ),
    AlertRule(
        name="EpochPauses",
        severity="warning",
        expr='gpuwatch_finding_active{cause="epoch_start_pause"} == 1',
        for_field="epoch_pause_for_s",
        summary="Run " + WHOLE_RUN + " pauses at the start of every epoch"
        "{{ with printf `max(gpuwatch_finding_evidence_ratio{run=%q,cause=\"epoch_start_pause\"})` $labels.run | query }}"
        ": {{ . | first | value | humanizePercentage }} of its step time{{ end }}",
        description="The first batch of each pass over the loader takes far longer than the later ones: workers start anew.",
        owner=RUN_OWNER,
        cause="epoch_start_pause",
        advice="persistent_workers=True, or fewer and longer passes",
        lost_gpus='(max(gpuwatch_finding_evidence_ratio{run=%q,cause="epoch_start_pause"}) or vector(0)) * (' + _RANKS
        + " or vector(1))",
        lost_arguments="$labels.run $labels.run",
    ),
    AlertRule(
        name="StepTimeRegressed",
        severity="warning",
        # Only training steps are in the histogram. A run without an hour of steps behind it has no baseline.
        expr="""\
(
  run:gpuwatch_step_seconds:mean<step_window_s>
  / run:gpuwatch_step_seconds:median<step_baseline_s>
) > <step_slower_factor>
and run:gpuwatch_step_seconds:mean<step_window_s> offset <step_history_s>""",
        for_field="step_slower_for_s",
        summary="Run " + WHOLE_RUN + " takes {{ $value | printf `%.2f` }} times as long for a step as it used to",
        description="Mean step time over <step_window_s> against the run's own median of <step_baseline_s>"
        "{{ with printf `run:gpuwatch_step_seconds:mean<step_window_s>{run=%q}` $labels.run | query }}"
        " (now {{ . | first | value | humanizeDuration }}){{ end }}. Evaluation and checkpoints are not steps.",
        owner=RUN_OWNER,
        cause=CAUSE,
        advice="compare `input_wait` and `compute` before and after on the dashboard: the one that grew says where to look "
        "(storage, neighbours on the node, clocks, the data itself)",
        lost_gpus="(1 - 1 / %f) * (" + _RANKS + " or vector(1))",
        lost_arguments="$value $labels.run",
    ),
    AlertRule(
        name="GpuwatchTelemetryLost",
        severity="warning",
        # Three ways: it is silent now (a good-bye leaves nothing unknown), it was silent again and again, or its series
        # vanished while it was up.
        expr="""\
gpuwatch_run_up == 0
and run_rank:gpuwatch_run_unknown:increase<telemetry_window_s> > 0
or
run_rank:gpuwatch_run_unknown:increase<telemetry_window_s> > <telemetry_lost_seconds>
or
last_over_time(gpuwatch_run_up[<telemetry_window_s>]) == 1 unless gpuwatch_run_up""",
        for_field="telemetry_for_s",
        summary="Run " + RUN + " is no longer measured",
        description="Its process died, or its messages stopped without a good-bye: what its GPUs do is unknown, and its other "
        "alerts say nothing about it now.",
        owner=RANK_OWNER,
        cause="the process died, was stopped, or its socket to the agent is gone; by its findings: " + CAUSE,
        advice="see whether the process lives; its last words are in its own log, the kernel's in `dmesg -T`",
        lost_gpus=None,
    ),
)  # fmt: skip
