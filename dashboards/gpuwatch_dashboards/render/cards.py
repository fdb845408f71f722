"""A panel ready for the page: its heading, and its chart, its table or the text in its place. The same for all viewers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import urlencode

from gpuwatch.api import Series
from gpuwatch.tools.reports.display import SEVERITIES, Unit, display
from gpuwatch_dashboards.model import Scope, Span
from gpuwatch_dashboards.panels import Panel
from gpuwatch_dashboards.panels.panel import Column
from gpuwatch_dashboards.render import markup
from gpuwatch_dashboards.render.charts import drawn_lines, legend_values, spoken
from gpuwatch_dashboards.render.marks import Mark
from gpuwatch_dashboards.render.option import Option, line_option
from gpuwatch_dashboards.sources import Source

HEIGHT_PX = 150
ONE_SAMPLE = "One sample in this time range: a line needs two."
MOST_ROWS = 50
PAGES = {"node": ("live", "node"), "run": ("run", "run")}
"""By a column's link: the page that a cell leads to, and its parameter."""
Answers = Sequence[Sequence[Series]]
"""The lines of each of a panel's curves."""


@dataclass(frozen=True)
class Card:
    key: str
    head: str
    """HTML: title, question, legend; without a chart also what is shown in its place."""
    option: Option | None = None
    height_px: int = HEIGHT_PX
    spoken: str = ""
    """The chart in words."""
    stretch: tuple[float, float] | None = None
    """From when to when the chart goes, in Unix seconds, when a click on it zooms in."""


def read_panels(source: Source, panels: Sequence[Panel], scope: Scope, span: Span) -> list[tuple[Panel, Answers]]:
    """Return each panel that has a live reading with the lines of its curves. One request for all. Raises SourceError."""
    live = [panel for panel in panels if panel.is_live]
    answers = iter(source.evaluate([curve.query for panel in live for curve in panel.curves], scope, span))
    return [(panel, [next(answers) for _ in panel.curves]) for panel in live]


def card(
    panel: Panel,
    traces: Answers,
    span: Span,
    height_px: int = HEIGHT_PX,
    empty: str | None = None,
    marks: Sequence[Mark] = (),
    zoom: bool = False,
) -> Card:
    """Return a chart or table with the lines of each of its curves; `empty` is shown in place of the panel's own text."""
    if panel.kind == "table":
        return Card(f"panel-{panel.key}", markup.panel_head(panel.title, panel.question) + table(panel, traces))
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


def figures(answered: Sequence[tuple[Panel, Answers]]) -> str:
    """Return the stats among the panels as HTML: number and title; what was not measured is left out."""
    shown = []
    for panel, traces in answered:
        # of several series (mounts of /dev/shm, say) the one closest to its limit
        values = [trace.last for trace in traces[0] if trace.last is not None]
        if panel.kind == "stat" and values:
            colour = _colour(panel, max(values))
            style = f' style="border-bottom: 3px solid {colour}"' if colour else ""
            shown.append(
                f'<div class="gw-figure gw-figure-{panel.key}" title="{escape(panel.question)}">'
                f"<b{style}>{escape(_text(max(values), panel.unit))}</b><span>{escape(panel.title)}</span></div>"
            )
    return f'<div class="gw-figures">{"".join(shown)}</div>' if shown else ""


def table(panel: Panel, traces: Answers) -> str:
    """Return a table's rows as HTML: series of all curves with the same labels are one row. Everything is escaped."""
    labels = tuple(column.label for column in panel.columns)
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    named: dict[tuple[str, ...], dict[str, str]] = {}
    # an empty label is absent, a label that no series of a curve has is not the curve's
    own = [each for each in labels if all(not of or any(each in trace.labels for trace in of) for of in traces)]
    for curve, of_curve in zip(panel.curves, traces, strict=True):
        for trace in of_curve:
            key = tuple(trace.labels.get(label, "") for label in own)
            named.setdefault(key, {}).update({label: trace.labels[label] for label in labels if label in trace.labels})
            values = rows.setdefault(key, {})
            if curve.legend and trace.last is not None:
                values[curve.legend] = trace.last
    if not rows:
        return markup.nothing(panel.empty)
    units = {curve.legend: curve.unit or panel.unit for curve in panel.curves if curve.legend}
    first = panel.sort or next(iter(units), "")
    ordered = sorted(rows, key=lambda key: -rows[key].get(first, 0.0)) if panel.sort else list(rows)
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in (*(c.title for c in panel.columns), *units))
    body = ""
    for key in ordered[:MOST_ROWS]:
        cells = [(column.title, _linked(column, named[key].get(column.label, ""))) for column in panel.columns]
        for title, unit in units.items():
            value = rows[key].get(title)
            colour = _colour(panel, value) if unit == panel.unit else ""
            dot = f'<i class="gw-dot" style="--gw:{colour}"></i>' if colour else ""
            cells.append((title, dot + escape(_text(value, unit))))
        body += f"<tr>{''.join(f'<td data-label={chr(34)}{escape(t)}{chr(34)}>{c}</td>' for t, c in cells)}</tr>"
    more = len(rows) - MOST_ROWS
    foot = f'<p class="gw-foot">and {more:,} more</p>' if more > 0 else ""
    return f'<table class="gw-gpus"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{foot}'


def _linked(column: Column, value: str) -> str:
    target = PAGES.get(column.link or "")
    if target is None or not value:
        return escape(value)
    page, name = target
    return f'<a href="{page}?{escape(urlencode({name: value}))}" target="_self">{escape(value)}</a>'


def _text(value: float | None, unit: Unit) -> str:
    """Return a value for people; a count without decimals."""
    return f"{value:,.0f}" if unit == "1" and value is not None and value == int(value) else display(value, unit)


def _colour(panel: Panel, value: float | None) -> str:
    """Return the colour of the highest threshold that a value reaches; empty below all of them."""
    reached = [limit for limit in panel.thresholds if value is not None and value >= limit.value]
    return SEVERITIES[max(reached, key=lambda limit: limit.value).severity].colour if reached else ""
