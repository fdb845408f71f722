"""A metric's series over a stretch of time, out of the history's rows of packed samples."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from gpuwatch.metrics import BY_NAME

MOST_TICKS = 25_000
"""Of a longer stretch than so many seconds, extremes are those of every second, third … sample."""


Series = list[tuple[dict[str, str], list[tuple[float, float]]]]


def read_series(
    reader: sqlite3.Connection,
    metric: str,
    labels: Mapping[str, str],
    span_s: tuple[float, float],
    points: int,
    by: Sequence[str] | None,
    extremes: bool,
) -> Series:
    """Return what `HistoryReader.series` does."""
    start_ms, end_ms = int(span_s[0] * 1000), int(span_s[1] * 1000)
    # Intervals are the same at every request (panels do not flicker), so that one more may be touched.
    step_ms = max(1, -((start_ms - end_ms) // (points - 1))) if points > 1 else end_ms + 1
    names = BY_NAME[metric].labels
    shown = names if by is None else tuple(name for name in names if name in by)
    found: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    columns: dict[int, dict[tuple[str, ...], list[int]]] = {}
    for time_ms, layout, row in _ticks(reader, start_ms, end_ms, step_ms, extremes):
        if layout not in columns:
            columns[layout] = _columns_of(reader, layout, metric, names, labels, shown)
        values = array("d", row) if columns[layout] else ()
        for group, indexes in columns[layout].items():
            value = values[indexes[0]] if len(indexes) == 1 else sum(values[index] for index in indexes)
            found.setdefault(group, []).append((time_ms, value))
    return [
        (
            dict(zip(shown, group, strict=True)),
            [(ms / 1000, value) for ms, value in (_extremes(series, 2 * step_ms) if extremes else series)],
        )
        for group, series in found.items()
    ]


def _ticks(
    reader: sqlite3.Connection, start_ms: int, end_ms: int, step_ms: int, all_of_them: bool
) -> Iterator[tuple[int, int, bytes]]:
    """Yield (time in ms, layout, packed values): each interval's last, or all of them as far as there is time for that.

    Of older time there is one row a minute; of all of them it gives its least and its greatest values.
    """
    span = (start_ms, end_ms)
    if not all_of_them:
        yield from reader.execute(
            "SELECT max(time_ms), layout, row FROM ("
            " SELECT time_ms, layout, row FROM tick_minute WHERE time_ms BETWEEN ? AND ?"
            " UNION ALL SELECT time_ms, layout, row FROM tick WHERE time_ms BETWEEN ? AND ?"
            ") GROUP BY time_ms / ?",
            (*span, *span, step_ms),
        )
        return
    minutes = "SELECT time_ms, layout, low, high FROM tick_minute WHERE time_ms BETWEEN ? AND ? ORDER BY time_ms"
    for time_ms, layout, low, high in reader.execute(minutes, span):
        yield time_ms, layout, low
        yield time_ms, layout, high
    every = -(-(end_ms - start_ms) // (1000 * MOST_TICKS)) or 1
    yield from reader.execute(
        "SELECT time_ms, layout, row FROM tick WHERE time_ms BETWEEN ? AND ? AND time_ms / 1000 % ? = 0 ORDER BY time_ms",
        (*span, every),
    )


def _extremes(series: Iterable[tuple[int, float]], interval_ms: int) -> list[tuple[int, float]]:
    """Return each interval's least and greatest value in their order; one point where they are the same."""
    out: list[tuple[int, float]] = []
    for _, points in groupby(series, key=lambda point: point[0] // interval_ms):
        of_interval = list(points)
        low, high = min(of_interval, key=itemgetter(1)), max(of_interval, key=itemgetter(1))
        out += sorted({low, high})
    return out


def _columns_of(
    reader: sqlite3.Connection,
    layout: int,
    metric: str,
    names: tuple[str, ...],
    labels: Mapping[str, str],
    shown: tuple[str, ...],
) -> dict[tuple[str, ...], list[int]]:
    """Return the places of a metric's matching series in a row, by the values of the labels that are shown."""
    (text,) = reader.execute("SELECT series FROM layout WHERE id = ?", (layout,)).fetchone()
    matching: dict[tuple[str, ...], list[int]] = {}
    for index, (name, values) in enumerate(json.loads(text)):
        if name == metric:
            own = dict(zip(names, values, strict=False))
            if labels.items() <= own.items():
                matching.setdefault(tuple(own[label] for label in shown), []).append(index)
    return matching
