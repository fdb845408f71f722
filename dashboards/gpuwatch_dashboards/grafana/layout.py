"""Places on Grafana's grid of 24 columns: each line of panels fills it, so that nothing overlaps and nothing gapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpuwatch_dashboards.panels.panel import Panel
from gpuwatch_dashboards.panels.site_panel import SitePanel

COLUMNS = 24
AnyPanel = Panel | SitePanel


@dataclass(frozen=True)
class Line:
    """Panels beside each other. `widths` are in proportion; None: all the same."""

    panels: tuple[AnyPanel, ...]
    height: int = 8
    widths: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Row:
    """Lines under a title."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Place:
    x: int
    y: int
    w: int
    h: int


def places(lines: Sequence[Line], y: int) -> Iterator[tuple[AnyPanel, Place]]:
    """Yield each panel with its place; the first line begins at `y`."""
    for line in lines:
        x = 0
        for panel, width in zip(line.panels, widths(line), strict=True):
            yield panel, Place(x, y, width, line.height)
            x += width
        y += line.height


def widths(line: Line) -> list[int]:
    """Return whole widths whose sum is 24. What cannot be shared out equally goes to the first panels."""
    given = line.widths or (1,) * len(line.panels)
    whole = [COLUMNS * each // sum(given) for each in given]
    for number in range(COLUMNS - sum(whole)):
        whole[number] += 1
    return whole


def in_lines(panels: Sequence[AnyPanel], most: int = 3, height: int = 8) -> tuple[Line, ...]:
    """Return the panels in their order, in as few lines of at most `most` as will do, none much emptier than another."""
    lines = -(-len(panels) // most)
    ends = [len(panels) * n // lines for n in range(lines + 1)]
    return tuple(Line(tuple(panels[begin:end]), height) for begin, end in pairwise(ends))
