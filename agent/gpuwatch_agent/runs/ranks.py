"""The ranks of a run on this node, side by side over the stretch of time that all of them are known for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import compress

from gpuwatch.window import RankFacts
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.runs.recent_steps import RecentColumns


def ranks_by_run(runs: Sequence[Run]) -> dict[str, tuple[RankFacts, ...]]:
    """Return each run's ranks that train now, by rank; runs of a single rank are left out."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        if run.status == RUNNING and run.activity != "silent":
            together.setdefault(run.run, []).append(run)
    return {name: _side_by_side(ranks) for name, ranks in together.items() if len(ranks) > 1}


def _side_by_side(runs: Sequence[Run]) -> tuple[RankFacts, ...]:
    """Return the means of later steps (first batches left out) between the latest begin and the earliest end of what is known."""
    known = [(run.rank, run.steps.columns()) for run in sorted(runs, key=lambda run: run.rank)]
    begin_ns = max((steps.end_ns[0] for _, steps in known if steps), default=0)
    end_ns = min((steps.end_ns[-1] for _, steps in known if steps), default=0)
    return tuple(_mean(rank, steps, begin_ns, end_ns) for rank, steps in known)


def _mean(rank: int, steps: RecentColumns, begin_ns: int, end_ns: int) -> RankFacts:
    part = slice(bisect_left(steps.end_ns, begin_ns), bisect_right(steps.end_ns, end_ns))
    later = [not first for first in steps.epoch_start[part]]
    waits_ns = list(compress(steps.comm_wait_ns[part], later))
    count = len(waits_ns) or 1
    return RankFacts(
        rank=rank,
        steps=len(waits_ns),
        data_wait_s=sum(compress(steps.data_wait_s[part], later)) / count,
        transfer_s=sum(compress(steps.transfer_s[part], later)) / count,
        compute_s=sum(compress(steps.compute_s[part], later)) / count,
        comm_wait_s=sum(waits_ns) / count / 1e9 if waits_ns and min(waits_ns) >= 0 else None,
    )
