"""What the page "Compare" shows: outcome and prediction in words, speeds, step times and shares. `gpuwatch.tools.reports` decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gpuwatch.api import Run
from gpuwatch.formatting import duration
from gpuwatch.tools.reports import Comparison, RunReport, compare
from gpuwatch.tools.reports.compared_words import compared_rows, loader_rows, outcome_sentences
from gpuwatch.tools.reports.display import BLUE, GREEN, GREY, ORANGE, SEQUENCE, VERMILLION, Look, Scale, scale_for
from gpuwatch.tools.reports.words import headline, plotted_steps
from gpuwatch_dashboards.render import markup
from gpuwatch_dashboards.render.cards import Card, text_card
from gpuwatch_dashboards.render.gpu_strip import share_bar
from gpuwatch_dashboards.render.option import GRID, Option, decal, tooltip, value_axis

ROW_PX = 46
_TIMES = Scale(1.0, "×")
_SPEEDS = "Predicted and achieved"
_STEPS = "Step time over the run"


@dataclass(frozen=True)
class Outcome:
    number: int
    html: str


@dataclass(frozen=True)
class Content:
    outcomes: tuple[Outcome, ...]
    speeds: Card
    steps: Card
    shares: str
    """HTML."""


def first_ranks(runs: Sequence[Run]) -> list[Run]:
    """Return one entry a run, the latest started first."""
    firsts: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.rank):
        firsts.setdefault(run.run, run)
    return sorted(firsts.values(), key=lambda run: -run.started_s)


def newest_two(firsts: Sequence[Run]) -> list[Run]:
    """Return the two runs that were started last, the earlier one first: what a change is compared with."""
    return list(reversed(firsts[:2]))


def label_of(run: Run) -> str:
    sign, length = markup.STATUS_SIGNS[run.status], duration(round(run.watermark_s - run.started_s))
    return f"{run.name or run.run} · {sign} {run.status} · {length} · {run.steps:,} steps"


def content(base: RunReport, others: Sequence[RunReport]) -> Content:
    """Return the page's parts."""
    comparisons = [compare(base, other) for other in others]
    return Content(
        outcomes=tuple(Outcome(number, _outcome(found)) for number, found in enumerate(comparisons)),
        speeds=_speeds(base, comparisons),
        steps=_steps((base, *others)),
        shares=_shares((base, *others)),
    )


def _outcome(found: Comparison) -> str:
    first, *rest = outcome_sentences(found)
    colour = GREY
    if found.speedup is not None and found.speedup_interval is not None:
        low, high = found.speedup_interval
        colour = GREEN if low > 1 else VERMILLION if high < 1 else GREY
    settings = loader_rows(found)
    parts = [
        f'<section class="gw-outcome" style="--gw:{colour}" data-run="{escape(found.b.run)}">'
        f'<p class="gw-run">{escape(found.a.name)} → <strong>{escape(found.b.name)}</strong></p>'
        f'<h1 class="gw-sentence">{escape(first)}</h1>',
        *(f'<p class="gw-promise">{escape(sentence)}</p>' for sentence in rest),
        '<div class="gw-side">',
        _table(("", found.a.name, found.b.name, "change"), compared_rows(found)),
        _table(("set differently", found.a.name, found.b.name), settings) if settings else "",
        "</div></section>",
    ]
    return "".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f'<th scope="col">{escape(text)}</th>' if text else "<td></td>" for text in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(text)}</td>" for text in row[1:])}</tr>'
        for row in rows
    )
    return f'<table class="gw-table"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def _speeds(base: RunReport, found: Sequence[Comparison]) -> Card:
    """Return predicted beside achieved throughput, in times that of the first run."""
    head = markup.looks_head(
        _SPEEDS,
        f"How many times the throughput of {base.name}? Predicted is what its first finding promised.",
        [Look("predicted, at most", ORANGE, "/"), Look("achieved", BLUE)],
    )
    if all(each.speedup is None for each in found):
        return text_card("speeds", head, "One of the runs has no steps to compare.")
    predicted = [None if each.prediction is None else round(each.prediction.predicted, 2) for each in found]
    achieved = [None if each.speedup is None else round(each.speedup, 2) for each in found]
    label = {"show": True, "position": "right", "formatter": "{c}×"}
    series = [
        {"type": "bar", "name": "predicted, at most", "data": predicted, "color": ORANGE, "itemStyle": decal("/"), "label": label},
        {"type": "bar", "name": "achieved", "data": achieved, "color": BLUE, "label": label, "markLine": _unchanged()},
    ]  # fmt: skip
    names = [each.b.name for each in found]
    option: Option = {
        "animation": False,
        "grid": {**GRID, "left": 12, "right": 56, "outerBoundsMode": "same"},
        "tooltip": {**tooltip(_TIMES), "axisPointer": {"type": "shadow"}},
        "xAxis": value_axis(_TIMES, 1.1 * max(1.0, *(v for v in (*predicted, *achieved) if v is not None))),
        "yAxis": {"type": "category", "data": names, "inverse": True},
        "series": series,
    }
    words = "; ".join(
        f"{name}: predicted {p if p is not None else 'nothing'}, achieved {a if a is not None else 'not known'}"
        for name, p, a in zip(names, predicted, achieved, strict=True)
    )
    return Card("panel-speeds", head, option, 60 + ROW_PX * len(found), f"{_SPEEDS}, times {base.name}: {words}")


