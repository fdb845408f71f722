"""Alerts about nodes: /dev/shm and the agent itself."""

from __future__ import annotations

from gpuwatch.alerting.rule import AlertRule
from gpuwatch.alerting.texts import NODE_OWNERS, RUN_OWNER, WHOLE_RUN

_ENLARGE = "enlarge it (`docker run --shm-size`, an emptyDir of medium Memory), or lower num_workers or prefetch_factor"

NODE_ALERTS: tuple[AlertRule, ...] = (
    AlertRule(
        name="ShmNearlyFull",
        severity="warning",
        expr="gpuwatch_shm_used_bytes / (gpuwatch_shm_size_bytes > 0) > <shm_used_ratio>",
        for_field="shm_for_s",
        summary="/dev/shm ({{ $labels.mount }}) on {{ $labels.instance }} is {{ $value | humanizePercentage }} full",
        description="Loader workers hand batches over through /dev/shm; when it is full they die of a bus error.",
        owner=NODE_OWNERS,
        cause="shm_exhaustion: more batches in flight than it holds, or files that killed runs left",
        advice=_ENLARGE,
        lost_gpus=None,
    ),
    AlertRule(
        name="ShmForecast",
        severity="warning",
        # From the loader's settings, before it happens; or from its growth, whatever grows.
        expr="""\
gpuwatch_finding_active{cause="shm_exhaustion"} == 1
or
predict_linear(gpuwatch_shm_used_bytes[<shm_forecast_window_s>], <shm_forecast_ahead_seconds>)
/ (gpuwatch_shm_size_bytes > 0) > 1
and gpuwatch_shm_used_bytes / gpuwatch_shm_size_bytes > <shm_forecast_used_ratio>""",
        for_field="shm_forecast_for_s",
        summary="/dev/shm {{ with $labels.mount }}({{ . }}) {{ end }}on {{ $labels.instance }} will be full"
        "{{ if $labels.run }} when the loader of run " + WHOLE_RUN + " is at its depth"
        "{{ else }} within <shm_forecast_ahead_s> at its growth{{ end }}",
        description="A loader worker dies of a bus error when it is, and the run with it.",
        owner="{{ if $labels.run }}" + RUN_OWNER + "{{ else }}" + NODE_OWNERS + "{{ end }}",
        cause="shm_exhaustion",
        advice=_ENLARGE,
        lost_gpus=None,
    ),
    AlertRule(
        name="GpuwatchAgentDown",
        severity="critical",
        # A node that discovery no longer lists has no `up`: drained first, it is no alert; with processes on its GPUs, it is.
        expr="""\
up{job="<job>"} == 0
or last_over_time(node:gpuwatch_gpu_processes:max[<gone_window_s>]) > 0 unless on (job, instance) up{job="<job>"}
or changes(gpuwatch_sample_timestamp_seconds[<agent_frozen_window_s>]) == 0
or absent(up{job="<job>"})""",
        for_field="agent_down_for_s",
        summary="gpuwatch agent{{ with $labels.instance }} {{ . }} is down or frozen{{ else }}: no target to scrape{{ end }}",
        description="Nothing on that node is being measured: a quiet dashboard does not mean that all is well. Training goes "
        "on unharmed and its totals arrive when the agent is back.",
        owner="whoever runs the node",
        cause="the node or the agent ended, a collector hangs, or the network between",
        advice="`curl http://127.0.0.1:9478/readyz` on the node says what the agent lacks",
        lost_gpus=None,
        keep=False,
    ),
)  # fmt: skip
