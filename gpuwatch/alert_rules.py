"""Prometheus rules: what is recorded from the ledgers and what is worth an alert. Pure: `render` gives the file's text.

Shares divide by sums of states, never by a clock, so a late scrape cannot make a run look starved. `<name>` in a rule
stands for a field of `AlertThresholds`: every number exists once, there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gpuwatch.errors import ConfigError
from gpuwatch.ledger import COMM_WAIT, COMPUTE, HOST_WAIT, INPUT_WAIT, TRANSFER

TRAINING_STATES = (INPUT_WAIT, TRANSFER, COMPUTE, HOST_WAIT, COMM_WAIT)
"""The states of a training step, over which starvation is a share. Start-up, compilation, evaluation and checkpoints
are left out on purpose: they can neither look like starvation nor thin it out. So is `other`, which holds an evaluation
that was not declared."""

RUNBOOKS = "docs/runbooks"


@dataclass(frozen=True)
class AlertThresholds:
    """Every number in the rules. Durations in seconds, ratios 0–1. Raises ConfigError for a value that cannot work."""

    job: str = "gpuwatch"
    """Name of the scrape job that reads the agents."""
    starved_ratio: float = 0.2
    """Share of training time spent waiting for input. A healthy loop stays at a few per cent."""
    starved_window_s: float = 300
    starved_min_training_s: float = 60
    """Training time that the window must hold before a share of it means anything."""
    starved_for_s: float = 120
    """At most window minus minimum, or training in bursts between long evaluations would never fire."""
    idle_ratio: float = 0.9
    """Share of a GPU's time held idle. Below 1, or one busy sample every half hour would hide it."""
    idle_window_s: float = 900
    idle_for_s: float = 900
    stalled_ratio: float = 0.5
    stalled_window_s: float = 120
    stalled_for_s: float = 60
    shm_used_ratio: float = 0.9
    shm_for_s: float = 60
    telemetry_lost_s: float = 60
    """Unexplained seconds within the window that count as lost while the run is heard again in between."""
    telemetry_window_s: float = 300
    telemetry_for_s: float = 60
    agent_frozen_window_s: float = 120
    """An agent that answers but takes no new sample for so long counts as down. At least two scrape intervals."""
    agent_down_for_s: float = 60
    keep_firing_for_s: float = 900
    """How long an alert is held when its expression goes quiet: a series that vanished is not a problem that was fixed.
    0 lets it resolve at once."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name.endswith("_ratio") and not 0 < value <= 1:
                raise ConfigError(f"{name} = {value}: a share must be above 0 and at most 1")
            if name.endswith("_s") and (value < 0 or (value == 0 and name != "keep_firing_for_s")):
                raise ConfigError(f"{name} = {value}: a duration in seconds must be positive")
        if self.starved_for_s > self.starved_window_s - self.starved_min_training_s:
            raise ConfigError(
                f"starved_for_s = {self.starved_for_s}: must be at most starved_window_s - starved_min_training_s "
                f"({self.starved_window_s - self.starved_min_training_s}), or short spells of training never fire"
            )


@dataclass(frozen=True)
class RecordingRule:
    """One recorded series. `record` is named level:metric:operation, its window included."""

    record: str
    expr: str


@dataclass(frozen=True)
class AlertRule:
    """One alert. Its runbook is the file of its name in docs/runbooks."""

    name: str
    severity: str
    """`critical`: GPUs stand still or nobody is watching them. `warning`: GPU time is being lost."""
    expr: str
    for_field: str
    """The field of `AlertThresholds` that says how long the expression must hold."""
    summary: str
    description: str
    keep: bool = True
    """Whether the alert is held for `keep_firing_for_s`: false where a vanished series already is what fires it."""


RECORDING_RULES: tuple[RecordingRule, ...] = (
    RecordingRule(
        "run_rank_state:gpuwatch_run_seconds:share<starved_window_s>",
        """\
rate(gpuwatch_run_seconds_total[<starved_window_s>])
/ ignoring (state) group_left ()
sum without (state) (rate(gpuwatch_run_seconds_total[<starved_window_s>]))""",
    ),
    RecordingRule(
        "run_rank:gpuwatch_run_training_seconds:increase<starved_window_s>",
        """\
sum without (state) (increase(gpuwatch_run_seconds_total{state=~"<training_states>"}[<starved_window_s>]))""",
    ),
    RecordingRule(
        "run_rank_state:gpuwatch_run_training_seconds:share<starved_window_s>",
        """\
increase(gpuwatch_run_seconds_total{state=~"<training_states>"}[<starved_window_s>])
/ ignoring (state) group_left ()
run_rank:gpuwatch_run_training_seconds:increase<starved_window_s>""",
    ),
    RecordingRule(
        "gpu_state:gpuwatch_gpu_seconds:share<idle_window_s>",
        """\
