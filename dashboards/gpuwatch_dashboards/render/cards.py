"""Panels ready for the page (heading; chart, table or text), and pieces of pages as HTML. The same for all viewers.

Both are drawn by the templates that reports use too (`PAGES`): what goes into them is prepared here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from markupsafe import Markup

from gpuwatch.api import Finding, Gpu, Run, Series
from gpuwatch.diagnosis.rates import money
from gpuwatch.formatting import duration
from gpuwatch.tools.reports.display import SEVERITIES, Unit, display
from gpuwatch.tools.reports.page import macros
from gpuwatch_dashboards.panels import Panel, title_of
from gpuwatch_dashboards.query import Answers, Span, shares_by
from gpuwatch_dashboards.render.charts import Mark, Option, drawn_lines, legend_values, line_option, spoken
from gpuwatch_dashboards.selection import concluded, facts_of, worst_of

PAGES = macros("pages.html")  # the macros of templates/pages.html: functions that return HTML with every value escaped
HEIGHT_PX = 150
ONE_SAMPLE = "Only one sample in this time range; a line needs two."
MOST_ROWS, MOST_RUNS = 50, 16
LONG_S = 120.0  # from this on a duration is in minutes, hours or days
LINKS = {"instance": ("./", "node"), "run": ("run", "run")}
"""By the label of a table's column: the page that a cell leads to, and its parameter."""


@dataclass(frozen=True)
class Card:
    key: str
    head: Markup  # HTML: title, question, legend; without a chart also what is shown in its place
    option: Option | None = None
    height_px: int = HEIGHT_PX
    spoken: str = ""  # the chart in words
    stretch: tuple[float, float] | None = None
    """From when to when the chart goes, in Unix seconds, when a click on it zooms in."""


def card(
    panel: Panel,
    traces: Answers,
    span: Span,
    height_px: int = HEIGHT_PX,
    marks: Sequence[Mark] = (),
    zoom: bool = False,
    currency: str = "",
) -> Card:
    """Return a chart or table with the lines of each of its curves."""
    if panel.kind == "table":
        head = PAGES.panel_head(panel.title, panel.question)
        return Card(f"panel-{panel.key}", head + table(panel, traces, currency))
    if currency and panel.unit.startswith("money"):
        panel = replace(panel, title=f"{panel.title}, {currency}")
    lines = drawn_lines(panel, traces)
    head = PAGES.panel_head(panel.title, panel.question, legend_values(panel, lines))
    if not any(len(line.points) > 1 for line in lines):
        return text_card(panel.key, head, ONE_SAMPLE if any(line.points for line in lines) else panel.empty)
    option, stretch = line_option(panel, lines, span, marks, zoom), (span.start_s, span.end_s) if zoom else None
    return Card(f"panel-{panel.key}", head, option, height_px, spoken(panel, lines), stretch)


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
    elif "severity" in labels:
        ordered.sort(key=lambda row: [*SEVERITIES, row[0].get("severity")].index(row[0].get("severity")))
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


def verdict(run: Run) -> Markup:
    """Return the head of the page Live: who the run is, what is wrong in one sentence, and its key numbers."""
    costliest = max(run.findings or concluded(run), key=lambda f: f.predicted_speedup or 1.0, default=None)
    return PAGES.verdict(run, costliest)


def findings(found: Sequence[Finding], now_s: float, live: bool) -> Markup:
    """Return the active findings as cards: one for each root, its consequences inside."""
    return PAGES.findings(found, lambda each: [SEVERITIES[each.severity].name, *facts_of(each, now_s)], live)


def past_findings(found: Sequence[Finding], clock: Callable[[float], str]) -> Markup:
    """Return the findings over a run, the newest first, as a list; `clock` gives a time in the reader's zone."""
    titles = {each.cause: each.title for each in found}

    def facts(each: Finding) -> list[str]:
        seen_s = each.seen_s or 0.0
        facts = [f"{clock(each.since_s or seen_s)} to {clock(seen_s)}", display(each.ratio, "ratio")]
        if (root := titles.get(each.root or "")) is not None:
            return [*facts, f"a consequence of: {root}"]
        return [*facts, f"predicted {each.gain} the throughput"] if each.gain else facts

    return PAGES.past_findings(sorted(found, key=lambda each: -(each.since_s or 0.0)), facts)


def run_table(runs: Sequence[Run], shown: Run) -> Markup:
    """Return the ongoing runs, a row each by its worst rank, the one shown marked; empty if that is the only one."""
    going = list(dict.fromkeys(run.run for run in runs if run.status == "running"))
    if going in ([], [shown.run]):
        return Markup()
    ranks = [[run for run in runs if run.run == name] for name in going[:MOST_RUNS]]
    return PAGES.runs([(worst_of(of), of, of[0].run == shown.run) for of in ranks], len(going) - MOST_RUNS)


def rank_table(ranks: Sequence[Run], shown: Run) -> Markup:
    """Return a run's ranks, the worst one marked; empty for a run of one rank."""
    quickest_s = min((r.recent.step_s_p50 for r in ranks if r.recent and r.recent.step_s_p50), default=None)
    return PAGES.ranks(ranks, shown, worst_of(ranks), quickest_s) if len(ranks) > 1 else Markup()


def gpu_table(gpus: Sequence[Gpu], states: Sequence[Series], runs: Sequence[Run]) -> Markup:
    """Return a node's GPUs as a table; `states` are their shares of time (`GPU_STATES`) over the time shown."""
    uuids = {each.labels["UUID"] for each in states}
    shares = {uuid: shares_by("state", [each for each in states if each.labels["UUID"] == uuid]) for uuid in uuids}
    return PAGES.gpus(gpus, shares, {run.run: run.name or run.run for run in runs})


def ranks_of(runs: Sequence[Run], run: Run) -> list[Run]:
    """Return all ranks of a run that are known: the worst one, then the others in order."""
    ranks = [each for each in runs if each.run == run.run]
    worst = worst_of(ranks)
    return sorted(ranks, key=lambda each: (each is not worst, each.rank))


def findings_of(runs: Sequence[Run], run: Run | None) -> list[Finding]:
    """Return a rank's findings, or those at its end, then those of the run's other ranks that this one waits for."""
    if run is None:
        return []
    others = [other for other in runs if other.run == run.run and other.rank != run.rank]
    of_others = (found for other in others for found in (*other.findings, *concluded(other)))
    return [*run.findings, *concluded(run), *(found for found in of_others if found.rank is not None)]
