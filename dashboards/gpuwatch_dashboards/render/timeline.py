"""The timeline of a run's steps: what a step is made of on the host and on the device; a few steps one by one, in real time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from gpuwatch.api import Series, Spread, Steps
from gpuwatch.tools.reports.display import PHASES, STATES, WAITS, Look, scale_for
from gpuwatch_dashboards.panels import Curve, Panel
from gpuwatch_dashboards.panels.panel import stack
from gpuwatch_dashboards.query import Span
from gpuwatch_dashboards.render.cards import Card, card, text_card
from gpuwatch_dashboards.render.markup import PAGES
from gpuwatch_dashboards.render.option import GRID, Mark, Option, time_axis, tooltip

HOST = ("compute_s", "transfer_s", "data_wait_s")
"""Bottom of a stack first."""
DEVICE = ("device_compute_s", "device_transfer_s", "host_wait_s", "input_wait_s")
MOST_BUCKETS = 300
HEIGHT_PX = 200
MOST_STEPS = 300
"""Up to so many steps are drawn one by one."""
ROW_PX, GAP_PX = 46, 14
GAP_MS = 0.001
"""After its end a piece is interrupted: at the same moment the tooltip would list it twice."""
ROWS = ("host", "device")
KINDS: dict[str, Look] = {
    "data_wait": PHASES["data_wait"],
    "transfer": STATES["transfer"],
    "compute": STATES["compute"],
    "exposed": WAITS["exposed"],
    "hidden": WAITS["hidden"],
    "host_wait": STATES["host_wait"],
}
"""What a piece may be."""


HOST_STEPS = stack("steps", "Steps on the host", "s", empty="No step of this run is kept for this time.").asks(
    "Which phases make up a step's time on the host's clock? Click to zoom in.", Curve("{phase}")
)
DEVICE_STEPS = stack("device_steps", "Steps on the device", "s").asks(
    "Which states make up a step's time on the device's clock?", Curve("{state}")
)
WAITS_PANEL = stack("waits", "Data wait, exposed and hidden", "s").asks(
    "How much of the host's wait for data did the device wait too (exposed)? Hidden wait costs nothing.",
    Curve("{wait}"),
)
LONGEST = Panel("longest", "Longest data wait", "s").asks(
    "Which steps are outliers? The longest and the mean of each interval.", Curve("longest"), Curve("mean")
)
RANK_STEPS = Panel("rank_steps", "Step time of the ranks", "s").asks(
    "Is one rank slower than the others, so that they wait for it?", Curve("rank {rank}")
)
"""Panels of step records, which only agents keep: they are in no group."""


def step_cards(steps: Steps, span: Span, marks: Sequence[Mark]) -> list[Card]:
    """Return the host's chart and, where it was measured, the device's; few steps are drawn one by one."""
    few = merged(steps, MOST_BUCKETS)
    host = [trace(few, of.mean, "phase", name[:-2]) for name in HOST if (of := few.column(name)) is not None]
    one_by_one = [step_rows(steps)] if shown_one_by_one(steps) else []
    return [
        *one_by_one,
        _card(HOST_STEPS, [host], span, marks),
        *_device(few, span, marks),
        *([] if one_by_one else [_longest(few, span, marks)]),
    ]


def nothing_card(why: str | None = None) -> Card:
    head = PAGES.panel_head(HOST_STEPS.title, HOST_STEPS.question)
    none = "No step of this run is kept for this time. Steps are kept for seven days."
    return text_card(HOST_STEPS.key, head, why or none)


def _device(steps: Steps, span: Span, marks: Sequence[Mark]) -> list[Card]:
    device = [trace(steps, column.mean, "state", _state(name)) for name in DEVICE if (column := steps.column(name))]
    out_of_sight = hidden(steps)
    felt = steps.column("input_wait_s")
    if not device or felt is None or out_of_sight is None:
        return []
    waits = [trace(steps, felt.mean, "wait", "exposed"), trace(steps, out_of_sight, "wait", "hidden")]
    return [_card(DEVICE_STEPS, [device], span, marks), _card(WAITS_PANEL, [waits], span, marks)]


def _state(column: str) -> str:
    return column.removesuffix("_s").removeprefix("device_")


def _longest(steps: Steps, span: Span, marks: Sequence[Mark]) -> Card:
    """Return the longest and the mean wait of each interval, so that a spike among a thousand steps is seen."""
    waited = steps.column("data_wait_s")
    lines = [] if waited is None else [[trace(steps, values, "", "")] for values in (waited.max, waited.mean)]
    return _card(LONGEST, lines or [[], []], span, marks)


def _card(panel: Panel, traces: Sequence[Sequence[Series]], span: Span, marks: Sequence[Mark]) -> Card:
    return card(panel, traces, span, HEIGHT_PX, marks=marks, zoom=True)


def merged(steps: Steps, most: int) -> Steps:
    """Return the steps in at most `most` buckets: means by their numbers of steps, the least, the greatest."""
    size = max(1, -(-len(steps.step) // most))
    if size == 1:
        return steps
    starts = range(0, len(steps.step), size)
    return msgspec.structs.replace(
        steps,
        bucket_steps=steps.bucket_steps * size,
        step=tuple(steps.step[n] for n in starts),
        time_s=tuple(steps.time_s[n] for n in starts),
        end_s=tuple(steps.end_s[min(n + size, len(steps.end_s)) - 1] for n in starts),
        count=tuple(sum(steps.count[n : n + size]) for n in starts),
        samples=(),
        bucket_s={},
        columns={
            name: None if spread is None else _merged(spread, steps.count, size)
            for name, spread in steps.columns.items()
        },
    )


def _merged(spread: Spread, counts: Sequence[int], size: int) -> Spread:
    mean, least, most = [], [], []
    for n in range(0, len(counts), size):
        known = [(m, c) for m, c in zip(spread.mean[n : n + size], counts[n : n + size], strict=True) if m is not None]
        weight = sum(count for _, count in known)
        mean.append(sum(m * count for m, count in known) / weight if weight else None)
        least.append(min((value for value in spread.min[n : n + size] if value is not None), default=None))
        most.append(max((value for value in spread.max[n : n + size] if value is not None), default=None))
    return Spread(tuple(mean), tuple(least), tuple(most))


def trace(steps: Steps, values: Sequence[float | None], label: str, name: str) -> Series:
    """Return one line over the buckets' times; where the steps pause (an evaluation, a stall) it is interrupted."""
    points: list[tuple[float, float | None]] = []
    usual_s = _usual_s(steps)
    for n, (time_s, value) in enumerate(zip(steps.time_s, values, strict=True)):
        if n and time_s - steps.end_s[n - 1] > max(2 * usual_s, 1.0):
            points += [(steps.end_s[n - 1], values[n - 1]), ((steps.end_s[n - 1] + time_s) / 2, None)]
        points.append((time_s, value))
    if steps.time_s and steps.end_s[-1] > steps.time_s[-1]:
        points.append((steps.end_s[-1], values[-1]))
    return Series({label: name}, tuple(points))


