"""Alerts about GPUs, each with the owner of the GPU."""

from __future__ import annotations

from gpuwatch.alerting.recording import GPU_KEY, OWNER, OWNER_LABELS
from gpuwatch.alerting.rule import AlertRule
from gpuwatch.alerting.texts import CAUSE, GPU, GPU_OWNER, GPU_STACKS, NODE_OWNERS


def _with_owner(expr: str, known: str) -> str:
    """Return the expression with the owner's labels; a GPU whose owner is not known is kept.

    `known` is a series that every GPU has for which the expression has a value.
    """
    return (
        f"({expr.strip()})\n* on ({GPU_KEY}) group_left ({OWNER_LABELS})\n({OWNER} or on ({GPU_KEY}) {known} * 0 + 1)"
    )


XIDS = {
    48: "double-bit ECC error", 63: "row remapping pending", 64: "row remapping failed", 74: "NVLink error",
    79: "GPU fell off the bus", 94: "contained memory error", 95: "uncontained memory error", 119: "GSP timeout",
}  # fmt: skip
"""https://docs.nvidia.com/deploy/xid-errors/"""
XIDS_OF_PROGRAMS = (13, 31, 43, 45, 68)
"""What a faulty or killed program causes: its owner's matter, and in its own log."""
_XID_TEXT = (
    "".join(f"{{{{ {'else ' if n else ''}if eq $value {xid}.0 }}}}{text}" for n, (xid, text) in enumerate(XIDS.items()))
    + "{{ else }}see NVIDIA's list of XIDs{{ end }}"
)

