"""A run's data wait as a map: a row an epoch (or so many steps), darker where a step waited longer."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwatch.api import Steps
from gpuwatch.tools.reports.display import Scale, display, scale_for
from gpuwatch_dashboards.render.cards import Card, text_card
from gpuwatch_dashboards.render.markup import PAGES
from gpuwatch_dashboards.render.option import GRID, Option

TITLE = "Data wait over the run"
MOST_ROWS, MOST_COLUMNS = 100, 120
ROW_PX = 12
COVER = 0.98
"""The colour is full at this share of all cells: one pause at the start must not make all else pale."""
MEDIAN_SHADE = 3.0
"""And at no less than this many times the median wait, where any is as long: outliers stay visible where all other steps wait alike."""
SHADES = ("rgba(213,94,0,0.05)", "rgba(213,94,0,0.35)", "rgba(213,94,0,1)")
"""From no wait to the longest; translucent, so that they are shades of the page's own background, light or dark."""


@dataclass(frozen=True)
class Grid:
    """Cells row by row, `[rows * columns]`."""

    rows: int
    columns: int
    longest_s: list[float | None]
    """The longest data wait of a cell's steps; None: no step there."""
    first: list[int]
    """Number of a cell's first step."""
    names: list[str]
    """Of the rows."""
    by_epoch: bool
    cell_steps: int
    """How many steps lie side by side in a cell."""


def grid(steps: Steps) -> Grid | None:
    """Return the cells, wrapped at epochs where there are two or more, else at a fixed width; None without a wait."""
    waited = steps.column("data_wait_s")
    if waited is None or not steps.step:
        return None
    starts = sorted({epoch.step for epoch in steps.epochs})
    by_epoch = len(starts) >= 2
    first, last = steps.step[0], steps.step[-1] + steps.count[-1]
    if by_epoch:
        edges = [*([first] if first < starts[0] else []), *starts]
    else:
        width = max(steps.bucket_steps, -(-(last - first) // min(MOST_ROWS, max(1, len(steps.step) // 25 or 1))))
        edges = list(range(first, last, width))
    lengths = [b - a for a, b in zip(edges, [*edges[1:], last], strict=True)]
    columns = max(1, min(MOST_COLUMNS, max(lengths) // steps.bucket_steps))
    together = -(-len(edges) // MOST_ROWS)
    rows = -(-len(edges) // together)
    longest: list[float | None] = [None] * (rows * columns)
    firsts = [0] * (rows * columns)
    row = 0
    for step, count, wait in zip(steps.step, steps.count, waited.max, strict=True):
        # steps across two rows are shown in the later one: their longest is as good as always its first batch
        while row + 1 < len(edges) and step + count > edges[row + 1]:
            row += 1
        column = min(columns - 1, max(0, step - edges[row]) * columns // max(lengths))
        cell = (row // together) * columns + column
        if wait is not None and (longest[cell] is None or wait > (longest[cell] or 0.0)):
            longest[cell], firsts[cell] = wait, step
    names = [_name(number * together, together, edges, by_epoch) for number in range(rows)]
    return Grid(rows, columns, longest, firsts, names, by_epoch, max(1, max(lengths) // columns))


def _name(number: int, together: int, edges: list[int], by_epoch: bool) -> str:
    if not by_epoch:
        return f"{edges[number]:,}"
    return f"epoch {number + 1}" if together == 1 else f"{number + 1}–{min(len(edges), number + together)}"


def heat_card(steps: Steps) -> Card:
    """Return the map as a card."""
    found = grid(steps)
    if found is None or len(steps.step) < 2:
        head = PAGES.panel_head(TITLE, "When did steps wait for data?")
        return text_card("heat", head, "No step of this run is kept for this time.")
    known = sorted(value for value in found.longest_s if value is not None)
    most = full_colour_s(known)
    wrap = "Each row is an epoch" if found.by_epoch else "Each row is as many steps"
    head = PAGES.panel_head(
        TITLE,
        f"{wrap}, from left to right; a cell is as dark as its longest wait. Full colour: {display(most, 's')} or more.",
    )
    words = f"{TITLE}: {found.rows} rows; longest wait {display(known[-1], 's')}"
    return Card("panel-heat", head, _option(found, most, scale_for("s", most)), _height_px(found.rows), words)


def full_colour_s(known: list[float]) -> float:
    """Return the wait of full colour; `known` are those of all cells, the shortest first."""
    median = known[len(known) // 2]
    return (
        max(known[min(len(known) - 1, int(COVER * len(known)))], min(known[-1], MEDIAN_SHADE * median))
        or known[-1]
        or 1.0
    )


def _height_px(rows: int) -> int:
    return max(110, min(440, rows * ROW_PX + 40))


def _option(found: Grid, most: float, scale: Scale) -> Option:
    """Return the chart; a cell is (column, row, longest wait, its first step)."""
    cells = [
        [n % found.columns, n // found.columns, round(value * scale.factor, 3), found.first[n]]
        for n, value in enumerate(found.longest_s)
        if value is not None
    ]
    label = {"show": True, "interval": "auto", "hideOverlap": True}
    return {
        "animation": False,
        "grid": {**GRID, "left": 74},
        "tooltip": {
            "confine": True,
            "formatter": f"step {{@[3]}}<br>longest data wait <b>{{@[2]}}{scale.suffix}</b>",
            "transitionDuration": 0,
        },
        "xAxis": {
            "type": "category",
            "data": [f"+{column * found.cell_steps:,}" for column in range(found.columns)],
            "axisLabel": label,
        },
        "yAxis": {"type": "category", "data": found.names, "inverse": True, "axisLabel": label},
        "visualMap": {
            "show": False,
            "dimension": 2,
            "min": 0,
            "max": most * scale.factor,
            "inRange": {"color": list(SHADES)},
        },
        "series": [{"type": "heatmap", "data": cells, "emphasis": {"disabled": True}, "progressive": 0}],
    }