def _usual_s(steps: Steps) -> float:
    lengths = sorted(end - begin for begin, end in zip(steps.time_s, steps.end_s, strict=True))
    return lengths[len(lengths) // 2] if lengths else 0.0


def hidden(steps: Steps) -> tuple[float | None, ...] | None:
    """Return each bucket's mean wait that the device did not feel; None without a device's timeline."""
    waited, felt = steps.column("data_wait_s"), steps.column("input_wait_s")
    if waited is None or felt is None:
        return None
    pairs = zip(waited.mean, felt.mean, strict=True)
    return tuple(None if a is None or b is None else max(0.0, a - b) for a, b in pairs)


@dataclass(frozen=True)
class Piece:
    """A stretch of one step in one row. Unix seconds."""

    row: int
    kind: str
    begin_s: float
    end_s: float


def shown_one_by_one(steps: Steps) -> bool:
    return steps.bucket_steps == 1 and 0 < steps.steps <= MOST_STEPS


def pieces(steps: Steps) -> Iterator[Piece]:
    """Yield what host and device did, by step.

    The device's idle time ends when the batch is in hand; what it does after that, it does until it is idle again. Where
    it was measured the host's wait is split: first what was hidden behind the device's work, then what starved it.
    """
    measured = steps.column("input_wait_s") is not None
    for n, begin_s in enumerate(steps.time_s):
        of = {name.removesuffix("_s"): 0.0 if c is None else c.mean[n] or 0.0 for name, c in steps.columns.items()}
        in_hand_s = begin_s + of["data_wait"]
        copied_s = in_hand_s + of["transfer"]
        if measured:
            starved_s = in_hand_s - of["input_wait"]
            yield Piece(0, "hidden", begin_s, starved_s)
            yield Piece(0, "exposed", starved_s, in_hand_s)
            yield Piece(1, "host_wait", starved_s - of["host_wait"], starved_s)
            yield Piece(1, "exposed", starved_s, in_hand_s)
            received_s = in_hand_s + of["device_transfer"]
            yield Piece(1, "transfer", in_hand_s, received_s)
            yield Piece(1, "compute", received_s, received_s + of["device_compute"])
        else:
            yield Piece(0, "data_wait", begin_s, in_hand_s)
        yield Piece(0, "transfer", in_hand_s, copied_s)
        yield Piece(0, "compute", copied_s, copied_s + of["compute"])


def step_rows(steps: Steps) -> Card:
    """Return the rows as a card. Each kind of piece is one area of height 1, interrupted where it does something else."""
    found = [piece for piece in pieces(steps) if piece.end_s > piece.begin_s]
    span = Span(steps.time_s[0], steps.end_s[-1])
    rows = sorted({piece.row for piece in found})
    scale = scale_for("s", max((piece.end_s - piece.begin_s for piece in found), default=1.0))
    series = [
        _area(kind, row, [p for p in found if p.kind == kind and p.row == row], scale.factor)
        for row in rows
        for kind in KINDS
        if any(p.kind == kind and p.row == row for p in found)
    ]
    option: Option = {
        "animation": False,
        "tooltip": tooltip(scale),
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
        "grid": [{**GRID, "bottom": None, "top": 8 + n * (ROW_PX + GAP_PX), "height": ROW_PX} for n in rows],
        "xAxis": [
            {
                **time_axis(span),
                "gridIndex": n,
                "axisLabel": {"show": n == rows[-1], "hideOverlap": True, "alignMaxLabel": "right"},
            }
            for n in rows
        ],
        "yAxis": [_row_axis(n) for n in rows],
        "series": series,
    }
    used = [kind for kind in KINDS if any(piece.kind == kind for piece in found)]
    question = f"What did each of these {steps.steps:,} steps do, and when?"
    head = PAGES.panel_head("Step by step", question, entries=[KINDS[kind] for kind in used])
    words = f"{steps.steps:,} steps one by one, a row each of " + " and ".join(ROWS[n] for n in rows)
    return Card("panel-bars", head, option, 36 + len(rows) * (ROW_PX + GAP_PX), words)


def _row_axis(row: int) -> Option:
    return {
        "type": "value",
        "gridIndex": row,
        "min": 0,
        "max": 1,
        "name": ROWS[row],
        "nameLocation": "middle",
        "nameGap": 14,
        "nameRotate": 0,
        "axisLabel": {"show": False},
        "splitLine": {"show": False},
    }


def _area(kind: str, row: int, found: list[Piece], factor: float) -> Option:
    look = KINDS[kind]
    data: list[list[float | None]] = []
    for piece in found:
        length = round((piece.end_s - piece.begin_s) * factor, 3)
        data += [
            [1e3 * piece.begin_s, 1, length],
            [1e3 * piece.end_s, 1, length],
            [1e3 * piece.end_s + GAP_MS, None, length],
        ]
    return {
        "type": "line",
        "name": look.name,
        "xAxisIndex": row,
        "yAxisIndex": row,
        "data": data,
        "encode": {"x": 0, "y": 1, "tooltip": [2]},
        "symbol": "none",
        "color": look.colour,
        "lineStyle": {"width": 0},
        "areaStyle": {"opacity": 1},
        "emphasis": {"disabled": True},
    }
