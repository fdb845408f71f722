"""What is recorded: GPU time by kind for every level, training shares by rank, baselines. Pure data.

A `rate` is in GPUs: GPU-seconds a second. A share divides by the growth of the ledger's own watermark, which is that of the sum of
all states (a tested invariant) and a fifteenth of the series to read; never by a clock, so that a late scrape cannot make a GPU look
starved. Owners are joined once, where a node's GPUs are summed; every level above is a sum of those few series.
"""

from __future__ import annotations

from gpuwatch.alerting.rule import RecordingRule
from gpuwatch.ledger import COMM_WAIT, COMPUTE, HELD_IDLE, HOST_WAIT, INPUT_WAIT, STALLED, TRANSFER

TRAINING_STATES = (INPUT_WAIT, TRANSFER, COMPUTE, HOST_WAIT, COMM_WAIT)
"""The states of a training step, over which starvation is a share. Start-up, compilation, evaluation and checkpoints
are left out on purpose: they can neither look like starvation nor thin it out. So is `other`, which holds an evaluation
that was not declared."""

KINDS = {"useful": COMPUTE, "starved": INPUT_WAIT, "idle": HELD_IDLE, "stalled": STALLED}
"""Kinds of GPU time that are recorded, by the state each is. `all` is the sum of all states."""

GPU_KEY = "job, instance, gpu, UUID"
OWNER = "gpu:gpuwatch_gpu_owner_info:one"
"""Every GPU's one owner: two owner series, which a bug or a race could make, must not fail a rule for all GPUs, and a GPU without
any counts for its node and the fleet."""
OWNER_LABELS = "run, rank, user, job_id, workload_namespace, workload_pod, workload_container"

_RATE = "gpu_kind:gpuwatch_gpu_seconds:rate<ledger_window_s>"
_SHARE = "gpu_kind:gpuwatch_gpu_seconds:share<ledger_window_s>"
_OWNED = "owner_kind:gpuwatch_gpu_seconds:rate<ledger_window_s>"
_OWNED_COST = "owner_kind:gpuwatch_gpu_cost:per_hour"
_PRICE = "gpu:gpuwatch_gpu_price:per_hour"

LEVELS = {"node": "instance", "run": "run", "job": "job_id", "user": "user", "fleet": ""}
"""Levels above the GPU, by the label that they keep. `run` is empty for GPUs without a hook."""


def _kind_rules(kind: str, state: str) -> tuple[RecordingRule, ...]:
    """Return one kind's rate and share by GPU, and its rate by node and owner."""
    label = (("kind", kind),)
    return (
        RecordingRule(
            _RATE,
            f'sum without (state) (rate(gpuwatch_gpu_seconds_total{{state="{state}"}}[<ledger_window_s>]))',
            label,
        ),
        RecordingRule(_SHARE, f'{_RATE}{{kind="{kind}"}}\n/ ignoring (kind)\n({_RATE}{{kind="all"}} > 0)', label),
        _owned_rule(kind),
    )


def _owned_rule(kind: str) -> RecordingRule:
    return RecordingRule(_OWNED, _owned(f'{_RATE}{{kind="{kind}"}}', OWNER), (("kind", kind),))


def _share(level: str, rate: str) -> RecordingRule:
    return RecordingRule(
        f"{_prefix(level)}:gpuwatch_gpu_seconds:share<ledger_window_s>",
        f'{rate}{{kind!="all"}}\n/ ignoring (kind) group_left ()\n({rate}{{kind="all"}} > 0)',
    )


def _prefix(level: str) -> str:
    return "kind" if level == "fleet" else f"{level}_kind"


def _sum_by(level: str, expr: str) -> str:
    by = ", ".join(label for label in (LEVELS[level], "kind") if label)
    return f"sum by ({by}) ({expr})"


def _owned(rate: str, owner: str) -> str:
    """Return the expression of GPUs' rates summed by node and owner, which leaves a few series a node."""
    return f"""\
sum by (instance, run, job_id, user, kind) (
{rate}
* on ({GPU_KEY}) group_left (run, job_id, user)
{owner}
)"""


def _level_rules(level: str) -> tuple[RecordingRule, ...]:
    record = f"{_prefix(level)}:gpuwatch_gpu_seconds:rate<ledger_window_s>"
    return RecordingRule(record, _sum_by(level, _OWNED)), _share(level, record)


def cost_rules(prices: dict[str, float], default: float) -> tuple[RecordingRule, ...]:
    """Return what every level's GPU time costs an hour, by kind. `prices` are by model name."""
    rules = [RecordingRule(_OWNED_COST, f"{_OWNED} * {default:g}")]
    if prices:
        models = [
            f'max by ({GPU_KEY}) (gpuwatch_gpu_info{{model="{model}"}}) * {price:g}' for model, price in prices.items()
        ]
        other = f"max by ({GPU_KEY}) (gpuwatch_gpu_ledger_watermark_timestamp_seconds) * 0 + {default:g}"
        priced = f"({OWNER} * on ({GPU_KEY}) group_left () {_PRICE})"
        rules = [
            RecordingRule(_PRICE, "\nor\n".join([*models, other])),
            RecordingRule(_OWNED_COST, _owned(_RATE, priced)),
        ]
    rules += [
        RecordingRule(f"{_prefix(level)}:gpuwatch_gpu_cost:per_hour", _sum_by(level, _OWNED_COST)) for level in LEVELS
    ]
    return tuple(rules)


