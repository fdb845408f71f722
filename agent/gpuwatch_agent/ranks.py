"""The ranks of a run on this node, side by side over the stretch of time that all of them are known for."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.window import RankFacts
from gpuwatch_agent.recent_steps import RecentStep
from gpuwatch_agent.runs import RUNNING, Run


def ranks_by_run(runs: Sequence[Run]) -> dict[str, tuple[RankFacts, ...]]:
    """Return each run's ranks that train now, by rank; runs of a single rank are left out."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        if run.status == RUNNING and run.activity != "silent":
            together.setdefault(run.run, []).append(run)
    return {name: _side_by_side(ranks) for name, ranks in together.items() if len(ranks) > 1}


def _side_by_side(runs: Sequence[Run]) -> tuple[RankFacts, ...]:
    """Return the means of later steps (first batches left out) between the latest begin and the earliest end of what is known."""
    begin = max((run.steps[0].end_ns for run in runs if run.steps), default=0)
    end = min((run.steps[-1].end_ns for run in runs if run.steps), default=0)
    facts = []
    for run in sorted(runs, key=lambda run: run.rank):
        steps = [step for step in run.steps if begin <= step.end_ns <= end and not step.epoch_start]
        facts.append(_mean(run.rank, steps))
    return tuple(facts)


def _mean(rank: int, steps: Sequence[RecentStep]) -> RankFacts:
    count = len(steps) or 1
    waits = [step.comm_wait_ns for step in steps]
    return RankFacts(
        rank=rank,
        steps=len(steps),
        data_wait_s=sum(step.data_wait_ns for step in steps) / count / 1e9,
        transfer_s=sum(step.transfer_ns for step in steps) / count / 1e9,
        compute_s=sum(step.compute_ns for step in steps) / count / 1e9,
        comm_wait_s=sum(waits) / count / 1e9 if waits and min(waits) >= 0 else None,
    )
