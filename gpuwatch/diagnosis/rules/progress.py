"""No training step for far longer than one takes; and a rank that is late at every step, so that all others wait for it."""

from __future__ import annotations

from statistics import median
from typing import Literal

from gpuwatch.diagnosis.finding import Evidence, Finding, RankSummary, Verdict, found, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import STALLED

_WHERE = {
    "data_wait": "waits for the loader",
    "step": "is inside a step",
    "between_steps": "is between steps, in no declared phase",
}


def _no_step(seconds: float) -> Evidence:
    return Evidence("no step", seconds, "s", f"no step for {duration(seconds)}")


@rule(explains=(), explained_by=(), stacks="all ranks", alert="RunStalled", runbook="RunStalled")
def stalled(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found while the run is stalled now."""
    if window.stalled_s is None:
        return None
    where = _WHERE.get(window.activity or "")
    return found(
        "training makes no progress",
        max(window.share(STALLED), 0.01),
        _no_step(window.stalled_s),
        *([] if where is None else [Evidence("activity", 1, "", f"the training thread {where}")]),
        severity="critical",
        advice="take the stacks (gpuwatch stacks) to see where it is blocked; if this is an evaluation or a checkpoint, declare it: "
        'with w.phase("eval")',
    )


@rule(explains=("stalled",), explained_by=(), stacks="all ranks", alert="RunHung", runbook="RunHung")
def hung(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the GPU of a stalled run reads busy at a power far below that of the run's own steps."""
    for gpu in window.gpus if window.stalled_s is not None else ():
        busy, watts, usual_watts = gpu.utilization_ratio, gpu.power_watts, gpu.power_usual_watts
        if busy is None or busy < thresholds.gpu_busy or watts is None or not usual_watts:
            continue
        fallen = watts / usual_watts
        if fallen > thresholds.power_fallen:
            continue
        text = f"it draws {watts:.0f} W, {percent(fallen)} of the {usual_watts:.0f} W of a normal step"
        return found(
            "training hangs: the GPU is busy but does no work",
            1.0,
            _no_step(window.stalled_s or 0.0),
            Evidence("utilization", busy, "ratio", f"GPU {gpu.gpu} reads {percent(busy)} busy"),
            Evidence("power", fallen, "ratio", text),
            severity="critical",
            advice="take the stacks of all ranks before you end any of them (gpuwatch stacks): a collective waits for a rank that does not arrive",
        )
    return None


_RANKS_SHOWN = 8


@rule(explains=(), explained_by=(), stacks="all ranks", alert="Straggler", runbook="Straggler")
def straggler(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found for a rank whose own time before communication is above that of the other ranks, while those wait for it; by rank 0, where
    it has the others' summaries, for any of them.

    All-reduce makes every step take the same time on all ranks, so that the late rank is the one that waits least for the others. Its
    own time is the step without that wait if it was measured on all ranks; else it is the wait for data and the copy, and the others
    must show the difference in their compute time.
    """
    ranks = {rank.rank: rank for rank in window.ranks}
    if window.waits_hidden_in or window.rank not in ranks or len(ranks) < 2:
        return None
    step_s = median(rank.step_s for rank in window.ranks)
    if step_s <= 0 or min(rank.steps for rank in window.ranks) < thresholds.min_steps:
        return None
    if all(rank.comm_wait_s is not None for rank in window.ranks):
        what, own = (
            "time before communication",
            {n: rank.step_s - (rank.comm_wait_s or 0.0) for n, rank in ranks.items()},
        )
    else:
        what, own = "wait for data", {n: rank.data_wait_s + rank.transfer_s for n, rank in ranks.items()}
    late = ranks[max(own, key=lambda n: own[n]) if window.summaries else window.rank]
    others = [rank for rank in window.ranks if rank is not late]
    excess_s = own[late.rank] - median(own[rank.rank] for rank in others)
    if excess_s < thresholds.straggler_share * step_s:
        return None
    if any(abs(rank.step_s - step_s) > thresholds.rank_pace * step_s for rank in window.ranks):
        return None  # they do not run in step: no rank waits for another
    waiting_s = median(rank.step_s - own[rank.rank] for rank in others) - (late.step_s - own[late.rank])
    if waiting_s < excess_s / 2:
        return None
    by_input = late.data_wait_s - median(rank.data_wait_s for rank in others) >= excess_s / 2
    gain_s = own[late.rank] - max(own[rank.rank] for rank in others)
    world = max(window.world_size, len(ranks))
    advice = f"check the host of rank {late.rank}: cores shared with other jobs, a throttled or slower device, code that only this rank runs"
    if by_input:
        advice = (
            f"fix the input of rank {late.rank}: its shard, its storage, its loader workers and the cores they can use"
        )
    kind: Literal["input", "host"] = "input" if by_input else "host"
    summary = window.summaries.get(late.rank)
    reason = _reason(window, kind, thresholds) if summary is None else summary.reasons.get(kind)
    if reason is not None:
        advice = f"on rank {late.rank}: {reason.advice}"
    here = (
        "" if world == len(ranks) else f" ({len(ranks)} of {world} compared)" if window.summaries else " on this node"
    )
    cost_s = (world - 1) * excess_s
    waiting = "1 rank waits" if world == 2 else f"{world - 1} ranks wait"
    longer = f"its {'wait for data' if by_input else 'time before communication'} is {duration(excess_s)} a step longer than that of the other ranks, {percent(excess_s / step_s)} of the step"
    cost = (
        f"{waiting}, {duration(cost_s)} a step in total: {percent(cost_s / (world * step_s))} of the time of all ranks"
    )
    slowest = sorted(own.items(), key=lambda each: -each[1])[:_RANKS_SHOWN]
    return found(
        f"rank {late.rank} is late at every step, and the other ranks{here} wait for it",
        min(1.0, excess_s / step_s),
        Evidence("excess", excess_s, "s", longer),
        *([] if reason is None else [Evidence("cause", reason.ratio, "ratio", f"the reason: {reason.title}")]),
        Evidence("cost", cost_s, "s", cost),
        *(Evidence(f"rank {n}", own_s, "s", f"rank {n}: {what} {duration(own_s)}") for n, own_s in slowest),
        severity="critical" if excess_s >= thresholds.straggler_share_critical * step_s else "warning",
        advice=advice,
        predicted_speedup=round(step_s / (step_s - gain_s), 2) if 0 < gain_s < step_s else None,
        rank=late.rank,
        because=() if reason is None else (reason.cause,),
    )


def summary_of(window: Window, thresholds: Thresholds, verdict: Verdict) -> RankSummary:
    """Return what rank 0 needs of this rank to compare it with the others."""
    kinds: tuple[Literal["input", "host"], ...] = ("input", "host")
    reasons = {kind: reason for kind in kinds if (reason := _reason(window, kind, thresholds)) is not None}
    return RankSummary(window.ranks[0], verdict, reasons)


def _reason(window: Window, kind: Literal["input", "host"], thresholds: Thresholds) -> Finding | None:
    """Return what makes the rank late, by the other rules."""
    from gpuwatch.diagnosis.rules import RULES  # it imports this module

    return next((reason for each in RULES if each.delays_rank == kind and (reason := each(window, thresholds))), None)
