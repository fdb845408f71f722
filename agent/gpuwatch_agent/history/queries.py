"""What the JSON API answers from the history: each a function of the reader and of a request's query. See docs/reference/api.md.

A query is checked whole: an unknown name, text that is not a number, a size out of range are refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from gpuwatch import api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.metrics import BY_NAME
from gpuwatch_agent.history.reader import HistoryReader
from gpuwatch_agent.runs.views import record_view

_MAX_POINTS = 2000
_MAX_STEPS = 200_000
_MAX_BUCKETS = 20_000
_MAX_QUERIES = 100
_PICKS = ("last", "extremes")
_MOST = 1e15

Query = dict[str, str]


class BadRequest(Exception):
    """A query that cannot be answered; its text says what, where and what to do."""


class NothingKept(Exception):
    """Nothing of what was asked for is in the history."""


def runs(reader: HistoryReader, live: Sequence[api.Run], query: Query, prices: Prices) -> api.Runs:
    """Return the runs of /api/v1/runs: with `kept=all`, those that the history keeps as well, the most recently active first."""
    kept = query.pop("kept", "live")
    if kept not in ("live", "all") or query:
        raise BadRequest(f"kept={kept!r}: give live or all, and nothing else" if not query else _unknown(query))
    known = {(view.run, view.rank) for view in live}
    records = reader.runs() if kept == "all" else []
    old = [record_view(record, prices) for record in records if (record.run, record.rank) not in known]
    return api.Runs([*live, *sorted(old, key=lambda view: -view.last_message_s)])


def ledger(reader: HistoryReader, query: Query) -> api.LedgerOf:
    """Return seconds by state of every GPU and run over a period, by default the last hour."""
    end_s = number(query, "end", time.time())
    start_s = number(query, "start", end_s - 3600)
    if start_s > end_s:
        raise BadRequest(f"start={start_s} is after end={end_s}")
    if query:
        raise BadRequest(_unknown(query))
    return msgspec.convert(
        {"start_s": start_s, "end_s": end_s, **ledgers_between(reader, start_s, end_s)}, type=api.LedgerOf
    )


def many_series(reader: HistoryReader, texts: Sequence[str]) -> api.Answers:
    """Return the answers to several queries of `series`, each given as a query string."""
    if not 0 < len(texts) <= _MAX_QUERIES:
        raise BadRequest(f"{len(texts)} queries: give 1 to {_MAX_QUERIES}, each as q=metric%3DNAME%26…")
    return api.Answers([series(reader, dict(parse_qsl(text, keep_blank_values=True))) for text in texts])


def steps(reader: HistoryReader, run: str, query: Query) -> api.LastSteps | api.Steps:
    """Return a run's last steps, or with `points` all of them downsampled. Raises: BadRequest, NothingKept."""
    rank, last = int(number(query, "rank", 0)), int(number(query, "last", 600))
    if "points" in query:
        return _downsampled(reader, run, rank, query)
    if not 0 < last <= _MAX_STEPS:
        raise BadRequest(f"last={last}: give 1 to {_MAX_STEPS}")
    found = reader.steps(run, rank, last)
    if not found.time_s:
        raise NothingKept(f"no steps of run {run!r} rank {rank} are kept; /api/v1/runs lists the runs")
    return found


def _downsampled(reader: HistoryReader, run: str, rank: int, query: Query) -> api.Steps:
    points = int(number(query, "points", 600))
    if not 0 < points <= _MAX_BUCKETS:
        raise BadRequest(f"points={points}: give 1 to {_MAX_BUCKETS}")
    start_s = number(query, "start", 0.0) if "start" in query else None
    end_s = number(query, "end", 0.0) if "end" in query else None
    found = reader.downsampled_steps(run, rank, points, start_s, end_s)
    if not found.steps:
        raise NothingKept(f"no steps of run {run!r} rank {rank} are kept in this time")
    return msgspec.structs.replace(found, run=run, rank=rank)


def series(reader: HistoryReader, query: dict[str, str]) -> api.SeriesOf:
    """Return the answer to one query of /api/v1/series. Raises: BadRequest."""
    metric = query.pop("metric", "")
    if metric not in BY_NAME:
        raise BadRequest(f"metric={metric!r} is not a metric of gpuwatch; /metrics lists them")
    end_s = number(query, "end", time.time())
    start_s = number(query, "start", end_s - 900)
    points = int(number(query, "points", 300))
    by, pick = query.pop("by", None), query.pop("pick", "last")
    if pick not in _PICKS:
        raise BadRequest(f"pick={pick!r} is not known; give one of {', '.join(_PICKS)}")
    if start_s > end_s:
        raise BadRequest(f"start={start_s} is after end={end_s}")
    if not 0 < points <= _MAX_POINTS:
        raise BadRequest(f"points={points}: give 1 to {_MAX_POINTS}")
    unknown = query.keys() - set(BY_NAME[metric].labels)
    if unknown:
        raise BadRequest(
            f"{metric} has no label {sorted(unknown)[0]!r}; it has {', '.join(BY_NAME[metric].labels) or 'none'}"
        )
    groups = None if by is None else [label for label in by.split(",") if label]
    if groups and (wrong := set(groups) - set(BY_NAME[metric].labels)):
        raise BadRequest(f"by={by}: {metric} has no label {sorted(wrong)[0]!r}")
    found = reader.series(metric, query, start_s, end_s, points, groups, pick == "extremes")
    return api.SeriesOf(
        metric=metric,
        kind=BY_NAME[metric].kind,
        unit=BY_NAME[metric].unit,
        series=[api.Series(labels, tuple(values)) for labels, values in found],
    )


def number(query: dict[str, str], name: str, default: float) -> float:
    """Return a number of the query, taken out of it. Raises: BadRequest."""
    text = query.pop(name, None)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        raise BadRequest(f"{name}={text!r} is not a number") from None
    if not abs(number) < _MOST:  # nor is nan
        raise BadRequest(f"{name}={text!r} is beyond all measure")
    return number


def _unknown(query: Query) -> str:
    return f"{next(iter(query))!r} is not asked for here; docs/reference/api.md says what is"


_POINTS = 2000
"""Read of each series. Between two of them a counter's growth is exact, unless an agent lost its state there."""
_LEDGERS = {
    "gpus": ("gpuwatch_gpu_seconds_total", ("gpu", "UUID")),
    "runs": ("gpuwatch_run_seconds_total", ("run", "rank")),
}


def ledgers_between(reader: HistoryReader, start_s: float, end_s: float) -> dict[str, Any]:
    """Return {"gpus": […], "runs": […]}, each with its labels, `states` (what passed in each) and `seconds`, their sum.

    Time in which a run or a GPU was absent is in no state. Only states in which time passed are listed.
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