GPU_ALERTS: tuple[AlertRule, ...] = (
    AlertRule(
        name="GpuHeldIdle",
        severity="warning",
        expr=_with_owner(
            "gpu:gpuwatch_gpu_held_idle:share<idle_window_s> > <idle_ratio>",
            "gpu:gpuwatch_gpu_held_idle:share<idle_window_s>",
        ),
        for_field="idle_for_s",
        summary=GPU + " is held idle by {{ or $labels.user `an unknown user` }} "
        "({{ $value | humanizePercentage }} of the last <idle_window_s>)",
        description="A process holds GPU {{ $labels.gpu }} ({{ $labels.UUID }}) and nothing runs on it.",
        owner=GPU_OWNER,
        cause="held_idle: a notebook left open, a job that ended and whose process did not, a server without requests",
        advice="end the process or release the allocation",
        lost_gpus="vector(%f)",
    ),
    AlertRule(
        name="GpuAllocatedUnused",
        severity="warning",
        # Only where an allocation is known: a GPU without a job or pod that claims it is free, and no alert.
        expr=f"""\
((gpuwatch_gpu_processes == 0) + 1)
* on ({GPU_KEY}) group_left ({OWNER_LABELS})
{OWNER}{{job_id!=""}}
or
((gpuwatch_gpu_processes == 0) + 1)
* on ({GPU_KEY}) group_left ({OWNER_LABELS})
{OWNER}{{job_id="",workload_pod!=""}}""",
        for_field="processless_for_s",
        summary=GPU + " is allocated to {{ or $labels.user `an unknown user` }} and no process has used it for "
        "<processless_for_s>",
        description="The scheduler gave GPU {{ $labels.gpu }} ({{ $labels.UUID }}) away and nothing has opened it. Where no "
        "allocation is known this cannot be told, and is not.",
        owner=GPU_OWNER,
        cause="a job that asks for more GPUs than it uses, waits for its input, or sleeps",
        advice="ask for fewer GPUs, or release the allocation",
        lost_gpus="vector(%f)",
    ),
    AlertRule(
        name="GpuBusyNoProgress",
        severity="critical",
        # With a hook, its ledger says stalled. Without one, only full utilisation at a power far under the GPU's own tells.
        expr=_with_owner(
            f"""\
  (
    gpu:gpuwatch_gpu_utilization_ratio:avg<stalled_window_s> > <busy_ratio>
    and on ({GPU_KEY})
    gpu_kind:gpuwatch_gpu_seconds:share<ledger_window_s>{{kind="stalled"}} > <stalled_ratio>
  )
  or
  (
    gpu:gpuwatch_gpu_utilization_ratio:busy_at_low_power
    unless on ({GPU_KEY})
    gpu_kind:gpuwatch_gpu_seconds:share<ledger_window_s>{{kind="useful"}} > 0
  )
""",
            "gpu:gpuwatch_gpu_utilization_ratio:avg<stalled_window_s>",
        ),
        for_field="busy_for_s",
        summary=GPU + " reads {{ $value | humanizePercentage }} busy, and nothing gets done",
        description="Utilisation says only that some kernel ran. Its run finishes no step, or (without a hook) it draws far "
        "less power than the same GPU did within six hours: the sign of a collective that spins."
        "{{ with printf `gpuwatch_gpu_power_watts{instance=%q,UUID=%q}` $labels.instance $labels.UUID | query }}"
        " Power: {{ . | first | value | printf `%.0f` }} W.{{ end }}",
        owner=GPU_OWNER,
        cause=CAUSE,
        advice="take the stacks of all ranks (" + GPU_STACKS + "), then end the run and start it from its last checkpoint",
        lost_gpus="vector(1)",
        lost_arguments="",
    ),
    AlertRule(
        name="GpuThrottled",
        severity="warning",
        expr=_with_owner(
            "gpu:gpuwatch_gpu_throttled:share<throttled_window_s> > <throttled_ratio>",
            "gpu:gpuwatch_gpu_throttled:share<throttled_window_s>",
        ),
        for_field="throttled_for_s",
        summary=GPU + "'s clocks are held down {{ $value | humanizePercentage }} of the last <throttled_window_s>"
        "{{ with printf `gpuwatch_gpu_temperature_celsius{instance=%q,UUID=%q}` $labels.instance $labels.UUID | query }}"
        " ({{ . | first | value | printf `%.0f` }} °C){{ end }}",
        description="The driver slows the GPU for its temperature or for its hardware's sake. A power cap alone does not fire: "
        "a GPU that works hard is at it.",
        owner=GPU_OWNER,
        cause="{{ with printf `gpuwatch_gpu_throttled{instance=%q,UUID=%q} == 1` $labels.instance $labels.UUID | query }}"
        "throttled: {{ range $i, $r := . }}{{ if $i }}, {{ end }}{{ $r.Labels.reason }}{{ end }}{{ else }}throttled{{ end }}",
        advice="cooling, fans, power supply; drain the node if it stays",
        lost_gpus=None,
    ),
    AlertRule(
        name="GpuLost",
        severity="critical",
        expr="max_over_time(gpuwatch_gpus_expected[<gpu_lost_memory_s>]) - gpuwatch_gpus_seen > 0",
        for_field="gpu_lost_for_s",
        summary="{{ $value }} GPU{{ if gt $value 1.0 }}s{{ end }} of {{ $labels.instance }} fell off the bus",
        description="The driver lists fewer GPUs than it did."
        "{{ with printf `last_over_time(gpuwatch_gpu_info{instance=%q}[<gpu_lost_memory_s>]) unless gpuwatch_gpu_info` "
        "$labels.instance | query }} Missing: {{ range $i, $g := . }}{{ if $i }}, {{ end }}GPU {{ $g.Labels.gpu }} "
        "({{ $g.Labels.UUID }}){{ end }}.{{ end }}",
        owner=NODE_OWNERS,
        cause="a hardware fault, an XID, or a driver that was reloaded; `dmesg -T | grep -i xid` says which",
        advice="drain the node, reset the GPU once nothing uses it (`nvidia-smi --gpu-reset -i N`), else reboot",
        lost_gpus="vector(%f)",
    ),
    AlertRule(
        name="GpuXid",
        severity="critical",
        # By its time: an increase misses a counter's first rise.
        expr=_with_owner(
            f"""\
  gpuwatch_gpu_last_xid
  and on ({GPU_KEY}) time() - gpuwatch_gpu_last_xid_timestamp_seconds < <xid_window_seconds>
  unless on ({GPU_KEY}) ("""
            + " or ".join(f"gpuwatch_gpu_last_xid == {xid}" for xid in XIDS_OF_PROGRAMS)
            + ")\n",
            "gpuwatch_gpu_last_xid",
        ),
        for_field="xid_for_s",
        summary=GPU + " reported XID {{ $value }}: " + _XID_TEXT,
        description="The driver reports a fault of GPU {{ $labels.gpu }} ({{ $labels.UUID }}). XIDs that faulty programs cause "
        "are not told.",
        owner=GPU_OWNER,
        cause="XID {{ $value }}: " + _XID_TEXT,
        advice="end the run on it, drain the node, reset the GPU (`nvidia-smi --gpu-reset -i N`); the runbook says which XIDs "
        "want a repair",
        lost_gpus="vector(1)",
        lost_arguments="",
    ),
)  # fmt: skip
