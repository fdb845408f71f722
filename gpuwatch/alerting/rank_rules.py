"""Who is late in a run that spans nodes: an agent compares the ranks of its own node, Prometheus those of all. Pure data.

A rank's own time is its exposed wait for input and its copies, as a share of the run's training time: that of the rank with most of it, as others may
evaluate or save while the rest wait for them. The excess is over the lower quartile of the ranks (of two: over the other one), so that a slow node is seen
of two as well.
"""

from __future__ import annotations

from gpuwatch.alerting.rule import AlertRule, RecordingRule
from gpuwatch.alerting.texts import RUN_OWNER, WHOLE_RUN

_TRAINING = "run_rank:gpuwatch_run_training_seconds:increase<starved_window_s>"
_OWN = "run_rank:gpuwatch_step_own:share<starved_window_s>"
_EXCESS = "run_rank:gpuwatch_straggler_excess:share<starved_window_s>"
_STEPS = "sum by (job, run, rank) (rate(gpuwatch_steps_total[<starved_window_s>]))"

RANK_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        _OWN,
        f"""\
sum by (job, run, rank) (increase(gpuwatch_run_seconds_total{{state=~"input_wait|transfer"}}[<starved_window_s>]))
/ on (job, run) group_left () (max by (job, run) (sum by (job, run, rank) ({_TRAINING})) > 0)
and on (job, run) (count by (job, run) ({_STEPS}) > 1)
and on (job, run) (max by (job, run) ({_STEPS}) < 1.1 * min by (job, run) ({_STEPS}))""",
    ),
    RecordingRule(
        _EXCESS,
        f"""\
{_OWN}
- on (job, run) group_left ()
(
  (quantile by (job, run) (0.25, {_OWN}) and on (job, run) (count by (job, run) ({_OWN}) > 2))
  or min by (job, run) ({_OWN})
)""",
    ),
    RecordingRule(
        "run:gpuwatch_straggler_lost_ranks:mean<starved_window_s>",
        f"max by (job, run) ({_EXCESS}) * count by (job, run) ({_EXCESS})\n- sum by (job, run) ({_EXCESS})",
    ),
)
"""Ranks whose steps differ by a tenth or more do not go in step: nobody waits for anybody, and nothing is recorded."""

_LATE = (
    f"{_EXCESS}{{run=%q}} * on (job, run, rank) group_left (instance) "
    "topk by (job, run, rank) (1, gpuwatch_run_up{run=%q} == 1)"
)
"""The excess of a run's ranks with their nodes; takes the run twice."""
_LATEST = "{{ with printf `topk(1, " + _LATE + ")` $labels.run $labels.run | query }}"

STRAGGLER_ACROSS_NODES = AlertRule(
    name="StragglerAcrossNodes",
    severity="warning",
    # Of runs that span nodes: of the others their own agent tells, with more evidence. One alert a run: of a slow node all ranks are late.
    expr=f"""\
max by (job, run) ({_EXCESS}) > <straggler_ratio>
and on (job, run) max by (job, run) ({_TRAINING}) >= <starved_min_training_seconds>
and on (job, run) count by (job, run) (count by (job, run, instance) (gpuwatch_run_up == 1)) > 1""",
    for_field="straggler_across_for_s",
    summary="Run " + WHOLE_RUN + " waits for " + _LATEST
    + "rank {{ (. | first).Labels.rank }} on {{ (. | first).Labels.instance }}{{ else }}one slow rank{{ end }}: "
    "{{ $value | humanizePercentage }} of its training time",
    description="Its own time before communication (wait for input, copies) is so much above that of the quicker ranks, on all "
    "nodes, and the others wait for it in every step. Late:"
    "{{ range $i, $r := printf `topk(8, (" + _LATE + ") > <straggler_ratio>)` $labels.run $labels.run | query }}"
    "{{ if $i }},{{ end }} rank {{ $r.Labels.rank }} on {{ $r.Labels.instance }} ({{ $r.Value | humanizePercentage }}){{ end }}.",
    owner=RUN_OWNER,
    cause="{{ with printf `count by (cause) (gpuwatch_finding_active{run=%q} == 1 and on (job, instance) topk(1, " + _LATE
    + "))` $labels.run $labels.run $labels.run | query }}found on its node: "
    "{{ range $i, $f := . }}{{ if $i }}, {{ end }}{{ $f.Labels.cause }}{{ end }}{{ else }}none found yet on its node{{ end }}",
    advice="on its node" + _LATEST + ", `gpuwatch stacks {{ $labels.run }} --rank {{ (. | first).Labels.rank }}`{{ end }}: "
    "what its loader waits for, its storage, its neighbours; the other ranks are not at fault",
    lost_gpus="max(run:gpuwatch_straggler_lost_ranks:mean<starved_window_s>{run=%q})",
    lost_arguments="$labels.run",
)  # fmt: skip
