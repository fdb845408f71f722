"""Reports and comparisons as HTML and Markdown, by the templates that the dashboards' pages use too.

A page is one file: no script, no network, light and dark, wide and narrow. Every text is escaped by the templates.
Plots are inline SVG for any width: shapes lie in an inner `<svg>` that is stretched to the plot's area, texts are placed in per cent
of the outer one, so that they keep their size on a phone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import ceil, floor, log10
from pathlib import Path
from typing import Any, Protocol, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gpuwatch.diagnosis.cost import money
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import shares
from gpuwatch.tools.reports import display
from gpuwatch.tools.reports.comparison import VISIBLE, Broken, Comparison
from gpuwatch.tools.reports.display import SEVERITIES, STATES, Look
from gpuwatch.tools.reports.model import Found, RunReport, when
from gpuwatch.tools.stacks.records import rows as stack_rows

TEMPLATES = Path(__file__).with_name("templates")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")
_MANY, _FLATTENED, _ROOM_ABOVE = 20, 2.0, 1.25
"""`step_top_s`: from so many points on, a highest one of more than so many times what all but one in twenty stay below is cut off."""


@cache
def environment() -> Environment:
    """Return the templates with our filters. HTML is escaped by itself, Markdown by the filter `plain`."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=lambda name: not str(name).endswith(".md"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "code": code,
        "digits": display.digits,
        "display": display.display,
        "duration": duration,
        "hours": lambda hours: f"{display.digits(hours) if hours else 0} h",
        "money": money,
        "percent": percent,
        "plain": plain,
        "sentence": sentence,
        "shares": shares,
        "when": when,
    }
    made.globals |= {
        "KINDS": display.KINDS,
        "PHASES": display.PHASES,
        "SEVERITIES": SEVERITIES,
        "STATES": STATES,
        "STATUS_SIGNS": display.STATUS_SIGNS,
        "VERDICTS": display.VERDICTS,
        "VISIBLE": VISIBLE,
        "stack_rows": stack_rows,
    }
    return made


class Macros(Protocol):
    """A template's macros: functions that return HTML with every value escaped."""

    def __getattr__(self, name: str) -> Callable[..., Markup]: ...


def macros(template: str) -> Macros:
    return cast(Macros, environment().get_template(template).module)


def plain(text: object) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))


def sentence(text: str) -> str:
    """Return a text as a sentence; nothing of nothing."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def code(text: str) -> Markup:
    """Return text with `commands` marked up."""
    pieces = str(escape(text)).split("`")
    return Markup("".join(f"<code>{piece}</code>" if n % 2 else piece for n, piece in enumerate(pieces)))


def looks_of(states: Iterable[str]) -> list[Look]:
    """Return the colours of states, in the order of a stack, each once."""
    found = set(states)
    return [look for state, look in STATES.items() if state in found]


def run_page(report: RunReport, broken: Sequence[Broken] = ()) -> str:
    """Return a run's report as HTML."""
    rows = [
        (f"{each.cause}{f' · rank {each.rank}' if each.rank else ''}", each.severity, each.episodes)
        for each in report.findings
    ]
    return _document(
        "report.html",
        report=report,
        broken=broken,
        looks=_visible(report),
        rank_rows=_rank_rows(report),
        ledger=ledger_plot(report),
        steps=step_plot(report),
        found=episodes(rows, report.started_s, report.until_s),
    )


def compare_page(comparison: Comparison) -> str:
    """Return a comparison as HTML: `a` on the left, `b` on the right, one below the other on a phone."""
    runs = comparison.a, comparison.b
    top_s = max(step_top_s(run.steps_over_time.p95_s, run.steps_over_time.data_wait_s) for run in runs)
    return _document(
        "compare.html",
        comparison=comparison,
        report=comparison.b,
        plots=[(run, ledger_plot(run), step_plot(run, top_s)) for run in runs],
        looks=_visible(*runs),
    )


def run_markdown(report: RunReport, broken: Sequence[Broken] = ()) -> str:
    """Return the report for a merge request or a terminal."""
    return environment().get_template("report.md").render(report=report, broken=broken)


def compare_markdown(comparison: Comparison) -> str:
    return environment().get_template("compare.md").render(comparison=comparison).rstrip() + "\n"


def _document(template: str, **values: Any) -> str:
    style = "".join((TEMPLATES / name).read_text() for name in ("parts.css", "report.css"))
    page = environment().get_template(template)
    return page.render(style=Markup(style), facts_of=_facts, **values)  # our own files, nothing of a run's


def _facts(found: Found) -> list[str]:
    rank = f", rank {found.rank}" if found.rank else ""
    return [f"{found.cause}{rank}", SEVERITIES[found.severity].name, f"active for {duration(found.active_s)}"]


