"""Where a device's time goes besides input waits: copies, host code, read-backs, compute, phases; driver reports."""

from functools import partial
from operator import itemgetter

from gpuwatch.diagnosis.finding import Evidence, Finding, found, lone, measured, place_evidence, speedup_without
from gpuwatch.diagnosis.rules.input import python_in_steps
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent, size
from gpuwatch.ledger.states import CHECKPOINT, COMPUTE, EVAL, HOST_WAIT, REST, TRANSFER

# Lowest idle share of compute on recorded GPUs that kept up with all launches: at stake without a driver.
LEAST_IDLE = 0.23
_SIXTEEN_BITS = 0.4  # a peak below this share of the dense 16-bit one is for 32 bits, without tensor cores

inefficient = partial(lone, alert="RunInefficient")
in_the_loop = partial(inefficient, stacks="training")
costs_later = partial(inefficient, costs_later=True)
no_alert = partial(lone, alert=None, runbook="Findings")
all_is_well = partial(no_alert, all_is_well=True)


def _copies(window: Window, thresholds: Thresholds, pinned: bool) -> tuple[float, float | None, Evidence] | None:
    """Return (share of the time, bytes/s, evidence) of copies of batches known to be pinned, or not; None on a CPU."""
    share, steps, loader = window.share(TRANSFER), window.steps, window.loader
    if window.device == "cpu" and window.timeline == "host" and not window.gpus:
        return None
    if share < thresholds.transfer_share or len(steps) < thresholds.min_steps or loader.pin_memory is not pinned:
        return None
    copy_s = sum(steps.transfer_s) / len(steps)
    rate = loader.batch_bytes / copy_s if loader.batch_bytes is not None and copy_s > 0 else None
    text = f"copies to the device take {percent(share)} of the time ({duration(copy_s)} a step)"
    return share, rate, Evidence("transfer", share, "ratio", text)


