"""Who is late in a run that spans nodes: an agent compares the ranks of its own node, Prometheus those of all. Pure data.

A rank's own time is its exposed wait for input and its copies, as a share of its training time. In a run whose ranks go in step the training time is the
same for all, so that the shares can be compared. The excess is over the median of the ranks (of two: over the other one).
"""

from __future__ import annotations

from gpuwatch.alerting.rule import RecordingRule

_OWN = "run_rank:gpuwatch_step_own:share<starved_window_s>"
_EXCESS = "run_rank:gpuwatch_straggler_excess:share<starved_window_s>"
_STEPS = "sum by (job, run, rank) (rate(gpuwatch_steps_total[<starved_window_s>]))"

RANK_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        _OWN,
        f"""\
sum by (job, run, rank) (increase(gpuwatch_run_seconds_total{{state=~"input_wait|transfer"}}[<starved_window_s>]))
/ (sum by (job, run, rank) (run_rank:gpuwatch_run_training_seconds:increase<starved_window_s>) > 0)
and on (job, run) (count by (job, run) ({_STEPS}) > 1)
and on (job, run) (max by (job, run) ({_STEPS}) < 1.1 * min by (job, run) ({_STEPS}))""",
    ),
    RecordingRule(
        _EXCESS,
        f"""\
{_OWN}
- on (job, run) group_left ()
(
  (quantile by (job, run) (0.5, {_OWN}) and on (job, run) (count by (job, run) ({_OWN}) > 2))
  or min by (job, run) ({_OWN})
)""",
    ),
    RecordingRule(
        "run:gpuwatch_straggler_lost_ranks:mean<starved_window_s>",
        f"max by (job, run) ({_EXCESS})\n* (count by (job, run) ({_EXCESS}) - 1)",
    ),
)
"""Ranks whose steps differ by a tenth or more do not go in step: nobody waits for anybody, and nothing is recorded."""
