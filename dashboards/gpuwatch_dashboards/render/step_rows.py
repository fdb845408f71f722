"""A few steps one by one, in real time: a row of what the host did and, where it was measured, one of the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuwatch.api import Steps
from gpuwatch.tools.reports.display import PHASES, STATES, WAITS, Look, scale_for
from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.render import markup
from gpuwatch_dashboards.render.cards import Card
from gpuwatch_dashboards.render.option import GRID, Option, time_axis, tooltip

MOST_STEPS = 300
"""Up to so many steps are drawn one by one."""
ROW_PX, GAP_PX = 46, 14
GAP_MS = 0.001
"""After its end a piece is interrupted: at the same moment the tooltip would tell of it twice."""
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
    it was measured the host's wait is told apart: first what was hidden behind the device's work, then what starved it.
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
    head = markup.looks_head(
        "Step by step", f"What did each of these {steps.steps:,} steps do, and when?", [KINDS[kind] for kind in used]
    )
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
