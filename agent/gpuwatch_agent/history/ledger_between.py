"""The ledgers of GPUs and runs between two moments, from the counters that the history keeps. Times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gpuwatch_agent.history.reader import HistoryReader

_POINTS = 2000
"""Of each series that are looked at. Between two of them a counter's growth is exact, unless an agent lost its state there."""
_LEDGERS = {
    "gpus": ("gpuwatch_gpu_seconds_total", ("gpu", "UUID")),
    "runs": ("gpuwatch_run_seconds_total", ("run", "rank")),
}


def ledgers_between(reader: HistoryReader, start_s: float, end_s: float) -> dict[str, Any]:
    """Return {"gpus": […], "runs": […]}, each with its labels, `states` (what passed in each) and `seconds`, their sum.

    What did not pass in any state of a run or a GPU (it was not there) is in none. Only states in which time passed are listed.
    """
    found: dict[str, Any] = {}
    ticks = reader.series("gpuwatch_sample_timestamp_seconds", {}, start_s, end_s, _POINTS)
    first_s = min((points[0][0] for _, points in ticks), default=start_s)
    for name, (metric, labels) in _LEDGERS.items():
        by_owner: dict[tuple[str, ...], dict[str, float]] = {}
        for own, points in reader.series(metric, {}, start_s, end_s, _POINTS):
            grown = growth([value for _, value in points], born=points[0][0] > first_s)
            states = by_owner.setdefault(tuple(own[label] for label in labels), {})
            if grown > 0:
                states[own["state"]] = grown
        found[name] = [
            {**dict(zip(labels, owner, strict=True)), "states": states, "seconds": sum(states.values())}
            for owner, states in by_owner.items()
            if states
        ]
    return found


def growth(values: Sequence[float], born: bool) -> float:
    """Return how much a counter grew; a fall is a beginning from 0, and `born` says that the first value is one as well."""
    grown = sum(after - before if after >= before else after for before, after in pairwise(values))
    return grown + (values[0] if born and values else 0.0)