def _visible(*runs: RunReport) -> list[Look]:
    return looks_of(state for run in runs for state, share in run.shares.items() if share >= VISIBLE)


def _rank_rows(report: RunReport) -> list[tuple[str, ...]]:
    rows = []
    for rank in report.ranks:
        whole = sum(rank.states.values()) or 1.0
        parts = (percent(rank.states.get(state, 0.0) / whole) for state in ("compute", "input_wait", "comm_wait"))
        rows.append((str(rank.rank), rank.host, rank.status, f"{rank.steps:,}", *parts))
    return rows


def ledger_plot(report: RunReport) -> Markup:
    over = report.over_time
    return stacked_shares(over.end_s, over.states, report.started_s, report.until_s)


def step_plot(report: RunReport, top_s: float = 0.0) -> Markup:
    steps = report.steps_over_time
    columns = (steps.time_s, steps.p05_s, steps.median_s, steps.p95_s, steps.data_wait_s)
    return step_band(*columns, report.started_s, report.until_s, top_s)


def stacked_shares(
    end_s: Sequence[float], states: Mapping[str, Sequence[float]], start_s: float, until_s: float
) -> Markup:
    """Return the share of each state over time, stacked to 100%, as steps: an interval's share is a mean. Empty without intervals."""
    if not end_s:
        return Markup()
    span_s = max(until_s - start_s, 1e-9)
    edges = [0.0, *(min(1000.0, (at - start_s) / span_s * 1000) for at in end_s)]
    floors = [0.0] * len(end_s)
    wholes = [sum(column[index] for column in states.values()) or 1.0 for index in range(len(end_s))]
    areas = []
    for state in (name for name in STATES if name in states):
        tops = [low + states[state][i] / wholes[i] * 1000 for i, low in enumerate(floors)]
        upper = [(edges[i + side], tops[i]) for i in range(len(tops)) for side in (0, 1)]
        lower = [(edges[i + side], floors[i]) for i in range(len(tops)) for side in (0, 1)]
        areas.append((STATES[state], _points(*zip(*upper, *reversed(lower), strict=True))))
        floors = tops
    return macros("plots.html").shares(areas, span_s)


def step_band(
    time_s: Sequence[float],
    low_s: Sequence[float],
    median_s: Sequence[float],
    high_s: Sequence[float],
    wait_s: Sequence[float],
    start_s: float,
    until_s: float,
    top_s: float = 0.0,
) -> Markup:
    """Return step time over time: a band from the 5th to the 95th percentile, the median, the mean wait for data. Empty without steps.

    `top_s` is what the scale must reach at least, so that two plots can have the same one. What is higher is cut off, with a note.
    """
    if not time_s:
        return Markup()
    span_s = max(until_s - start_s, 1e-9)
    top = _round_up(max(step_top_s(high_s, wait_s), top_s))
    highest = max(*high_s, *wait_s)
    above = f"higher here and there: up to {duration(highest)}" if highest > top else ""
    xs = [(at - start_s) / span_s * 1000 for at in time_s]
    band, middle, wait = (
        _points(x, [value / top * 1000 for value in values])
        for x, values in (((*xs, *reversed(xs)), (*high_s, *reversed(low_s))), (xs, median_s), (xs, wait_s))
    )
    return macros("plots.html").step_times(band, middle, wait, top, span_s, above)


def step_top_s(high_s: Sequence[float], wait_s: Sequence[float]) -> float:
    """Return what the scale of step times has to reach: their highest, unless one in twenty would flatten all the others."""
    values = sorted(max(pair) for pair in zip(high_s, wait_s, strict=True))
    if not values:
        return 0.0
    most = _ROOM_ABOVE * values[int(0.95 * (len(values) - 1))]
    return values[-1] if len(values) < _MANY or values[-1] <= _FLATTENED * most else most


def episodes(rows: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], start_s: float, end_s: float) -> Markup:
    """Return when each finding was active: rows of (label, severity, [(begin, end)]). Empty without rows."""
    span_s = max(end_s - start_s, 1e-9)
    lanes = [
        (label, SEVERITIES[severity].colour, [(begin - start_s, end - start_s) for begin, end in times])
        for label, severity, times in rows
    ]
    return macros("plots.html").episodes(lanes, span_s) if rows else Markup()


def _points(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Return an SVG shape's points; both are 0–1000, y upwards."""
    return " ".join(f"{x:.1f},{1000 - y:.1f}" for x, y in zip(xs, ys, strict=True))


def _round_up(value: float) -> float:
    """Return the next number of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten."""
    if value <= 0:
        return 1.0
    scale = float(10 ** floor(log10(value)))
    return next(
        (step * scale for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if value <= step * scale),
        ceil(value / scale) * scale,
    )
