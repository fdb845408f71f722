"""Pieces of alert texts, as Prometheus' Go templates. They look up who and why at the moment the alert is told."""

from __future__ import annotations

RUN = (
    "{{ with printf `gpuwatch_run_info{instance=%q,run=%q,rank=%q}` "
    "$labels.instance $labels.run $labels.rank | query }}"
    "{{ (. | first).Labels.name }} ({{ $labels.run }}, rank {{ $labels.rank }})"
    "{{ else }}{{ $labels.run }}, rank {{ $labels.rank }}{{ end }} on {{ $labels.instance }}"
)
WHOLE_RUN = (
    "{{ with printf `topk(1, gpuwatch_run_info{run=%q})` $labels.run | query }}"
    "{{ (. | first).Labels.name }} ({{ $labels.run }}){{ else }}{{ $labels.run }}{{ end }}"
)
NAMED_RUN = "{{ or $labels.name $labels.run }} ({{ $labels.run }}, rank {{ $labels.rank }}) on {{ $labels.instance }}"
NAMED_OWNER = "user {{ or $labels.user `unknown` }}, job {{ or $labels.job_id `none` }}"
"""Of alerts that have these labels: no query for each of what may be a thousand."""
_OF_INFO = (
    " | query }}user {{ or (. | first).Labels.user `unknown` }}, job {{ or (. | first).Labels.job_id `none` }}"
    "{{ else }}unknown{{ end }}"
)
RANK_OWNER = (
    "{{ with printf `gpuwatch_run_info{instance=%q,run=%q,rank=%q}` $labels.instance $labels.run $labels.rank"
    + _OF_INFO
)
RUN_OWNER = "{{ with printf `topk(1, gpuwatch_run_info{run=%q})` $labels.run" + _OF_INFO
GPU_OWNER = (
    "user {{ or $labels.user `unknown` }}, job {{ or $labels.job_id `none` }}, pod {{ or $labels.workload_pod `none` }}"
)
NODE_OWNERS = (
    '{{ with printf `count by (user) (gpuwatch_gpu_owner_info{instance=%q,user!=""})` $labels.instance | query }}'
    "users on the node: {{ range $i, $u := . }}{{ if $i }}, {{ end }}{{ $u.Labels.user }}{{ end }}"
    "{{ else }}whoever runs the node{{ end }}"
)
CAUSE = (
    "{{ with printf `count by (cause) (gpuwatch_finding_active{run=%q} == 1)` $labels.run | query }}"
    "{{ range $i, $f := . }}{{ if $i }}, {{ end }}{{ $f.Labels.cause }}{{ end }}"
    "{{ else }}none found yet{{ end }}"
)
STACKS = "`gpuwatch stacks {{ $labels.run }}`"
"""Looks at all ranks of the run on the node where it is given. Only in alerts whose label `run` is one run's id."""
GPU_STACKS = (
    "{{ if and $labels.run (ne $labels.run `shared`) }}" + STACKS + " on each of its nodes"
    "{{ else }}`gpuwatch stacks --pid PID` on {{ $labels.instance }}, PID by `nvidia-smi`{{ end }}"
)
"""Of a GPU whose processes may have no hook."""
GPU = "GPU {{ $labels.gpu }} on {{ $labels.instance }}"
