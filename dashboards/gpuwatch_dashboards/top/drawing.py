"""Lines of text: bars, curves and paragraphs of an exact width.

Without colour (NO_COLOR, a pipe, colour blindness) states differ by glyph: solid is useful work, slanted strokes are
waiting, punctuation is trouble. Names, evidence and advice come from other processes: no control character is kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import fmean, median

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gpuwatch import tables
from gpuwatch.api import Points, Series
from gpuwatch.formatting import harmless, percent
from gpuwatch.ledger.states import shares
from gpuwatch.tools.reports.display import STATES, Look, Unit, display

GLYPHS: dict[str, str] = tables.table("gpuwatch_dashboards.top", "glyphs.yml")
BLOCKS = "█▓▒░▞▐"  # glyphs drawn in the state's colour; the others are thin, and have it as their background
DIM, BOLD = Style(dim=True), Style(bold=True)
LABEL = 13  # cells of a line's name, with the spaces around it
EIGHTHS = " ▁▂▃▄▅▆▇█"
HEADROOM = 1.15  # so that a constant line does not look as if it were at its limit
_WRAPPER = Console(width=80, color_system=None, force_terminal=False, legacy_windows=False)
"""Rich needs a console to wrap text; nothing is printed to it."""


def styled(text: str, style: Style | str = "") -> Text:
    """Return styled text. (Text(text, style) would also style whatever is appended later.)"""
    return Text().append(text, style)


def fitted(line: Text, width: int, right: bool = False) -> Text:
    """Return the line harmless and exactly `width` cells wide: cut with "…" or filled with spaces."""
    done = Text(harmless(line.plain), style=line.style, spans=list(line.spans))
    done.truncate(max(0, width), overflow="ellipsis")
    done.align("right" if right else "left", width)
    return done


def cell(text: str, width: int, right: bool = False) -> str:
    return fitted(Text(harmless(text)), width, right).plain  # made harmless before `Text` drops some of it unseen


def table(
    columns: Sequence[tuple[str, int | None]], rows: Sequence[Sequence[str | Text]], selected: int | None, height: int
) -> list[Text]:
    """Return a header, which shows which rows of how many, and at most `height` rows, including the selected one.

    Columns have a title and a width in cells: negative aligns right, 0 omits it, None (the last) is unlimited.
    """
    first = max(0, min((selected or 0) - height // 2, len(rows) - height))
    shown = rows[first : first + height]
    titles = [title for title, _ in columns]
    if len(shown) < len(rows):
        titles[-1] = f"{first + 1}–{first + len(shown)} of {len(rows)}  {titles[-1]}"
    lines = []
    for number, row in ((None, titles), *enumerate(shown, first)):
        is_selected = number is not None and number == selected
        style = "dim" if number is None else "bold" if is_selected else ""
        line = styled("▸ " if is_selected else "  ", style)
        for (_, width), each in zip(columns, row, strict=True):
            if width != 0:
                text = each if isinstance(each, Text) or width is None else cell(each, abs(width), right=width < 0)
                line.append_text(text if isinstance(text, Text) else styled(text, style)).append(" ")
        lines.append(line)
    return lines


def wrapped(text: str, width: int, style: Style | str = "", indent: int = 0, head: Text | None = None) -> list[Text]:
    """Return a paragraph in lines of at most `width` cells, indented; `head` replaces the first line's indent."""
    lines = list(styled(harmless(" ".join(text.split())), style).wrap(_WRAPPER, max(8, width - indent)))
    for number, line in enumerate(lines):
        line.rstrip()
        if number == 0 and head is not None:
            lines[0] = head.copy().append(" " * (indent - head.cell_len)).append_text(line)
        else:
            line.pad_left(indent)
    return lines


def flowed(pieces: Iterable[Text], width: int, indent: int = 1, gap: str = "  ") -> list[Text]:
    """Return pieces side by side, as many per line as fit; no piece is split."""
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + len(gap) + piece.cell_len <= width:
            lines[-1].append(gap)
        else:
            lines.append(Text(" " * indent))
        lines[-1].append_text(piece)
    return lines


def rule(title: Text | str, width: int) -> Text:
    """Return a section's title and a line to the right edge."""
    line = styled("── ", DIM).append_text(styled(title, BOLD) if isinstance(title, str) else title).append(" ")
    return line.append("─" * max(0, width - line.cell_len), DIM)


def figure(before: str, number: str, after: str = "", marked: bool = False) -> Text:
    """Return a number with its name and unit; highlighted if `marked`."""
    return styled(before, DIM).append(number, "bold reverse" if marked else "bold").append(after, DIM)


def plate(look: Look) -> Style:
    """Return a style for text: black or white on the colour, readable on light and dark terminals."""
    return Style(color=_ink(look.colour), bgcolor=look.colour, bold=True)


def _ink(colour: str) -> str:
    red, green, blue = Color.parse(colour).get_truecolor()
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def state_name(state: str) -> str:
    return STATES[state].name if state in STATES else state.replace("_", " ")


def swatch(state: str, count: int = 2) -> Text:
    """Return a state's glyph in its colour."""
    glyph, colour = GLYPHS.get(state, GLYPHS["unknown"]), STATES.get(state, STATES["unknown"]).colour
    style = Style(color=colour) if glyph in BLOCKS else Style(color=_ink(colour), bgcolor=colour)
    return styled(glyph * count, style)


