"""One rank is late at every step, and all others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import RankFacts, Window
from gpuwatch.formatting import duration, percent

_RANKS_SHOWN = 8


@rule(explains=(), explained_by=(), stacks="all ranks", alert="Straggler", runbook="Straggler")
def straggler(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found for a rank whose own time before communication is above that of the other ranks, while those wait for it.

    All-reduce makes every step take the same time on all ranks, so that the late rank is the one that waits least for the others. Its
    own time is the step without that wait if it was measured on all ranks; else it is the wait for data and the copy, and the others
    must show the difference in their compute time.
    """
    late = next((rank for rank in window.ranks if rank.rank == window.rank), None)
    others = [rank for rank in window.ranks if rank.rank != window.rank]
    if window.waits_hidden_in or late is None or not others:
        return None
    if min(rank.steps for rank in window.ranks) < thresholds.min_steps:
        return None
    measured = all(rank.comm_wait_s is not None for rank in window.ranks)
    own = {rank.rank: _own_s(rank, measured) for rank in window.ranks}
    excess_s = own[late.rank] - median(own[rank.rank] for rank in others)
    step_s = median(rank.step_s for rank in window.ranks)
    if step_s <= 0 or excess_s < thresholds.straggler_share * step_s:
        return None
    if any(abs(rank.step_s - step_s) > thresholds.rank_pace * step_s for rank in window.ranks):
        return None  # they do not run in step: no rank waits for another
    waiting_s = median(rank.step_s - own[rank.rank] for rank in others) - (late.step_s - own[late.rank])
    if waiting_s < excess_s / 2:
        return None
    by_input = late.data_wait_s - median(rank.data_wait_s for rank in others) >= excess_s / 2
    gain_s = own[late.rank] - max(own[rank.rank] for rank in others)
    world = max(window.world_size, len(window.ranks))
    reason = next(_reasons(window, thresholds, by_input), None)
    if reason is not None:
        advice = f"on rank {late.rank}: {reason.advice}"
    elif by_input:
        advice = (
            f"fix the input of rank {late.rank}: its shard, its storage, its loader workers and the cores they can use"
        )
    else:
        advice = f"check the host of rank {late.rank}: cores shared with other jobs, a throttled or slower device, code that only this rank runs"
    here = "" if world == len(window.ranks) else " on this node"
    cost_s = (world - 1) * excess_s
    what = "wait for data" if by_input else "time before communication"
    waiting = "1 rank waits" if world == 2 else f"{world - 1} ranks wait"
    return Finding(
        cause="straggler",
        severity="critical" if excess_s >= thresholds.straggler_share_critical * step_s else "warning",
        title=f"rank {late.rank} is late at every step, and the other ranks{here} wait for it",
        ratio=min(1.0, excess_s / step_s),
        evidence=(
            Evidence("excess", excess_s, "s", f"its {what} is {duration(excess_s)} a step longer than that of the other ranks, {percent(excess_s / step_s)} of the step"),
            *([] if reason is None else [Evidence("cause", reason.ratio, "ratio", f"the reason: {reason.title}")]),
            Evidence("cost", cost_s, "s", f"{waiting}, {duration(cost_s)} a step in total: {percent(cost_s / (world * step_s))} of the time of all ranks"),
            *_by_rank(window.ranks, own, measured),
        ),
        advice=advice,
        predicted_speedup=round(step_s / (step_s - gain_s), 2) if 0 < gain_s < step_s else None,
        rank=late.rank,
        because=() if reason is None else (reason.cause,),
    )  # fmt: skip


def _own_s(rank: RankFacts, measured: bool) -> float:
    """Return the time of a step in which the rank waits for no other one."""
    return rank.step_s - (rank.comm_wait_s or 0.0) if measured else rank.data_wait_s + rank.transfer_s


def _reasons(window: Window, thresholds: Thresholds, by_input: bool) -> Iterator[Finding]:
    """Yield what makes the rank late, by the other rules."""
    from gpuwatch.diagnosis.rules import RULES  # it imports this module

    for each in RULES:
        if each.delays_rank == ("input" if by_input else "host") and (found := each(window, thresholds)) is not None:
            yield found


def _by_rank(ranks: tuple[RankFacts, ...], own: dict[int, float], measured: bool) -> list[Evidence]:
    """Return each rank's own time, the slowest first, for a limited number of ranks."""
    what = "time before communication" if measured else "wait for data"
    slowest = sorted(ranks, key=lambda rank: -own[rank.rank])[:_RANKS_SHOWN]
    return [
        Evidence(f"rank {rank.rank}", own[rank.rank], "s", f"rank {rank.rank}: {what} {duration(own[rank.rank])}")
        for rank in slowest
    ]
