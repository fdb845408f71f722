"""The JSON API's answers from the history: functions of the reader and a request's query. See docs/reference/api.md.

An unknown name, text that is not a number, a number out of range are errors that name the parameter.
"""

import time
from collections.abc import Sequence
from urllib.parse import parse_qsl

from gpuwatch import api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.metrics import BY_NAME
from gpuwatch_agent.history.reader import EVER_S, MOST_POINTS, HistoryReader
from gpuwatch_agent.runs.views import run_view

_MAX_POINTS = 2000
_MAX_STEPS = 100_000
_MAX_BUCKETS = 20_000
_MAX_QUERIES, _MAX_SERIES = 100, 20_000
_MOST_POINTS = 200_000  # of all queries of one request
_PICKS = ("last", "extremes")

Query = dict[str, str]


class BadRequest(Exception):
    """A wrong query; its text says what, where and what to do."""


class NothingKept(Exception):
    """The history has nothing of what was requested."""


def runs(reader: HistoryReader, live: Sequence[api.Run], query: Query, prices: Prices) -> api.Runs:
    """Return the runs of /api/v1/runs, most recently active first; with `kept=all` also those only in the history."""
    kept = query.pop("kept", "live")
    _check_is_empty(query)
    if kept not in ("live", "all"):
        raise BadRequest(f"kept={kept!r}: give live or all, without other parameters")
    known = {(view.run, view.rank) for view in live}
    records = reader.records() if kept == "all" else []
    old = [run_view(record, prices) for record in records if record.key not in known]
    return api.Runs([*live, *sorted(old, key=lambda view: -view.last_message_s)])


def ledger(reader: HistoryReader, query: Query) -> api.LedgerOf:
    """Return seconds by state of every GPU and run over a period, by default the last hour."""
    start_s, end_s = _span(query, 3600)
    _check_is_empty(query)
    gpus = reader.growth("gpuwatch_gpu_seconds_total", start_s, end_s, _MAX_POINTS)
    joules = reader.growth("gpuwatch_gpu_state_energy_joules_total", start_s, end_s, _MAX_POINTS)
    runs = reader.growth("gpuwatch_run_seconds_total", start_s, end_s, _MAX_POINTS)
    return api.LedgerOf(
        start_s,
        end_s,
        [api.GpuSeconds(*key, states, sum(states.values()), joules.get(key, {})) for key, states in gpus.items()],
        [api.RunSeconds(*key, states, sum(states.values())) for key, states in runs.items()],
    )


def many_series(reader: HistoryReader, texts: Sequence[str]) -> api.Answers:
    """Return the answers to several queries of `series`, each given as a query string."""
    if not 0 < len(texts) <= _MAX_QUERIES:
        raise BadRequest(f"{len(texts)} queries: give 1 to {_MAX_QUERIES}, each as q=metric%3DNAME%26…")
    answers: list[api.SeriesOf] = []
    for text in texts:
        answers.append(series(reader, dict(parse_qsl(text, keep_blank_values=True)), _MOST_POINTS // len(texts)))
        if sum(len(answer.series) for answer in answers) > _MAX_SERIES:
            raise BadRequest(f"more than {_MAX_SERIES} series: name labels, or sum them with `by`")
    return api.Answers(answers)


def steps(reader: HistoryReader, run: str, query: Query) -> api.LastSteps | api.Steps:
    """Return a run's last steps, or with `points` all of them downsampled. Raises: BadRequest, NothingKept."""
    rank, is_last = int(number(query, "rank", 0)), "points" not in query
    count = size(query, "last", 600, _MAX_STEPS) if is_last else size(query, "points", 600, _MAX_BUCKETS)
    start_s, end_s = (-EVER_S, EVER_S) if is_last else (number(query, "start", -EVER_S), number(query, "end", EVER_S))
    _check_is_empty(query)
    found: api.LastSteps | api.Steps | None
    found = reader.last_steps(run, rank, count) if is_last else reader.steps(run, rank, count, start_s, end_s)
    if found is None:
        raise NothingKept(f"no steps of run {run!r} rank {rank} are kept; /api/v1/runs lists the runs")
    return found


def series(reader: HistoryReader, query: dict[str, str], most: int = MOST_POINTS) -> api.SeriesOf:
    """Return the answer to one query of /api/v1/series. Raises: BadRequest."""
    metric = query.pop("metric", "")
    if metric not in BY_NAME:
        raise BadRequest(f"metric={metric!r} is not a metric of gpuwatch; /metrics lists them")
    start_s, end_s = _span(query, 900)
    points = size(query, "points", 300, _MAX_POINTS)
    by, pick = query.pop("by", None), query.pop("pick", "last")
    if pick not in _PICKS:
        raise BadRequest(f"pick={pick!r} is not known; give one of {', '.join(_PICKS)}")
    groups = None if by is None else [label for label in by.split(",") if label]
    labels = BY_NAME[metric].labels
    if unknown := sorted({*query, *(groups or ())} - set(labels)):
        raise BadRequest(f"{metric} has no label {unknown[0]!r}; it has {', '.join(labels) or 'none'}")
    found = reader.series(metric, query, start_s, end_s, points, groups, pick == "extremes", min(most, MOST_POINTS))
    return api.SeriesOf(found, metric, BY_NAME[metric].kind, BY_NAME[metric].unit)


def size(query: Query, name: str, default: int, most: int) -> int:
    """Return a count from 1 to `most`, removed from the query. Raises: BadRequest."""
    found = int(number(query, name, default))
    if not 0 < found <= most:
        raise BadRequest(f"{name}={found}: give 1 to {most}")
    return found


def _span(query: Query, default_s: float) -> tuple[float, float]:
    end_s = number(query, "end", time.time())
    start_s = number(query, "start", end_s - default_s)
    if start_s > end_s:
        raise BadRequest(f"start={start_s} is after end={end_s}")
    return start_s, end_s


def number(query: Query, name: str, default: float) -> float:
    """Return a number, removed from the query. Raises: BadRequest."""
    if (text := query.pop(name, None)) is None:
        return default
    try:
        number = float(text)
    except ValueError:
        raise BadRequest(f"{name}={text!r} is not a number") from None
    if not abs(number) < EVER_S:  # nor is nan
        raise BadRequest(f"{name}={text!r} is out of range")
    return number


def _check_is_empty(query: Query) -> None:
    if query:
        raise BadRequest(f"{next(iter(query))!r} is not a parameter here; see docs/reference/api.md")
