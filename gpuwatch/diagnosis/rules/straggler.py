"""One rank is late at every step, and all others wait for it."""

from __future__ import annotations

from statistics import median

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.artificial_limit import artificial_limit
from gpuwatch.diagnosis.rules.host_bound import host_bound
from gpuwatch.diagnosis.rules.input_cpu import input_cpu
from gpuwatch.diagnosis.rules.input_cpu_saturated import input_cpu_saturated
from gpuwatch.diagnosis.rules.input_disk import input_disk
from gpuwatch.diagnosis.rules.input_network import input_network
from gpuwatch.diagnosis.rules.input_single_process import input_single_process
from gpuwatch.diagnosis.rules.input_unexplained import input_unexplained
from gpuwatch.diagnosis.rules.slow_worker import slow_worker
from gpuwatch.diagnosis.rules.throttled import throttled
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import RankFacts, Window
from gpuwatch.formatting import duration, percent

STRAGGLER = "straggler"
_RANKS_SHOWN = 8
_INPUT = (
    input_single_process, slow_worker, input_cpu, input_cpu_saturated, input_disk, input_network, artificial_limit, input_unexplained,
)  # fmt: skip
_HOST = (throttled, host_bound)
"""What may be the reason for a late rank's wait for data, and for the rest of its own time; the most telling first."""


def straggler(window: Window) -> Finding | None:
    """Found for a rank whose own time before communication is above the other ranks', while those wait for it.

    All-reduce makes every step take the same time on all ranks, so the late rank is the one that waits least for the others. Its own
    time is the step without that wait where it was measured on all ranks; else the wait for data and the copy are, and the others
    must show the difference in their compute time.
    """
    late = next((rank for rank in window.ranks if rank.rank == window.rank), None)
    others = [rank for rank in window.ranks if rank.rank != window.rank]
    if (
        window.waits_hidden_in
        or late is None
        or not others
        or min(rank.steps for rank in window.ranks) < THRESHOLDS.min_steps
    ):
        return None
    measured = all(rank.comm_wait_s is not None for rank in window.ranks)
    own = {rank.rank: _own_s(rank, measured) for rank in window.ranks}
    excess_s = own[late.rank] - median(own[rank.rank] for rank in others)
    step_s = median(rank.step_s for rank in window.ranks)
    if step_s <= 0 or excess_s < THRESHOLDS.straggler_share * step_s:
        return None
    if any(abs(rank.step_s - step_s) > THRESHOLDS.rank_pace * step_s for rank in window.ranks):
        return None  # they do not go in step: nobody waits for anybody
    waiting_s = median(_rest_s(rank, measured) for rank in others) - _rest_s(late, measured)
    if waiting_s < excess_s / 2:
        return None
    data_s = late.data_wait_s - median(rank.data_wait_s for rank in others)
    by_input = data_s >= excess_s / 2
    gain_s = own[late.rank] - max(own[rank.rank] for rank in others)
    world = max(window.world_size, len(window.ranks))
    reason = next((found for rule in (_INPUT if by_input else _HOST) if (found := rule(window)) is not None), None)
    advice = (
        f"fix the input of rank {late.rank}: its shard, its storage, its loader's workers and the cores they may use"
        if by_input
        else f"look at the host of rank {late.rank}: CPUs shared with others, a throttled or slower device, code that only this rank runs"
    )
    here = "" if world == len(window.ranks) else " on this node"
    cost_s = (world - 1) * excess_s
    what = "wait for data" if by_input else "time before communication"
    return Finding(
        cause=STRAGGLER,
        severity="critical" if excess_s >= THRESHOLDS.straggler_share_critical * step_s else "warning",
        title=f"rank {late.rank} is late at every step, and the other ranks{here} wait for it",
        ratio=min(1.0, excess_s / step_s),
        evidence=(
            Evidence("excess", excess_s, "s", f"its {what} is {duration(excess_s)} a step above the other ranks', {percent(excess_s / step_s)} of the step"),
            *([] if reason is None else [Evidence("cause", reason.ratio, "ratio", f"why: {reason.title}")]),
            Evidence("cost", cost_s, "s", f"{world - 1} ranks wait: {duration(cost_s)} of their time a step, {percent(cost_s / (world * step_s))} of what all ranks have"),
            *_by_rank(window.ranks, own, measured),
        ),
        advice=advice if reason is None else f"on rank {late.rank}: {reason.advice}",
        predicted_speedup=round(step_s / (step_s - gain_s), 2) if 0 < gain_s < step_s else None,
        rank=late.rank,
        because=() if reason is None else (reason.cause,),
    )  # fmt: skip


def _own_s(rank: RankFacts, measured: bool) -> float:
    """Return the time of a step in which the rank waits for no other."""
    return rank.step_s - (rank.comm_wait_s or 0.0) if measured else rank.data_wait_s + rank.transfer_s


def _rest_s(rank: RankFacts, measured: bool) -> float:
    """Return the time of a step that holds the wait for the others."""
    return (rank.comm_wait_s or 0.0) if measured else rank.compute_s


def _by_rank(ranks: tuple[RankFacts, ...], own: dict[int, float], measured: bool) -> list[Evidence]:
    """Return each rank's own time, the slowest first; of many ranks the first ones."""
    what = "time before communication" if measured else "wait for data"
    slowest = sorted(ranks, key=lambda rank: -own[rank.rank])[:_RANKS_SHOWN]
    return [
        Evidence(f"rank {rank.rank}", own[rank.rank], "s", f"rank {rank.rank}: {what} {duration(own[rank.rank])}")
        for rank in slowest
    ]