def _unchanged() -> Option:
    return {
        "symbol": "none",
        "silent": True,
        "label": {"show": False},
        "lineStyle": {"color": GREY, "type": "dashed"},
        "data": [{"xAxis": 1}],
    }


def _steps(reports: Sequence[RunReport]) -> Card:
    """Return the median step time of each run over its own time."""
    known = [(n, report) for n, report in enumerate(reports) if report.steps_over_time.time_s]
    looks = [Look(report.name, SEQUENCE[n % len(SEQUENCE)]) for n, report in known]
    notes = [f" {report.name}: {note}." for _, report in known if (note := plotted_steps(report))]
    question = f"Median of each group of steps, by the time since the run began.{''.join(notes)}"
    head = markup.looks_head(_STEPS, question, looks)
    if not known:
        return text_card("steps", head, "None of these runs has steps that are kept.")
    peak = max(max(report.steps_over_time.median_s) for _, report in known)
    scale, since = scale_for("s", peak), _since(max(r.steps_over_time.time_s[-1] - r.started_s for _, r in known))
    series = [
        {
            "type": "line",
            "name": report.name,
            "data": [
                [round((time_s - report.started_s) * since.factor, 3), round(median_s * scale.factor, 3)]
                for time_s, median_s in zip(report.steps_over_time.time_s, report.steps_over_time.median_s, strict=True)
            ],
            "symbol": "none",
            "color": SEQUENCE[n % len(SEQUENCE)],
            "emphasis": {"disabled": True},
        }
        for n, report in known
    ]
    option: Option = {
        "animation": False,
        "grid": GRID,
        "tooltip": tooltip(scale),
        "xAxis": {
            "type": "value",
            "min": 0,
            "axisLabel": {"formatter": f"{{value}}{since.suffix}", "alignMaxLabel": "right"},
        },
        "yAxis": value_axis(scale, 1.15 * peak),
        "series": series,
    }
    medians = ", ".join(f"{r.name} {duration(r.step_time.median_s)}" for _, r in known if r.step_time is not None)
    return Card("panel-steps", head, option, 200, f"{_STEPS}: medians {medians}")


def _since(longest_s: float) -> Scale:
    return Scale(1 / 3600, " h") if longest_s > 7200 else Scale(1 / 60, " min") if longest_s > 120 else Scale(1.0, " s")


def _shares(reports: Sequence[RunReport]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(headline(report))}</th><td data-label="Time">{share_bar(report.shares)}</td></tr>'
        for report in reports
    )
    head = markup.panel_head("Where the time went", "The whole of each run, all its ranks together.")
    return f'{head}{markup.state_key([state for report in reports for state in report.shares])}<table class="gw-gpus">{rows}</table>'
