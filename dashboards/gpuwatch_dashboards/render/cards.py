"""A panel ready for the page: its heading, and its chart, its table or the text in its place. The same for all viewers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from markupsafe import Markup

from gpuwatch.api import Series
from gpuwatch.diagnosis.rates import money
from gpuwatch.formatting import duration
from gpuwatch.tools.reports.display import SEVERITIES, Unit, display
from gpuwatch_dashboards.panels import Panel
from gpuwatch_dashboards.panels.panel import title_of
from gpuwatch_dashboards.query import Scope, Span
from gpuwatch_dashboards.render.charts import Mark, Option, drawn_lines, legend_values, line_option, spoken
from gpuwatch_dashboards.render.markup import PAGES
from gpuwatch_dashboards.sources import Source

HEIGHT_PX = 150
ONE_SAMPLE = "One sample in this time range: a line needs two."
MOST_ROWS = 50
LONG_S = 120.0
"""From this on a duration is in minutes, hours or days."""
LINKS = {"instance": ("live", "node"), "run": ("run", "run")}
"""By the label of a table's column: the page that a cell leads to, and its parameter."""
Answers = Sequence[Sequence[Series]]
"""The lines of each of a panel's curves."""


@dataclass(frozen=True)
class Card:
    key: str
    head: Markup
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
    currency: str = "",
) -> Card:
    """Return a chart or table with the lines of each of its curves; `empty` is shown in place of the panel's own text."""
    if panel.kind == "table":
        return Card(
            f"panel-{panel.key}", PAGES.panel_head(panel.title, panel.question) + table(panel, traces, currency)
        )
    lines = drawn_lines(panel, traces)
    head = PAGES.panel_head(panel.title, panel.question, legend_values(panel, lines))
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


def text_card(key: str, head: Markup, text: str) -> Card:
    """Return a heading (HTML, escaped) with a sentence in the figure's place."""
    return Card(f"panel-{key}", head + PAGES.nothing(text))


def figures(answered: Sequence[tuple[Panel, Answers]], currency: str = "") -> Markup:
    """Return the stats among the panels as HTML: number and title; what was not measured is left out."""
    shown = []
    for panel, traces in answered:
        # of several series (mounts of /dev/shm, say) the one closest to its limit
        values = [trace.last for trace in traces[0] if trace.last is not None]
        if panel.kind == "stat" and values:
            shown.append((panel, _text(max(values), panel.unit, currency), _colour(panel, max(values))))
    return PAGES.stats(shown) if shown else Markup()


def table(panel: Panel, traces: Answers, currency: str = "") -> Markup:
    """Return a table's rows as HTML: series of all curves with the same labels are one row."""
    labels = panel.columns
    found: dict[tuple[str, ...], tuple[dict[str, str], dict[str, float]]] = {}
    # an empty label is absent, a label that no series of a curve has is not the curve's
    common = [each for each in labels if all(not of or any(each in trace.labels for trace in of) for of in traces)]
    for curve, of_curve in zip(panel.curves, traces, strict=True):
        for trace in of_curve:
            names, values = found.setdefault(tuple(trace.labels.get(label, "") for label in common), ({}, {}))
            names.update(trace.labels)
            if curve.legend and trace.last is not None:
                values[curve.legend] = trace.last
    if not found:
        return PAGES.nothing(panel.empty)
    units = {curve.legend: curve.unit or panel.unit for curve in panel.curves if curve.legend}
    ordered = list(found.values())
    if panel.sort:
        ordered.sort(key=lambda row: -row[1].get(panel.sort, 0.0))
    rows = []
    for names, values in ordered[:MOST_ROWS]:
        cells = [(title_of(name), names.get(name) or "–", _link(name, names.get(name, "")), "") for name in labels]
        for title, unit in units.items():
            value = values.get(title)
            cells.append((title, _text(value, unit, currency), "", _colour(panel, value) if unit == panel.unit else ""))
        rows.append(cells)
    return PAGES.table([*map(title_of, labels), *units], rows, len(found) - MOST_ROWS)


def _link(label: str, value: str) -> str:
    page, name = LINKS.get(label, ("", ""))
    return f"{page}?{urlencode({name: value})}" if page and value else ""


def _text(value: float | None, unit: Unit, currency: str) -> str:
    """Return a value for people; a count without decimals, money with its currency."""
    if value is None:
        return display(None, unit)
    if unit in ("money", "money/h"):
        return money(value, currency) + ("/h" if unit == "money/h" else "")
    if unit == "s" and value >= LONG_S:
        return duration(round(value))
    return f"{value:,.0f}" if unit == "1" and value == int(value) else display(value, unit)


def _colour(panel: Panel, value: float | None) -> str:
    """Return the colour of the highest threshold that a value reaches; empty below all of them."""
    reached = [limit for limit in panel.thresholds() if value is not None and value >= limit[0]]
    return SEVERITIES[max(reached)[1]].colour if reached else ""
