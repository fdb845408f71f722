"""Where a device's time goes other than into waits for input: copies, host code, read-backs, compute; evaluation and checkpoints."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, measured, rule, speedup_without
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent, size
from gpuwatch.ledger.states import CHECKPOINT, COMPUTE, EVAL, HOST_WAIT, TRANSFER


@rule(explains=(), explained_by=(), stacks=None, alert="RunInefficient", runbook="RunInefficient")
def transfer_pageable(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when copies take a large share, and the loader is known not to pin its batches."""
    share, steps, loader = window.share(TRANSFER), window.steps, window.loader
    if share < thresholds.transfer_share or len(steps) < thresholds.min_steps or window.waits_hidden_in:
        return None
    if loader is None or loader.pin_memory is not False:
        return None
    copy_s = sum(steps.transfer_s) / len(steps)
    evidence = [
        Evidence("transfer", share, "ratio", f"copies to the device take {percent(share)} of the time ({duration(copy_s)} a step)"),
        Evidence("pinned", 0, "", "pin_memory=False: the driver copies each batch twice, and the host waits"),
    ]  # fmt: skip
    if loader.batch_bytes is not None and copy_s > 0:
        rate = loader.batch_bytes / copy_s
        evidence.append(Evidence("copy rate", rate, "bytes/s", f"the copies run at {rate / 1e9:.1f} GB/s"))
    return Finding(
        cause="transfer_pageable",
        severity="warning",
        title="batches are copied to the device from pageable memory",
        ratio=share,
        evidence=tuple(evidence),
        advice="DataLoader(pin_memory=True) with batch.to(device, non_blocking=True)",
        predicted_speedup=speedup_without(share),
    )