rate(gpuwatch_gpu_seconds_total[<idle_window_s>])
/ ignoring (state) group_left ()
sum without (state) (rate(gpuwatch_gpu_seconds_total[<idle_window_s>]))""",
    ),
)

_RUN = (
    "{{ with printf `gpuwatch_run_info{instance=%q,run=%q,rank=%q}` "
    "$labels.instance $labels.run $labels.rank | query }}"
    "{{ (. | first).Labels.name }} ({{ $labels.run }}, rank {{ $labels.rank }})"
    "{{ else }}{{ $labels.run }}, rank {{ $labels.rank }}{{ end }} on {{ $labels.instance }}"
)
_CAUSE = (
    "{{ with printf `gpuwatch_finding_active{instance=%q,run=%q} == 1` $labels.instance $labels.run | query }}"
    "Cause: {{ range $i, $f := . }}{{ if $i }}, {{ end }}{{ $f.Labels.cause }}{{ end }}."
    "{{ else }}No cause found yet.{{ end }}"
)
_TRANSFER = (
    "{{ with printf `run_rank_state:gpuwatch_run_training_seconds:share<starved_window_s>"
    '{instance=%q,run=%q,rank=%q,state="transfer"}` $labels.instance $labels.run $labels.rank | query }}'
    " Transfer to the device took another {{ . | first | value | humanizePercentage }}.{{ end }}"
)

ALERT_RULES: tuple[AlertRule, ...] = (
    AlertRule(
        "GpuStarved",
        "warning",
        """\
run_rank_state:gpuwatch_run_training_seconds:share<starved_window_s>{state="input_wait"} > <starved_ratio>
and ignoring (state)
run_rank:gpuwatch_run_training_seconds:increase<starved_window_s> >= <starved_min_training_seconds>""",
        "starved_for_s",
        "Run " + _RUN + " waits for input {{ $value | humanizePercentage }} of its training time",
        "Of the training time in the last <starved_window_s>, {{ $value | humanizePercentage }} went by with no "
        "batch to train on." + _TRANSFER + " " + _CAUSE + " Evaluation, checkpoints and start-up are not counted. "
        "Advice with numbers is on the dashboard and in `gpuwatch report`.",
    ),
    AlertRule(
        "GpuHeldIdle",
        "warning",
        # topk: two owner series of one GPU, which a bug or a race could make, must not fail the rule for all GPUs.
        # The second half keeps a GPU whose owner is not known.
        """\
(gpu_state:gpuwatch_gpu_seconds:share<idle_window_s>{state="held_idle"} > <idle_ratio>)
* on (job, instance, gpu, UUID)
  group_left (run, rank, user, job_id, workload_namespace, workload_pod, workload_container)
topk by (job, instance, gpu, UUID) (1, gpuwatch_gpu_owner_info)
or
(gpu_state:gpuwatch_gpu_seconds:share<idle_window_s>{state="held_idle"} > <idle_ratio>)
unless on (job, instance, gpu, UUID) gpuwatch_gpu_owner_info""",
        "idle_for_s",
        "GPU {{ $labels.gpu }} on {{ $labels.instance }} is held idle by {{ or $labels.user `an unknown user` }} "
        "({{ $value | humanizePercentage }} of the last <idle_window_s>)",
        "A process holds GPU {{ $labels.gpu }} ({{ $labels.UUID }}) and nothing runs on it. Owner: "
        "user {{ or $labels.user `unknown` }}, job {{ or $labels.job_id `none` }}, "
        "pod {{ or $labels.workload_pod `none` }}. End the process or release the allocation.",
    ),
    AlertRule(
        "RunStalled",
        "critical",
        # A step within the last window means that it moves again, whatever the share still says.
        """\
sum without (state) (rate(gpuwatch_run_seconds_total{state="stalled"}[<stalled_window_s>]))
/ sum without (state) (rate(gpuwatch_run_seconds_total[<stalled_window_s>]))
> <stalled_ratio>
unless increase(gpuwatch_steps_total[<stalled_for_s>]) > 0""",
        "stalled_for_s",
        "Run " + _RUN + " makes no progress: {{ $value | humanizePercentage }} of the last <stalled_window_s> stalled",
        "No step has ended for more than ten times the run's usual step, outside any declared phase. "
        + _CAUSE
        + " Take the stacks of all ranks before ending it: a hung collective and a dead loader worker look alike here.",
    ),
    AlertRule(
        "ShmNearlyFull",
        "warning",
        "gpuwatch_shm_used_bytes / (gpuwatch_shm_size_bytes > 0) > <shm_used_ratio>",
        "shm_for_s",
        "/dev/shm ({{ $labels.mount }}) on {{ $labels.instance }} is {{ $value | humanizePercentage }} full",
        "Loader workers hand batches over through /dev/shm; when it is full they die of a bus error. Enlarge it "
        "(`docker run --shm-size`, an emptyDir of medium Memory), or lower num_workers or prefetch_factor.",
    ),
    AlertRule(
        "GpuwatchTelemetryLost",
        "warning",
        # Three ways: it is silent now (a good-bye leaves nothing unknown), it was silent again and again, or its series
        # vanished while it was up.
        """\
