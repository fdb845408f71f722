"""Curves of the last minutes as lines of text, two abreast, each with its latest value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from gpuwatch.api import Points
from gpuwatch_dashboards.terminal.lines import cell
from gpuwatch_dashboards.terminal.looks import BOLD, DIM, words
from gpuwatch_dashboards.terminal.sparkline import buckets, sparkline

LABEL = 13
"""Cells of a line's name, the spaces around it included."""


@dataclass(frozen=True)
class Curve:
    name: str
    points: Points
    last: str
    """The latest value with its unit."""
    colour: str = "default"
    maximum: float | None = 1.0
    """Upper end; None: by the largest value."""


def last(points: Points) -> float | None:
    """Return the latest value that is known."""
    return next((value for _, value in reversed(points) if value is not None), None)


def curve_lines(curves: Sequence[Curve], start_s: float, end_s: float, width: int, rows: int = 1) -> list[Text]:
    """Return the curves two abreast, each `rows` high; an odd one stands alone."""
    columns = (width - 1) // 2 - LABEL - 8
    blocks = [_block(curve, start_s, end_s, columns, rows) for curve in curves]
    lines: list[Text] = []
    for number in range(0, len(blocks), 2):
        pair = blocks[number : number + 2]
        if len(pair) == 1:
            lines += pair[0]
        else:
            lines += [one.append(" ").append_text(other) for one, other in zip(*pair, strict=True)]
    return lines


def _block(curve: Curve, start_s: float, end_s: float, columns: int, rows: int) -> list[Text]:
    values = buckets(curve.points, columns, start_s, end_s)
    lines = []
    for number, drawn in enumerate(sparkline(values, curve.maximum, rows)):
        bottom = number == rows - 1
        line = words(f" {cell(curve.name if bottom else '', LABEL - 2)} ", DIM)
        line.append(drawn, Style(color=curve.colour))
        line.append(f" {cell(curve.last if bottom else '', 7)}", BOLD)
        lines.append(line)
    return lines
