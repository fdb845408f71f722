"""No training step for far longer than one takes; a rank late at each step, so that all wait; steps a crash undoes."""

from math import expm1, sqrt
from statistics import median
from typing import Literal

import msgspec
from msgspec.structs import replace

from gpuwatch.diagnosis.finding import Evidence, Finding, RankSummary, Verdict, found, lone, measured
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import STALLED
from gpuwatch.wire import Collective

_WHERE = {
    "data_wait": "waits for the loader",
    "step": "is inside a step",
    "between_steps": "is between steps, in no declared phase",
}

_LATE_SHOWN, _RANKS_SHOWN = 3, 8


@lone("capture the stacks of the rank that the others wait for", stacks="all ranks", alert="RunStalled")
def stalled(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a running loop has completed no step for 30 s and ten times its median step time, outside declared
    phases."""
    if window.stalled_s is None:
        return None
    late, waited_for = _waited_for(window)
    if window.may_wait_for_phase and late is None:
        return None
    where, place = _WHERE.get(window.activity or ""), "" if window.standstill is None else window.standstill.place
    where = f"the training thread {where}{place and f', in {place}'}"
    return found(
        f"training makes no progress{'' if late is None else f': the other ranks wait for rank {late}'}",
        max(window.share(STALLED), 0.01),
        *measured("no step", window.stalled_s, "no step for {}", "s"),
        *waited_for,
        *([Evidence("activity", 1, "", where)] if window.activity in _WHERE else []),
        severity="info" if window.may_wait_for_phase else "critical",
        advice=f"capture the stacks (gpuwatch stacks) to see where {'it' if late is None else f'rank {late}'} is blocked; if this is an "
        'evaluation or a checkpoint, declare it: with w.phase("eval")',
        rank=late,
    )


def _waited_for(window: Window) -> tuple[int | None, list[Evidence]]:
    """Return the rank that all others wait for, None if there is none, and who has not issued what others wait in.

    By the last collectives that each rank of this node has issued. Who is behind and waits in none is waited for. Where
    each waits in another one, they issued them in different orders, or wait for ranks of other nodes.
    """
    still = {rank.rank: rank.standstill for rank in window.ranks if rank.standstill is not None}
    newest: dict[str, Collective] = {}
    for each in (each for one in still.values() for each in one.collectives if each.pending):
        newest[each.group] = max(each, newest.get(each.group, each), key=lambda issued: issued.number)
    behind: dict[int, Collective] = {}
    for rank, one in still.items():
        issued = {each.group: each for each in one.collectives}
        for group, last in newest.items():
            own = issued.get(group, replace(last, number=0) if last.of_all_ranks else last)
            if own.number < last.number or (own.pending and own.operation != last.operation):
                behind.setdefault(rank, last)
    waiting = {rank: each for rank in behind for each in still[rank].collectives if each.pending}
    late = [rank for rank in behind if rank not in waiting] or list(behind)
    evidence = []
    for rank in late[:_LATE_SHOWN]:
        doing = f"it is in {still[rank].place}" if still[rank].place else "it is not in your own code"
        if rank in waiting:
            doing = f"it waits in {waiting[rank].operation} {waiting[rank].number} of group {waiting[rank].group}"
        missing = f"{behind[rank].operation} {behind[rank].number} of group {behind[rank].group}"
        text = f"rank {rank} has not issued {missing}, in which other ranks wait: {doing}"
        evidence.append(Evidence("late", rank, "", text))
    return late[0] if len(late) == 1 and late[0] not in waiting else None, evidence


@lone("capture the stacks of all ranks before you kill any", explains=("stalled",), stacks="all ranks", alert="RunHung")
def hung(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when the GPU of a stalled run is ≥ `gpu_busy` busy at ≤ `power_fallen` of the power of the run's steps."""
    for gpu in window.gpus if window.stalled_s is not None and not window.may_wait_for_phase else ():
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
            *measured("no step", window.stalled_s, "no step for {}", "s"),
            *measured("utilization", busy, f"GPU {gpu.gpu} shows {{}} utilisation"),
            Evidence("power", fallen, "ratio", text),
            *_waited_for(window)[1],
            severity="critical",
            advice="capture the stacks of all ranks before you kill any of them (gpuwatch stacks): a collective waits for a rank that does not arrive",
        )
    return None