@inefficient("DataLoader(pin_memory=True) with batch.to(device, non_blocking=True)")
def transfer_pageable(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when copies take ≥ `transfer_share` of the time, and the batches are known not to be pinned."""
    copies = _copies(window, thresholds, pinned=False)
    if copies is None or window.waits_hidden_in:
        return None
    share, rate, taken = copies
    return found(
        "batches are copied to the device from pageable memory",
        share,
        taken,
        Evidence("pinned", 0, "", "the batches are not pinned: the driver copies each twice, and the host waits"),
        *([] if rate is None else [Evidence("copy rate", rate, "bytes/s", f"the copies run at {rate / 1e9:.1f} GB/s")]),
        predicted_speedup=speedup_without(share),
    )


@inefficient("send fewer bytes (uint8 images, normalised on the device), or copy the next batch on a separate stream")
def transfer_pcie(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when copies from pinned memory take ≥ `transfer_share` of the time, at ≥ `pcie_bytes_per_s`."""
    copies = _copies(window, thresholds, pinned=True)
    if copies is None or (copies[1] or 0.0) < thresholds.pcie_bytes_per_s:
        return None
    share, rate, taken = copies
    text = f"batches of {size(window.loader.batch_bytes or 0)} are copied from pinned memory at {(rate or 0.0) / 1e9:.1f} GB/s"
    return found(
        "copies to the device saturate the bus",
        share,
        taken,
        Evidence("copy rate", rate or 0.0, "bytes/s", text),
        predicted_speedup=speedup_without(share),
    )


@in_the_loop("launch more work at a time (torch.compile, CUDA graphs), log less often", delays_rank="host")
def host_bound(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the device waits ≥ `host_wait_share` of the time for the host between launch and fetch, or runs each
    kernel as it is launched in ≥ `kept_up_share` of the steps, unless the driver sees it busy throughout compute.

    No event shows how long the device then idles between kernels: the driver's utilisation gives a lower bound.
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
    return found(
        "the device waits for host code",
        lost or LEAST_IDLE * compute,
        *evidence,
        severity=thresholds.severity(lost),
        advice="launch more work at a time (torch.compile, CUDA graphs, a fused optimizer, a larger batch), and move work out of the Python loop (logging, metrics, sleeps)",
        predicted_speedup=round(1 / (1 - lost), 2) if lost else None,
    )


@no_alert(
    "move blocking calls out of the step, into a thread or to every N steps", stacks="training", delays_rank="host"
)
def step_waits(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when no thread of a training on the CPU is runnable for ≥ `step_idle` of a step and ≥ `input_share` of all
    time."""
    idle = window.step_idle_ratio
    if idle is None or idle < thresholds.step_idle or window.device != "cpu" or window.world_size > 1 or window.gpus:
        return None
    lost = idle * window.share(COMPUTE)
    if lost < thresholds.input_share or len(window.steps) < thresholds.min_steps:
        return None
    return found(
        "the step is blocked: it sleeps, or waits for a file, the network or a lock",
        lost,
        *measured("idle in the step", idle, "no thread of the process is runnable for {} of the step"),
        *place_evidence(window.step_place, "the step"),
        severity=thresholds.severity(lost),
        advice="move blocking calls out of the step, into a thread or to every N steps (logging, uploads, writing files, sleeps); a faster device will not help",
        predicted_speedup=speedup_without(lost),
    )


@in_the_loop("read results every N steps, not at every step (.item(), print(loss), .cpu())", explains=("host_bound",))
def sync_every_step(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when ≥ `drained_share` of the steps read a result back (`.item()`, `print`) and end with an idle device,
    which then stays idle for ≥ `host_wait_share` of the time, and its driver sees it busy throughout compute.

    A host that is merely slow leaves gaps within compute; one that does other work after its last launch reads nothing
    back.
    """
    drained, read, idle = window.drained_ratio, window.read_back_ratio, window.share(HOST_WAIT)
    if drained is None or read is None or len(window.steps) < thresholds.min_steps or window.timeline != "device":
        return None
    if min(drained, read) < thresholds.drained_share or idle < thresholds.host_wait_share:
        return None
    compute, utilization = window.share(COMPUTE), window.utilization
    if utilization is not None and compute - utilization >= thresholds.device_bubbles * max(compute, 1e-9):
        return None
    return found(
        "every step synchronises with the device, so the host cannot run ahead",
        idle,
        *measured("read back", read, "{} of the steps read a result back from the device (.item(), .cpu(), print)"),
        *measured("drained", drained, "{} of the steps ended with the device idle"),
        *measured("host wait", idle, "the device then idled {} of the time"),
        advice="read results every N steps instead of at every step (.item(), print(loss), .cpu()), and keep running means on the device",
        predicted_speedup=speedup_without(idle),
    )


@all_is_well("stop tuning the loader: mixed precision, channels_last, torch.compile or a faster GPU shorten the step")
def gpu_saturated(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when compute is ≥ `saturated_share` of the time, and the driver sees the run's GPUs ≥ `gpu_busy` busy."""
    share, utilization = window.share(COMPUTE), window.utilization
    if share < thresholds.saturated_share or utilization is None or utilization < thresholds.gpu_busy:
        return None
    return found(
        "the GPU is busy: the input keeps up",
        share,
        *measured("compute", share, "compute takes {} of the time"),
        *measured("utilization", utilization, "the driver reports a utilisation of {}"),
        severity="info",
    )


@all_is_well("stop tuning the loader: a faster device, torch.compile or lower precision shorten the step")
def compute_bound(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when compute is ≥ `saturated_share` of the time of a training on the CPU."""
    share, on_cpu = window.share(COMPUTE), window.device == "cpu" and not window.gpus
    if share < thresholds.saturated_share or not on_cpu or len(window.steps) < thresholds.min_steps:
        return None
    if (window.step_idle_ratio or 0.0) >= thresholds.step_idle:
        return None  # it waits rather than computes
    if python_in_steps(window, thresholds):
        return None  # a faster device would not shorten that
    return found(
        "training is compute-bound: the input keeps up",
        share,
        *measured("compute", share, "compute takes {} of the time"),
        severity="info",
    )


@in_the_loop("evaluate less often, on a fixed subset, or with more loader workers where it waits for data")
def eval_share(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when evaluation takes ≥ `phase_share` of the time."""
    share = window.share(EVAL)
    if share < thresholds.phase_share or window.gap_share >= max(share / 2, thresholds.input_share):
        return None  # in the latter case it is `outside_torch`: a rollout, for example
    advice = "evaluate half as often, or on a fixed subset of the validation set"
    waits = window.eval_wait_ratio or 0.0
    if is_slow := waits >= thresholds.input_share_critical:
        advice = f"give the validation set's loader workers, or more of them (num_workers, persistent_workers=True); or {advice}"
    return found(
        f"{window.evaluation} takes a large part of the run{', and itself waits for data' * is_slow}",
        share,
        *measured(EVAL, share, f"{window.evaluation} takes {{}} of the time"),
        *measured("wait in evaluation", window.eval_wait_ratio, "{} of it is data wait"),
        advice=f"{advice}; without gradients a larger batch fits"
        + ("; for a rollout, step more environments per forward pass" if window.may_roll_out else ""),
        predicted_speedup=speedup_without(share * max(0.5, waits)),
    )


@in_the_loop("save asynchronously (torch.distributed.checkpoint.async_save, a copy written by a thread) or less often")
def checkpoint_stall(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when checkpoints take ≥ `phase_share` of the time."""
    share = window.share(CHECKPOINT)
    if share < thresholds.phase_share:
        return None
    return found(
        "training stops while checkpoints are written",
        share,
        *measured(CHECKPOINT, share, "checkpoints take {} of the time"),
        predicted_speedup=speedup_without(share),
    )


@no_alert("set peak_flops to the dense peak, and count the operations of one rank only")
def mfu_mismatch(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the declared MFU and the estimate from tensor core activity differ by ≥ `mfu_gap` of the peak."""
    declared, estimate, flops = window.mfu_ratio, window.mfu_estimate, window.flops
    dense, peak = window.gpus[0].peak_flops if window.gpus else None, None if flops is None else flops.peak
    if declared is None or estimate is None or dense is None or peak is None or peak < _SIXTEEN_BITS * dense:
        return None
    gap = declared - estimate
    if abs(gap) < thresholds.mfu_gap:
        return None
    activity = "the activity of the tensor cores times their clock gives {} of their dense peak"
    text = f"peak_flops={peak:.4g}; the dense 16-bit peak of this GPU's model is {dense:.4g}"
    return found(
        f"the declared MFU of {percent(declared)} contradicts the tensor cores' activity, which suggests about {percent(estimate)}",
        min(1.0, abs(gap)),
        *measured("declared MFU", declared, "the declared operations and peak give an MFU of {}"),
        *measured("estimated MFU", estimate, activity),
        Evidence("peak", peak, "FLOP/s", text),
        severity="info",
        advice="count the operations of one rank only (6 per token and active parameter, 2 of them in the forward pass), and check peak_flops"
        if gap > 0
        else "set peak_flops to the dense peak (data sheets often give the sparse one first, which is twice as high), and count all operations; recomputed activations keep the tensor cores busy, but do not count for MFU",
    )


_KINDS = {
    "checkpoint_load rendezvous": "shorten the start: a sharded checkpoint on fast storage, ranks that start together",
    "rollout generat sampl decod": "generate larger batches, use an inference engine for a language model (vLLM, SGLang), or generate on other devices while training on the last batch",
    "env simul": "run more environments in parallel, each in its own process",
    "sync weight broadcast": "send the weights in few large buffers, less often, or while other work runs",
    "reward scor verif judge": "score whole batches, or in other processes while training continues",
    "log upload export plot": "do it less often, or in a background thread",
}
"""Advice by what a declared phase's name contains."""


@in_the_loop("find what the phase spends its time on (gpuwatch stacks); run it less often, or while training continues")
def phase_bound(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a phase that is declared by name, such as "rollout", takes ≥ `phase_share` of the time."""
    name, share = next(((name, share) for name, share in window.declared.items() if name != REST), ("", 0.0))
    if share < thresholds.phase_share:
        return None
    return found(
        f"the phase {name} takes a large part of the run",
        share,
        Evidence("phase", share, "ratio", f"{name} takes {percent(share)} of the time"),
        advice=next((text for keys, text in _KINDS.items() if any(key in name.lower() for key in keys.split())), ""),
    )


_THROTTLED = {
    "thermal": "check fans, air flow and neighbouring GPUs: the GPU overheats, and no change to the program will help",
    "hardware": "check the power supply and the cabling: the driver reports a hardware slowdown or power brake",
    "power": "raise the power limit (nvidia-smi -pl) if one was set: at full load a GPU normally runs at its limit",
}
"""Advice by reason, the worst first."""


@lone("check cooling, fans and power supply", explains=("gpu_saturated",), alert="GpuThrottled", delays_rank="host")
def throttled(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a GPU is throttled ≥ `throttled_share` of the time, and the run computes for half of its time or
    more."""
    for reason, advice in _THROTTLED.items() if window.share(COMPUTE) >= 0.5 else ():
        shares = [(gpu.throttled[reason], gpu.gpu) for gpu in window.gpus if gpu.throttled and reason in gpu.throttled]
        share, gpu = max(shares, key=itemgetter(0), default=(-1.0, ""))
        if share >= thresholds.throttled_share:
            text = f"GPU {gpu} was throttled {{}} of the time (reason: {reason})"
            return found(
                f"the clocks of GPU {gpu} are throttled ({reason})",
                min(1.0, share),
                *measured(f"throttled by {reason}", share, text),
                severity="info" if reason == "power" else "warning",
                advice=advice,
            )
    return None


@lone("end the process that holds it, or release the GPU to the scheduler", alert="GpuHeldIdle")
def held_idle(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a process without a hook has held a GPU for ≥ `gpu_idle_s` at ≤ `gpu_idle_utilization` utilisation."""
    gpu = max(window.gpus, key=lambda gpu: gpu.idle_s or 0.0, default=None)
    if gpu is None or gpu.idle_s is None or gpu.idle_s < thresholds.gpu_idle_s:
        return None
    return found(
        f"GPU {gpu.gpu} is held but idle",
        1.0,
        Evidence("idle", gpu.idle_s, "s", f"GPU {gpu.gpu} has been held without work for {duration(gpu.idle_s)}"),
        *([Evidence("owner", 1, "", f"held by {gpu.owner}")] if gpu.owner else []),
        *measured("utilization", gpu.utilization_ratio, "its utilisation is {}"),
        gpu=gpu.uuid,
    )


@costs_later("find what keeps tensors alive (sum loss.item(), not loss; detach what is stored; clear lists of outputs)")
def memory_creep(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a GPU's memory use rose ≥ `memory_creep_rises` times within an hour, by ≥ `memory_creep_share` of its
    size in ≥ `memory_creep_s`, and never fell.

    torch's allocator keeps what it has, so memory use rises in a few steps at first and then stays: only continued
    growth counts.
    """
    for gpu in window.gpus:
        trend = gpu.memory_trend
        if trend is None or trend.total_bytes <= 0 or trend.falls or trend.rises < thresholds.memory_creep_rises:
            continue
        share = trend.growth_bytes / trend.total_bytes
        if trend.span_s < thresholds.memory_creep_s or share < thresholds.memory_creep_share:
            continue
        grown = f"memory use of GPU {gpu.gpu} grew by {{}} in {duration(trend.span_s)}: {trend.rises} increases, no decrease"
        left_bytes = None if gpu.memory_used_bytes is None else trend.total_bytes - gpu.memory_used_bytes
        until_s = None if left_bytes is None else left_bytes / (trend.growth_bytes / trend.span_s)
        return found(
            f"the memory use of GPU {gpu.gpu} keeps growing",
            min(1.0, share),
            *measured("growth", trend.growth_bytes, grown, "bytes"),
            *measured("share", share, "the growth is {} of its memory"),
            *measured("full in", until_s, "at this rate it is full in {}", "s"),
        )
    return None
