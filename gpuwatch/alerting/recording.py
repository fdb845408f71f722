"""What is recorded: GPU time by kind for every level, training shares by rank, baselines. Pure data.

A `rate` is in GPUs: GPU-seconds a second. A share divides by the sum of all states, never by a clock, so that a late scrape
cannot make a GPU look starved. Higher levels are sums of the GPUs' rates, which keeps them cheap on a large fleet.
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
OWNER = f"topk by ({GPU_KEY}) (1, gpuwatch_gpu_owner_info)"
"""One owner a GPU: two owner series, which a bug or a race could make, must not fail the rule for all GPUs."""

_RATE = "gpu_kind:gpuwatch_gpu_seconds:rate<ledger_window_s>"
_PRICE = "gpu:gpuwatch_gpu_price:per_hour"

LEVELS = {"node": "instance", "run": "run", "job": "job_id", "user": "user", "fleet": ""}
"""Levels above the GPU, by the label that they keep. `run` is empty for GPUs without a hook."""


def _gpu_rules() -> tuple[RecordingRule, ...]:
    states = [
        RecordingRule(
            _RATE,
            f'sum without (state) (rate(gpuwatch_gpu_seconds_total{{state="{state}"}}[<ledger_window_s>]))',
            (("kind", kind),),
        )
        for kind, state in KINDS.items()
    ]
    whole = RecordingRule(
        _RATE, "sum without (state) (rate(gpuwatch_gpu_seconds_total[<ledger_window_s>]))", (("kind", "all"),)
    )
    return (*states, whole, _share("gpu", _RATE))


def _share(level: str, rate: str) -> RecordingRule:
    prefix = f"{level}_kind" if level != "fleet" else "kind"
    return RecordingRule(
        f"{prefix}:gpuwatch_gpu_seconds:share<ledger_window_s>",
        f'{rate}{{kind!="all"}}\n/ ignoring (kind) group_left ()\n({rate}{{kind="all"}} > 0)',
    )


def _joined(level: str, rate: str) -> str:
    """Return the expression of GPUs' rates with the level's label, which only the owner series has."""
    if level in ("node", "fleet"):
        return rate
    return f"{rate}\n* on ({GPU_KEY}) group_left ({LEVELS[level]})\n{OWNER}"


def _level_rules(level: str) -> tuple[RecordingRule, ...]:
    by = ", ".join(label for label in (LEVELS[level], "kind") if label)
    name = f"{level}_kind" if level != "fleet" else "kind"
    record = f"{name}:gpuwatch_gpu_seconds:rate<ledger_window_s>"
    return RecordingRule(record, f"sum by ({by}) (\n{_joined(level, _RATE)}\n)"), _share(level, record)


def cost_rules(prices: dict[str, float], default: float) -> tuple[RecordingRule, ...]:
    """Return what every level's GPU time costs an hour, by kind. `prices` are by model name."""
    expr = "\nor\n".join(
        [
            *(f'max by ({GPU_KEY}) (gpuwatch_gpu_info{{model="{model}"}}) * {price:g}' for model, price in prices.items()),
            f"max by ({GPU_KEY}) (gpuwatch_gpu_ledger_watermark_timestamp_seconds) * 0 + {default:g}",
        ]
    )  # fmt: skip
    rules = [RecordingRule(_PRICE, expr)]
    priced = f"{_RATE}\n* on ({GPU_KEY}) group_left ()\n{_PRICE}"
    for level, label in LEVELS.items():
        by = ", ".join(each for each in (label, "kind") if each)
        name = f"{level}_kind" if level != "fleet" else "kind"
        rules.append(
            RecordingRule(f"{name}:gpuwatch_gpu_cost:per_hour", f"sum by ({by}) (\n{_joined(level, priced)}\n)")
        )
    return tuple(rules)


LEDGER_RULES: tuple[RecordingRule, ...] = (
    *_gpu_rules(),
    *(rule for level in LEVELS for rule in _level_rules(level)),
)

RUN_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        "run_rank:gpuwatch_run_training_seconds:increase<starved_window_s>",
        'sum without (state) (increase(gpuwatch_run_seconds_total{state=~"<training_states>"}[<starved_window_s>]))',
    ),
    RecordingRule(
        "run_rank_state:gpuwatch_run_training_seconds:share<starved_window_s>",
        """\
increase(gpuwatch_run_seconds_total{state=~"input_wait|transfer"}[<starved_window_s>])
/ ignoring (state) group_left ()
(run_rank:gpuwatch_run_training_seconds:increase<starved_window_s> > 0)""",
    ),
    RecordingRule(
        "run_rank:gpuwatch_run_stalled:share<stalled_window_s>",
        """\
sum without (state) (rate(gpuwatch_run_seconds_total{state="stalled"}[<stalled_window_s>]))
/ (sum without (state) (rate(gpuwatch_run_seconds_total[<stalled_window_s>])) > 0)""",
    ),
    RecordingRule(
        "run:gpuwatch_step_seconds:mean<step_window_s>",
        """\
sum by (job, run) (rate(gpuwatch_step_seconds_sum[<step_window_s>]))
/ (sum by (job, run) (rate(gpuwatch_step_seconds_count[<step_window_s>])) > 0)""",
    ),
    RecordingRule(
        "gpu:gpuwatch_gpu_power_watts:avg<busy_window_s>", "avg_over_time(gpuwatch_gpu_power_watts[<busy_window_s>])"
    ),
)

BASELINE_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        "run:gpuwatch_step_seconds:median<step_baseline_s>",
        "quantile_over_time(0.5, run:gpuwatch_step_seconds:mean<step_window_s>[<step_baseline_s>])",
    ),
    RecordingRule(
        "gpu:gpuwatch_gpu_power_watts:max6h", "max_over_time(gpu:gpuwatch_gpu_power_watts:avg<busy_window_s>[6h])"
    ),
)
"""Slow to change and long to read: evaluated every five minutes."""
BASELINE_INTERVAL_S = 300
