"""A panel ready for the page: its heading, and its chart or what is said in its place. The same for all viewers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuwatch.api import Series
from gpuwatch_dashboards import markup
from gpuwatch_dashboards.charts import drawn_lines, legend_values, spoken
from gpuwatch_dashboards.marks import Mark
from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.option import Option, line_option
from gpuwatch_dashboards.panels import Panel

HEIGHT_PX = 150
ONE_SAMPLE = "One sample in this time range: a line needs two."


@dataclass(frozen=True)
class Card:
    key: str
    head: str
    """HTML: title, question, legend; without a chart also what is said in its place."""
    option: Option | None = None
    height_px: int = HEIGHT_PX
    spoken: str = ""
    """The chart in words."""
    stretch: tuple[float, float] | None = None
    """From when to when the chart goes, in Unix seconds, when a click on it looks closer."""


def card(
    panel: Panel,
    traces: Sequence[Sequence[Series]],
    span: Span,
    height_px: int = HEIGHT_PX,
    empty: str | None = None,
    marks: Sequence[Mark] = (),
    zoom: bool = False,
) -> Card:
    """Return a panel with the lines of each of its curves; `empty` is said instead of the panel's own words."""
    lines = drawn_lines(panel, traces)
    head = markup.panel_head(panel.title, panel.question, legend_values(panel, lines))
    if not any(len(line.points) > 1 for line in lines):
        return text_card(panel.key, head, ONE_SAMPLE if any(line.points for line in lines) else empty or panel.empty)
    return Card(
        f"panel-{panel.key}",
        head,
        line_option(panel, lines, span, marks, zoom),
        height_px,
        spoken(panel, lines),
        (span.start_s, span.end_s) if zoom else None,
    )


def text_card(key: str, head: str, text: str) -> Card:
    """Return a heading (HTML, escaped) with a sentence in the figure's place."""
    return Card(f"panel-{key}", head + markup.nothing(text))