@lone("save checkpoints at the interval that the finding recommends", alert=None, runbook="JobGoodputLow")
def checkpoint_interval(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when, after ≥ `checkpoint_interruptions` interruptions of a job, another interval gains ≥
    `checkpoint_gain`.

    The interval is Daly's (2006), whose first term is Young's: sqrt(2 × cost × mean time between interruptions). The
    time of restarts is left out, because it affects both intervals alike. The range of the gain comes from the
    uncertainty of that mean time.
    """
    job = window.job
    if job is None or job.interruptions < thresholds.checkpoint_interruptions or not job.saves or job.trained_s <= 0:
        return None
    cost_s, now_s, count = job.save_s / job.saves, job.interval_s, job.interruptions
    mean_s = job.alive_s / count
    best_s = max(_daly_s(cost_s, mean_s), job.trained_s / job.steps if job.steps else 0.0)  # not within a step
    if cost_s <= 0:
        return None
    gain, *gains = (
        _efficiency(best_s, cost_s, each_s) / _efficiency(now_s, cost_s, each_s)
        for each_s in (mean_s, *(job.alive_s / number for number in _expected(count)))
    )
    if best_s < now_s and job.repeated_s is not None:  # no more is to be gained than was done again
        gain = min(gain, job.trained_s / max(1e-9, job.trained_s - job.repeated_s))
    if gain < 1 + thresholds.checkpoint_gain:
        return None
    repeated_s = None if job.repeated_s is None else job.repeated_s / count
    return found(
        f"checkpoints are too {'rare' if best_s < now_s else 'frequent'} for a job that is interrupted every {duration(mean_s)}",
        1 - 1 / gain,
        Evidence("interval", now_s, "s", f"a checkpoint is saved every {duration(now_s)} and takes {duration(cost_s)}"),
        Evidence("interruptions", count, "", f"{count} interruptions in {duration(job.alive_s)}"),
        *measured("restart", job.restart_s / count, "each recovery took {}", "s"),
        *measured("repeated", repeated_s, "each interruption repeated {} of steps", "s"),
        advice=f"save every {duration(best_s)} instead of every {duration(now_s)}",
        predicted_speedup=round(gain, 2),
        predicted_range=(round(max(1.0, min(gain, *gains)), 2), round(max(gain, *gains), 2)),
    )


def _daly_s(cost_s: float, mean_s: float) -> float:
    """Return the interval between checkpoints that loses least. https://doi.org/10.1016/j.future.2004.11.016"""
    if cost_s >= 2 * mean_s:
        return mean_s
    part = cost_s / (2 * mean_s)
    return sqrt(2 * cost_s * mean_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s


def _efficiency(interval_s: float, cost_s: float, mean_s: float) -> float:
    """Return the share of the time that does new steps, without restarts, at a constant rate of interruptions."""
    cycles = min(600.0, (interval_s + cost_s) / mean_s)
    return interval_s / (mean_s * expm1(cycles))


def _expected(count: int) -> tuple[float, float]:
    """Return the fewest and most interruptions to expect where `count` were seen, in 80% of cases (Wilson–Hilferty)."""
    low, high = (n * (1 - 1 / (9 * n) + z / (3 * sqrt(n))) ** 3 for n, z in ((count, -1.28), (count + 1, 1.28)))
    return low, high


@lone("check that rank's input, node and GPU: the others are not at fault", stacks="all ranks", alert="Straggler")
def straggler(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when a rank takes ≥ `straggler_share` of a step longer before communication than the others, which wait.

    All-reduce makes every step take the same time on all ranks, so that the late rank is the one that waits least for
    the others. Its own time is the step without that wait if it was measured on all ranks; else it is the wait for data
    and the copy, and the others must show the difference in their compute time. Rank 0 compares all ranks whose summary
    it has.
    """
    ranks = {rank.rank: rank for rank in window.ranks}
    if window.waits_hidden_in or window.rank not in ranks or len(ranks) < 2:
        return None
    step_s = median(rank.step.whole_s for rank in window.ranks)
    if step_s <= 0 or min(rank.step.steps for rank in window.ranks) < thresholds.min_steps:
        return None
    if all(rank.comm_wait_s is not None for rank in window.ranks):
        what = "time before communication"
        own = {n: rank.step.whole_s - (rank.comm_wait_s or 0.0) for n, rank in ranks.items()}
    else:
        what = "wait for data"
        own = {n: rank.step.wait_s + rank.step.copy_s for n, rank in ranks.items()}
    late = ranks[max(own, key=lambda n: own[n]) if window.summaries else window.rank]
    others = [rank for rank in window.ranks if rank is not late]
    excess_s = own[late.rank] - median(own[rank.rank] for rank in others)
    if excess_s < thresholds.straggler_share * step_s:
        return None
    if any(abs(rank.step.whole_s - step_s) > thresholds.rank_pace * step_s for rank in window.ranks):
        return None  # they do not run in step: no rank waits for another
    waiting_s = median(rank.step.whole_s - own[rank.rank] for rank in others) - (late.step.whole_s - own[late.rank])
    if waiting_s < excess_s / 2:
        return None
    gain_s = own[late.rank] - max(own[rank.rank] for rank in others)
    world = max(window.world_size, len(ranks))
    kind: Literal["input", "host"] = "host"
    advice = f"check the host of rank {late.rank}: cores shared with other jobs, a throttled or slower device, code that only this rank runs"
    if late.step.wait_s - median(rank.step.wait_s for rank in others) >= excess_s / 2:
        kind, where = "input", "its shard, its storage, its loader workers and the cores they can use"
        advice = f"fix the input of rank {late.rank}: {where}"
    summary = window.summaries.get(late.rank)
    reason = _reason(window, kind, thresholds) if summary is None else summary.reasons.get(kind)
    if reason is not None:
        advice = f"on rank {late.rank}: {reason.advice}"
    here = f" ({len(ranks)} of {world} compared)" if window.summaries else " on this node"
    here = "" if world == len(ranks) else here
    gains = [round(step_s / (step_s - gain_s), 2)] if 0 < gain_s < step_s else []
    gains += [reason.predicted_speedup] if reason and reason.predicted_speedup is not None and kind == "input" else []
    cost_s = (world - 1) * excess_s
    waiting = "1 rank waits" if world == 2 else f"{world - 1} ranks wait"
    longer = f"its {'wait for data' if kind == 'input' else 'time before communication'} is {duration(excess_s)} a step longer than that of the other ranks, {percent(excess_s / step_s)} of the step"
    share = percent(cost_s / (world * step_s))
    cost = f"{waiting}, {duration(cost_s)} a step in total: {share} of the time of all ranks"
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
        predicted_speedup=min(gains, default=None),
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

    window = msgspec.structs.replace(window, world_size=1)  # a late rank waits for no other one
    return next((reason for each in RULES if each.delays_rank == kind and (reason := each(window, thresholds))), None)