@rule(explains=(), explained_by=(), stacks=None, alert="RunInefficient", runbook="RunInefficient")
def transfer_pcie(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when copies from pinned memory take a large share, at a rate that only the bus limits."""
    share, steps, loader = window.share(TRANSFER), window.steps, window.loader
    if share < thresholds.transfer_share or len(steps) < thresholds.min_steps:
        return None
    if loader is None or loader.pin_memory is not True or loader.batch_bytes is None:
        return None
    copy_s = sum(steps.transfer_s) / len(steps)
    if copy_s <= 0 or loader.batch_bytes / copy_s < thresholds.pcie_bytes_per_s:
        return None
    rate = loader.batch_bytes / copy_s
    return Finding(
        cause="transfer_pcie",
        severity="warning",
        title="copies to the device saturate the bus",
        ratio=share,
        evidence=(
            Evidence("transfer", share, "ratio", f"copies to the device take {percent(share)} of the time ({duration(copy_s)} a step)"),
            Evidence("copy rate", rate, "bytes/s", f"batches of {size(loader.batch_bytes)} are copied from pinned memory at {rate / 1e9:.1f} GB/s"),
        ),
        advice="send fewer bytes (uint8 images, converted and normalised on the device), or copy the next batch on a separate stream during compute",
        predicted_speedup=speedup_without(share),
    )  # fmt: skip


LEAST_IDLE = 0.23
"""Lowest idle share of compute, on recorded GPUs, of a device that kept up with every launch: at stake where no driver reports one."""


@rule(
    explains=(),
    explained_by=(),
    stacks="training",
    alert="RunInefficient",
    runbook="RunInefficient",
    delays_rank="host",
)
def host_bound(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the device idles between steps, or runs each kernel as soon as it is launched, so that no work is queued.

    No event shows how long it then idles between kernels: what the driver sees of it is a lower bound.
    """
    if window.timeline != "device" or len(window.steps) < thresholds.min_device_steps:
        return None
    idle, compute, kept_up = window.share(HOST_WAIT), window.share(COMPUTE), window.kept_up_ratio
    evidence: list[Evidence] = []
    lost = 0.0
    if idle >= thresholds.host_wait_share:
        lost = idle
        text = "the device idled {} of the time while the host did something other than fetch a batch"
        evidence += measured("host wait", idle, text)
    if compute >= 0.5 and kept_up is not None and kept_up >= thresholds.kept_up_share:
        bubbles = None if window.utilization is None else max(0.0, compute - window.utilization)
        if bubbles is None or bubbles >= thresholds.device_bubbles * compute:
            text = "in {} of the steps the device ran each kernel as soon as it was launched: no work was queued"
            evidence += measured("kept up", kept_up, text)
        if bubbles is not None and bubbles >= thresholds.device_bubbles * compute:
            lost += bubbles
            text = f"by the driver's utilisation the device idled between kernels for at least {percent(bubbles / compute)} of compute"
            evidence.append(Evidence("bubbles", bubbles, "ratio", text))
    if not evidence:
        return None
    lost = min(lost, 0.99)
    return Finding(
        cause="host_bound",
        severity="critical" if lost >= thresholds.input_share_critical else "warning",
        title="the device waits for host code",
        ratio=lost or LEAST_IDLE * compute,
        evidence=tuple(evidence),
        advice="launch more work at a time (torch.compile, CUDA graphs, a fused optimizer, a larger batch), and move work out of the "
        "Python loop (logging, metrics, sleeps)",
        predicted_speedup=round(1 / (1 - lost), 2) if lost else None,
    )  # fmt: skip


@rule(explains=(), explained_by=(), stacks="training", alert=None, runbook="Findings")
def step_waits(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when, in the steps of a training on one CPU, the whole process often has nothing to run. Ranks may wait for each other."""
    idle, compute, place = window.step_idle_ratio, window.share(COMPUTE), window.step_place
    if idle is None or idle < thresholds.step_idle or window.device != "cpu" or window.world_size > 1 or window.gpus:
        return None
    lost = idle * compute
    if lost < thresholds.input_share or len(window.steps) < thresholds.min_steps:
        return None
    where = [] if place is None else measured("hottest function", place.ratio, f"{{}} of the step is in {place}")
    return Finding(
        cause="step_waits",
        severity="critical" if lost >= thresholds.input_share_critical else "warning",
        title="the step itself waits: it sleeps, or waits for a file, the network or a lock",
        ratio=lost,
        evidence=(
            *measured("idle in the step", idle, "in {} of the step no thread of the process has work for a core"),
            *where,
        ),
        advice="move what waits out of the step, into a thread or to every N steps (logging, uploads, writing files, sleeps); "
        "a faster device does not shorten it",
        predicted_speedup=speedup_without(lost),
    )


@rule(explains=("host_bound",), explained_by=(), stacks="training", alert="RunInefficient", runbook="RunInefficient")
def sync_every_step(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when nearly every step reads a result back from the device, ends with the device idle, and leaves it idle afterwards.

    A host that is merely slow leaves gaps within compute; one that only goes on working after its last launch reads nothing back.
    """
    drained, read, idle = window.drained_ratio, window.read_back_ratio, window.share(HOST_WAIT)
    if drained is None or read is None or len(window.steps) < thresholds.min_steps or window.timeline != "device":
        return None
    if min(drained, read) < thresholds.drained_share or idle < thresholds.host_wait_share:
        return None
    compute, utilization = window.share(COMPUTE), window.utilization
    if utilization is not None and compute - utilization >= thresholds.device_bubbles * max(compute, 1e-9):
        return None
    return Finding(
        cause="sync_every_step",
        severity="warning",
        title="the host waits for a result of the device at every step, and so cannot run ahead",
        ratio=idle,
        evidence=(
            *measured("read back", read, "{} of the steps read a result back from the device (.item(), .cpu(), print)"),
            *measured("drained", drained, "{} of the steps ended with the device idle"),
            *measured("host wait", idle, "the device then idled {} of the time"),
        ),
        advice="read results every N steps instead of at every step (.item(), print(loss), .cpu()), and keep running means on the device",
        predicted_speedup=speedup_without(idle),
    )


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="Findings")
def gpu_saturated(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when compute is nearly all of the time, and the driver reports the run's GPUs busy as well."""
    share, utilization = window.share(COMPUTE), window.utilization
    if share < thresholds.saturated_share or utilization is None or utilization < thresholds.gpu_busy:
        return None
    return Finding(
        cause="gpu_saturated",
        severity="info",
        title="the GPU is busy: the input keeps up",
        ratio=share,
        evidence=(
            *measured("compute", share, "compute takes {} of the time"),
            *measured("utilization", utilization, "the driver reports a utilisation of {}"),
        ),
        advice="stop tuning the loader: mixed precision, channels_last, torch.compile or a faster GPU shorten the step",
    )


@rule(explains=(), explained_by=(), stacks=None, alert=None, runbook="Findings")
def compute_bound(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when compute is nearly all of the time of a training on the CPU."""
    share, on_cpu = window.share(COMPUTE), window.device == "cpu" and not window.gpus
    if share < thresholds.saturated_share or not on_cpu or len(window.steps) < thresholds.min_steps:
        return None
    if (window.step_idle_ratio or 0.0) >= thresholds.step_idle:
        return None  # it waits rather than computes
    return Finding(
        cause="compute_bound",
        severity="info",
        title="compute takes the time: the input keeps up",
        ratio=share,
        evidence=tuple(measured("compute", share, "compute takes {} of the time")),
        advice="stop tuning the loader: a faster device, torch.compile or lower precision shorten the step",
    )


@rule(explains=(), explained_by=(), stacks="training", alert="RunInefficient", runbook="RunInefficient")
def eval_share(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when evaluation takes a large share of the time."""
    advice = "evaluate half as often, or on a fixed subset of the validation set; without gradients a larger batch fits"
    half = speedup_without(window.share(EVAL) / 2)
    return _phase(window, thresholds, EVAL, "eval_share", "evaluation takes a large part of the run", advice, half)


@rule(explains=(), explained_by=(), stacks="training", alert="RunInefficient", runbook="RunInefficient")
def checkpoint_stall(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when checkpoints take a large share of the time."""
    advice = (
        "save asynchronously (torch.distributed.checkpoint.async_save, or a copy written by a thread), or less often"
    )
    all_of_it, title = speedup_without(window.share(CHECKPOINT)), "training stops while checkpoints are written"
    return _phase(window, thresholds, CHECKPOINT, "checkpoint_stall", title, advice, all_of_it)


def _phase(
    window: Window, thresholds: Thresholds, state: str, cause: str, title: str, advice: str, gain: float | None
) -> Finding | None:
    share = window.share(state)
    if share < thresholds.phase_share:
        return None
    what = "evaluation takes" if state == EVAL else "checkpoints take"
    return Finding(
        cause=cause,
        severity="warning",
        title=title,
        ratio=share,
        evidence=tuple(measured(state, share, what + " {} of the time")),
        advice=advice,
        predicted_speedup=gain,
    )


_KINDS = (
    (
        ("rollout", "generat", "sampl", "decod"),
        "generate larger batches, for a language model with an inference engine (vLLM, SGLang), or on other devices while the last "
        "batch is trained on",
    ),
    (("env", "simul"), "step more environments at once, each in a process of its own"),
    (
        ("sync", "weight", "broadcast"),
        "send the weights in few large buffers, less often, or while something else runs",
    ),
    (("reward", "scor", "verif", "judge"), "score whole batches, or in other processes while training goes on"),
    (("log", "upload", "export", "plot"), "do it less often, or in a thread while training goes on"),
)
"""Advice by what a declared phase's name contains."""


@rule(explains=(), explained_by=(), stacks="training", alert=None, runbook="Findings")
def phase_bound(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a phase that is declared by name, such as "rollout", takes a large share of the time."""
    name, share = next(iter(window.declared.items()), ("", 0.0))
    if share < thresholds.phase_share:
        return None
    advice = next((text for words, text in _KINDS if any(word in name.lower() for word in words)), None)
    return Finding(
        cause="phase_bound",
        severity="warning",
        title=f"the phase {name} takes a large part of the run",
        ratio=share,
        evidence=(Evidence("phase", share, "ratio", f"{name} takes {percent(share)} of the time"),),
        advice=advice
        or "find what it spends its time on (gpuwatch stacks); do it less often, or while training goes on",
    )