WHOLE_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        OWNER,
        f"topk by ({GPU_KEY}) (1, gpuwatch_gpu_owner_info)\nor on ({GPU_KEY})\n"
        "gpuwatch_gpu_ledger_watermark_timestamp_seconds * 0 + 1",
    ),
    RecordingRule(
        _RATE, "rate(gpuwatch_gpu_ledger_watermark_timestamp_seconds[<ledger_window_s>])", (("kind", "all"),)
    ),
    _owned_rule("all"),
)
KIND_RULES: dict[str, tuple[RecordingRule, ...]] = {kind: _kind_rules(kind, state) for kind, state in KINDS.items()}
"""A group a kind: each is a join of all GPUs, and together they would take a group of a thousand nodes over a second."""
LEVEL_RULES: tuple[RecordingRule, ...] = tuple(rule for level in LEVELS for rule in _level_rules(level))

TRAINING_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        "run_rank:gpuwatch_run_training_seconds:increase<starved_window_s>",
        'sum without (state) (increase(gpuwatch_run_seconds_total{state=~"<training_states>"}[<starved_window_s>]))',
    ),
    RecordingRule(
        "run_rank_state:gpuwatch_run_training_seconds:share<starved_window_s>",
        """\
increase(gpuwatch_run_seconds_total{state="input_wait"}[<starved_window_s>])
/ ignoring (state) group_left ()
(run_rank:gpuwatch_run_training_seconds:increase<starved_window_s> > 0)""",
    ),
)

PROGRESS_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        "run_rank:gpuwatch_run_stalled:share<stalled_window_s>",
        """\
sum without (state) (rate(gpuwatch_run_seconds_total{state="stalled"}[<stalled_window_s>]))
/ (rate(gpuwatch_ledger_watermark_timestamp_seconds[<stalled_window_s>]) > 0)""",
    ),
    RecordingRule("run_rank:gpuwatch_steps:increase<stalled_for_s>", "increase(gpuwatch_steps_total[<stalled_for_s>])"),
    RecordingRule(
        "run_rank:gpuwatch_run_unknown:increase<telemetry_window_s>",
        'sum without (state) (increase(gpuwatch_run_seconds_total{state="unknown"}[<telemetry_window_s>]))',
    ),
)

RUN_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        "run:gpuwatch_run_phases:increase<stalled_window_s>",
        'sum by (job, run) (increase(gpuwatch_run_seconds_total{state=~"eval|checkpoint|compile"}[<stalled_window_s>]))',
    ),
    RecordingRule(
        "run:gpuwatch_step_seconds:mean<step_window_s>",
        """\
sum by (job, run) (rate(gpuwatch_step_seconds_sum[<step_window_s>]))
/ (sum by (job, run) (rate(gpuwatch_step_seconds_count[<step_window_s>])) > 0)""",
    ),
)

HEALTH_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        "gpu:gpuwatch_gpu_held_idle:share<idle_window_s>",
        # Of a whole window: a GPU that has been known for two minutes has not been idle for fifteen.
        f'sum without (kind) (avg_over_time({_SHARE}{{kind="idle"}}[<idle_window_s>]))\n'
        f'and on ({GPU_KEY}) {_RATE}{{kind="all"}} offset <idle_window_s>',
    ),
    RecordingRule(
        "gpu:gpuwatch_gpu_utilization_ratio:avg<stalled_window_s>",
        "avg_over_time(gpuwatch_gpu_utilization_ratio[<stalled_window_s>])",
    ),
    RecordingRule(
        "gpu:gpuwatch_gpu_throttled:share<throttled_window_s>",
        'max without (reason) (avg_over_time(gpuwatch_gpu_throttled{reason=~"<throttle_reasons>"}[<throttled_window_s>]))',
    ),
    RecordingRule("node:gpuwatch_gpu_processes:max", "max by (job, instance) (gpuwatch_gpu_processes)"),
)

BASELINE_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        "run:gpuwatch_step_seconds:median<step_baseline_s>",
        "quantile_over_time(0.5, run:gpuwatch_step_seconds:mean<step_window_s>[<step_baseline_s>])",
    ),
    RecordingRule(
        "gpu:gpuwatch_gpu_power_watts:avg<busy_window_s>", "avg_over_time(gpuwatch_gpu_power_watts[<busy_window_s>])"
    ),
    RecordingRule(
        "gpu:gpuwatch_gpu_power_watts:max6h", "max_over_time(gpu:gpuwatch_gpu_power_watts:avg<busy_window_s>[6h])"
    ),
    RecordingRule(
        "gpu:gpuwatch_gpu_utilization_ratio:busy_at_low_power",
        f"""\
min_over_time(gpu:gpuwatch_gpu_utilization_ratio:avg<stalled_window_s>[<busy_window_s>]) > <busy_ratio>
and on ({GPU_KEY})
gpu:gpuwatch_gpu_power_watts:avg<busy_window_s> < <low_power_ratio> * gpu:gpuwatch_gpu_power_watts:max6h""",
    ),
)
"""Slow to change and long to read."""
LEDGER_INTERVAL_S = 60
"""How often GPU time by kind, owner and level is recorded: its windows are five minutes long."""
BASELINE_INTERVAL_S = 120
"""Well within the five minutes for which a recorded value is seen: a late evaluation must not make an alert begin anew."""