gpuwatch_run_up == 0
and ignoring (state) increase(gpuwatch_run_seconds_total{state="unknown"}[<telemetry_window_s>]) > 0
or
sum without (state) (increase(gpuwatch_run_seconds_total{state="unknown"}[<telemetry_window_s>]))
> <telemetry_lost_seconds>
or
last_over_time(gpuwatch_run_up[<telemetry_window_s>]) == 1 unless gpuwatch_run_up""",
        "telemetry_for_s",
        "Run " + _RUN + " is no longer measured",
        "Its process died, or its messages stopped without a good-bye: what its GPUs do is unknown, and its other alerts "
        "say nothing about it now. See whether the process lives; its last words are in its own log.",
    ),
    AlertRule(
        "GpuwatchAgentDown",
        "critical",
        """\
up{job="<job>"} == 0
or changes(gpuwatch_sample_timestamp_seconds[<agent_frozen_window_s>]) == 0
or absent(up{job="<job>"})""",
        "agent_down_for_s",
        "gpuwatch agent{{ with $labels.instance }} {{ . }} is down or frozen{{ else }}: no target to scrape{{ end }}",
        "Nothing on that node is being measured: a quiet dashboard does not mean that all is well. Training goes on "
        "unharmed and its totals arrive when the agent is back.",
        keep=False,
    ),
)


def render(thresholds: AlertThresholds | None = None, *, runbooks: str = RUNBOOKS) -> str:
    """Return the rules file as YAML, for `rule_files` of Prometheus 2.42 or later (`keep_firing_for`).

    Args:
        thresholds: The numbers; the defaults when None.
        runbooks: What stands before `/<Alert>.md` in the `runbook_url` annotation: a path or a URL.
    """
    import yaml  # of the agent extra

    thresholds = thresholds or AlertThresholds()
    groups = [
        {"name": "gpuwatch-ledger", "rules": list(_recordings(thresholds))},
        {"name": "gpuwatch-alerts", "rules": list(_alerts(thresholds, runbooks))},
    ]

    class Dumper(yaml.SafeDumper):
        """Writes a text of several lines as one, so that people can read it."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    body = yaml.dump({"groups": groups}, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return "# Written by `gpuwatch rules` from gpuwatch/alert_rules.py: change it there.\n" + body


def _recordings(thresholds: AlertThresholds) -> Iterator[dict[str, Any]]:
    for rule in RECORDING_RULES:
        yield {"record": _fill(rule.record, thresholds), "expr": _fill(rule.expr, thresholds)}


def _alerts(thresholds: AlertThresholds, runbooks: str) -> Iterator[dict[str, Any]]:
    for rule in ALERT_RULES:
        entry: dict[str, Any] = {
            "alert": rule.name,
            "expr": _fill(rule.expr, thresholds),
            "for": _duration(getattr(thresholds, rule.for_field)),
        }
        if rule.keep and thresholds.keep_firing_for_s:
            entry["keep_firing_for"] = _duration(thresholds.keep_firing_for_s)
        entry["labels"] = {"severity": rule.severity}
        entry["annotations"] = {
            "summary": _fill(rule.summary, thresholds),
            "description": _fill(rule.description, thresholds),
            "runbook_url": f"{runbooks.rstrip('/')}/{rule.name}.md",
        }
        yield entry


def _fill(text: str, thresholds: AlertThresholds) -> str:
    """Return `text` with each `<field>` replaced. A field in seconds is written `5m`; as `<…_seconds>`, as a number."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == "training_states":
            return "|".join(TRAINING_STATES)
        if name.endswith("_seconds"):
            return f"{getattr(thresholds, name.removesuffix('econds')):g}"
        field = getattr(thresholds, name)
        if name.endswith("_s"):
            return _duration(field)
        return field if isinstance(field, str) else f"{field:g}"

    return re.sub(r"<([a-z_]+)>", value, text)


def _duration(seconds: float) -> str:
    """Return seconds as Prometheus writes a duration: `5m`, `90s`, `1500ms`."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{int(seconds) // size}{unit}"
    return f"{int(seconds)}s"