def cells(states: Mapping[str, float], width: int) -> dict[str, int]:
    """Return whole cells by state whose sum is `width`, by largest remainder, useful states first (palette's order).

    Each state is less than one cell off its exact share. Empty when no state has time.
    """
    whole = sum(max(0.0, seconds) for seconds in states.values())
    if whole <= 0 or width <= 0:
        return {}
    known = sorted((s for s, seconds in states.items() if seconds > 0), key=lambda s: ([*STATES, s].index(s), s))
    exact = {state: width * states[state] / whole for state in known}
    given = {state: int(share) for state, share in exact.items()}
    for state in sorted(exact, key=lambda s: given[s] - exact[s])[: width - sum(given.values())]:
        given[state] += 1
    return given


def bar(states: Mapping[str, float], width: int) -> Text:
    """Return shares of time as one bar of `width` cells; dots without any time."""
    line = Text()
    for state, count in cells(states, width).items():
        line.append_text(swatch(state, count))
    return line if line.plain else styled("·" * max(0, width), DIM)


def legend(recent: Mapping[str, float], whole: Mapping[str, float], least: float = 0.0005) -> list[Text]:
    """Return an entry for each state with `least` in one, largest first: glyph, name, `recent` and (`whole`) share."""
    now, ever = shares(recent), shares(whole)
    entries = []
    for state in sorted({*now, *ever}, key=lambda s: (-now.get(s, 0.0), -ever.get(s, 0.0))):
        if max(now.get(state, 0.0), ever.get(state, 0.0)) < least:
            continue
        entry = swatch(state).append(f" {state_name(state)} ")
        if recent:
            entry.append(percent(now.get(state, 0.0)), "bold")
        if whole:
            entry.append(f"{' ' if recent else ''}({percent(ever.get(state, 0.0))})", DIM)
        entries.append(entry)
    return entries


def buckets(points: Points, width: int, start_s: float, end_s: float) -> list[float | None]:
    """Return the mean of each of `width` equal intervals; None without samples.

    An interval includes its end, not its start. One that is shorter than the sampling interval takes the value of the
    next sample, which was measured over it.
    """
    if width <= 0:
        return []
    width_s = (end_s - start_s) / width
    found: dict[int, list[float]] = {}  # a gap alone is an empty list
    for time_s, value in points:
        interval = ceil((time_s - start_s) / width_s - 1e-6) - 1  # a time at its end may be rounded
        found.setdefault(interval, []).extend([] if value is None else [value])
    known_s = [time_s for time_s, value in points if value is not None]
    apart_s = [after - before for before, after in pairwise(known_s)]
    reach = max(1, ceil(median(apart_s) / width_s - 1e-6)) if apart_s else 1  # a sample is drawn in so many intervals
    means: list[float | None] = []
    mean, left = 0.0, 0
    for interval in reversed(range(width)):
        if values := found.get(interval):
            mean, left = fmean(values), reach
        elif interval in found:
            left = 0
        means.append(mean if left > 0 else None)
        left -= 1
    return means[::-1]


def sparkline(values: Sequence[float | None], maximum: float | None = None, rows: int = 1) -> list[str]:
    """Return `rows` lines of text, top first, a column for each value, in eighths of a cell.

    A gap stays blank; a measured zero is a thin line. `maximum` is the upper end; None: of the data.
    """
    known = [value for value in values if value is not None]
    top = maximum if maximum is not None else HEADROOM * max(known, default=0.0)
    levels = [
        None if value is None else max(1, round(min(1.0, max(0.0, value / top if top > 0 else 0.0)) * rows * 8))
        for value in values
    ]
    return [
        "".join(" " if level is None else EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels)
        for row in reversed(range(rows))
    ]


def area(traces: Sequence[Series], width: int, rows: int, start_s: float, end_s: float) -> list[Text]:
    """Return shares of time over time, `rows` lines, top first: a column of stacked states for each interval."""
    columns: list[dict[str, float]] = [{} for _ in range(width)]
    for trace in traces:
        for column, value in zip(columns, buckets(trace.points, width, start_s, end_s), strict=True):
            if value is not None:
                column[trace.labels.get("state", "unknown")] = value
    stacks = [[swatch(s, 1) for s, count in cells(column, rows).items() for _ in range(count)] for column in columns]
    return [Text().join(stack[row] if stack else Text(" ") for stack in stacks) for row in reversed(range(rows))]


@dataclass(frozen=True)
class Curve:
    name: str
    points: Points
    unit: Unit
    colour: str = "default"
    maximum: float | None = 1.0  # upper end; None: by the largest value

    @property
    def last(self) -> str:
        return display(Series({}, self.points).last, self.unit)


def curve_lines(
    curves: Sequence[Curve], start_s: float, end_s: float, width: int, rows: int = 1, label: int = LABEL
) -> list[Text]:
    """Return the curves, each `rows` high and followed by its latest value; two side by side if they fit."""
    abreast = 2 if width >= 4 * label + 4 else 1
    value = max([7, *(len(curve.last) for curve in curves)])
    columns = (width - 1) // abreast - label - value - 1
    lines: list[Text] = []
    for n in range(0, len(curves), abreast):
        blocks = [_curve(each, start_s, end_s, columns, rows, label, value) for each in curves[n : n + abreast]]
        lines += [Text(" ").join(parts) for parts in zip(*blocks, strict=True)]
    return lines


def _curve(curve: Curve, start_s: float, end_s: float, columns: int, rows: int, label: int, value: int) -> list[Text]:
    drawn = sparkline(buckets(curve.points, columns, start_s, end_s), curve.maximum, rows)
    names, lasts = ([*[""] * (rows - 1), text] for text in (curve.name, curve.last))
    return [
        figure(f" {cell(name, label - 2)} ", "")
        .append(line, Style(color=curve.colour))
        .append(f" {cell(now, value)}", BOLD)
        for name, line, now in zip(names, drawn, lasts, strict=True)
    ]
