"""Reports and comparisons as HTML and Markdown, by the templates that the dashboards' pages use too.

A page is one file: no script, no network, light and dark, wide and narrow. Every text is escaped by the templates.
Plots are inline SVG for any width: shapes lie in an inner `<svg>` that is stretched to the plot's area, texts are
placed in per cent of the outer one, so that they keep their size on a phone.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import floor, log10
from pathlib import Path
from typing import Protocol, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from gpuwatch.diagnosis.rates import money
from gpuwatch.diagnosis.report import breakdown_text
from gpuwatch.formatting import duration, harmless, percent
from gpuwatch.ledger.states import shares
from gpuwatch.tools.reports import display
from gpuwatch.tools.reports.comparison import VISIBLE, Result
from gpuwatch.tools.reports.display import SEVERITIES, STATES, Look
from gpuwatch.tools.reports.model import Found, RunReport, StepsOverTime, when
from gpuwatch.tools.stacks.records import rows as stack_rows

TEMPLATES = Path(__file__).with_name("templates")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")
_DISPLAY = ("PHASES", "SEVERITIES", "STATES", "STATUS_SIGNS", "VERDICTS", "holder")


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
    of_display = (display.digits, display.display, display.energy)
    filters = (*of_display, breakdown_text, code, duration, money, percent, plain, sentence, shares, when)
    made.filters |= {each.__name__: each for each in filters}
    made.globals |= {name: getattr(display, name) for name in _DISPLAY}
    made.globals |= {"VISIBLE": VISIBLE, "stack_rows": stack_rows}
    return made


class Macros(Protocol):
    def __getattr__(self, name: str) -> Callable[..., Markup]: ...


def macros(template: str) -> Macros:
    return cast(Macros, environment().get_template(template).module)


def plain(text: object) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", harmless(" ".join(str(text).split())))


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def code(text: str) -> Markup:
    pieces = str(escape(text)).split("`")
    return Markup("".join(f"<code>{piece}</code>" if n % 2 else piece for n, piece in enumerate(pieces)))


def legend_of(states: Iterable[str]) -> list[Look]:
    """Return the colours of states, in the order of a stack, each once."""
    found = set(states)
    return [look for state, look in STATES.items() if state in found]


def as_html(found: Result, broken: Sequence[str] = ()) -> str:
    """Return a report, or a comparison: `a` on the left, `b` on the right, one below the other on a phone."""
    runs = (found,) if isinstance(found, RunReport) else found.runs
    top_s = max(_highest_s(run.steps_over_time) for run in runs)
    style = "".join((TEMPLATES / name).read_text("utf-8") for name in ("parts.css", "report.css"))
    return _template(found, "html").render(
        style=Markup(style),  # our own files, nothing of a run's
        facts_of=_facts,
        report=runs[-1],
        comparison=found,
        broken=broken,
        plots=[(run, ledger_plot(run), step_plot(run, top_s)) for run in runs],
        entries=legend_of(state for run in runs for state, share in run.shares.items() if share >= VISIBLE),
    )


def as_markdown(found: Result, broken: Sequence[str] = ()) -> str:
    return _template(found, "md").render(report=found, comparison=found, broken=broken).rstrip() + "\n"


def _template(found: Result, ending: str) -> Template:
    return environment().get_template(f"{'report' if isinstance(found, RunReport) else 'compare'}.{ending}")


def _facts(found: Found) -> list[str]:
    rank = f", rank {found.rank}" if found.rank else ""
    return [f"{found.cause}{rank}", SEVERITIES[found.severity].name, f"active for {duration(found.active_s)}"]


def ledger_plot(report: RunReport) -> Markup:
    """Return each state's share over time, stacked to 100%, as steps of interval means. Empty without intervals."""
    over = report.over_time
    if not over.end_s:
        return Markup()
    span_s = max(report.until_s - report.started_s, 1e-9)
    edges = [0.0, *(min(1000.0, (at - report.started_s) / span_s * 1000) for at in over.end_s)]
    floors = [0.0] * len(over.end_s)
    wholes = [sum(column[index] for column in over.states.values()) or 1.0 for index in range(len(floors))]
    areas = []
    for state in (name for name in STATES if name in over.states):
        tops = [low + over.states[state][i] / wholes[i] * 1000 for i, low in enumerate(floors)]
        upper = [(edges[i + side], tops[i]) for i in range(len(tops)) for side in (0, 1)]
        lower = [(edges[i + side], floors[i]) for i in range(len(tops)) for side in (0, 1)]
        areas.append((STATES[state], _points(*zip(*upper, *reversed(lower), strict=True))))
        floors = tops
    return macros("plots.html").shares(areas, span_s)


def step_plot(report: RunReport, least_top_s: float = 0.0) -> Markup:
    """Return step time over time: a band of the 5th to 95th percentile, the median, the mean wait. Empty without steps.

    Two plots with the same `least_top_s` can have the same scale.
    """
    steps = report.steps_over_time
    if not steps.time_s:
        return Markup()
    span_s = max(report.until_s - report.started_s, 1e-9)
    top_s = _round_up(max(_highest_s(steps), least_top_s))
    xs = [(at - report.started_s) / span_s * 1000 for at in steps.time_s]

    def line(xs: Sequence[float], values: Sequence[float]) -> str:
        return _points(xs, [value / top_s * 1000 for value in values])

    band = line((*xs, *reversed(xs)), (*steps.p95_s, *reversed(steps.p05_s)))
    middle, wait = line(xs, steps.median_s), line(xs, steps.data_wait_s)
    return macros("plots.html").step_times(band, middle, wait, top_s, span_s)


def _highest_s(steps: StepsOverTime) -> float:
    return max([0.0, *steps.p95_s, *steps.data_wait_s])


def _points(xs: Sequence[float], ys: Sequence[float]) -> str:
    return " ".join(f"{x:.1f},{1000 - y:.1f}" for x, y in zip(xs, ys, strict=True))


def _round_up(value: float) -> float:
    """Return the next number of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten."""
    if value <= 0:
        return 1.0
    scale = float(10 ** floor(log10(value)))
    return next(step * scale for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 20) if value <= step * scale)
