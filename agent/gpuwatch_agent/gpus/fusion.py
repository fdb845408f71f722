"""Several runs on one GPU: at each instant the state that says most of what the GPU does. Pure arithmetic, times in ns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from gpuwatch.ledger import (
    CHECKPOINT,
    COMM_WAIT,
    COMPILE,
    COMPUTE,
    EVAL,
    HOST_WAIT,
    INPUT_WAIT,
    OTHER,
    STALLED,
    STARTUP,
    TRANSFER,
    UNKNOWN,
)
from gpuwatch_agent.runs.timeline import Segment

PRIORITY = (
    COMPUTE,
    TRANSFER,
    EVAL,
    CHECKPOINT,
    COMPILE,
    STARTUP,
    COMM_WAIT,
    OTHER,
    INPUT_WAIT,
    HOST_WAIT,
    STALLED,
    UNKNOWN,
)
"""The first of these that some run is in is the GPU's state: one that computes keeps the GPU busy, whatever others wait for."""

_RANK = {state: rank for rank, state in enumerate(PRIORITY)}


def fuse(timelines: Sequence[Sequence[Segment]], begin_ns: int, until_ns: int) -> Iterator[tuple[str | None, int]]:
    """Yield (state, until) from begin to end without a gap; None where no run says anything.

    Each timeline is one run's, in order and without overlaps.
    """
    edges = {begin_ns, until_ns}
    for timeline in timelines:
        for begin, end, _ in timeline:
            edges.update((begin, end))
    moments = sorted(edge for edge in edges if begin_ns <= edge <= until_ns)
    at = [0] * len(timelines)
    pending: tuple[str | None, int] | None = None
    for moment, following in itertools.pairwise(moments):
        state: str | None = None
        for number, timeline in enumerate(timelines):
            while at[number] < len(timeline) and timeline[at[number]][1] <= moment:
                at[number] += 1
            if at[number] < len(timeline) and timeline[at[number]][0] <= moment:
                seen = timeline[at[number]][2]
                if state is None or _RANK[seen] < _RANK[state]:
                    state = seen
        if pending is not None and pending[0] != state:
            yield pending
        pending = (state, following)
    if pending is not None:
        yield pending
