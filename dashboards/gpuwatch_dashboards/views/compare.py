"""The page "Compare": two or more runs against the first of them, and whether what was predicted came true."""

from collections.abc import Sequence
from urllib.parse import quote, unquote

import streamlit as st

from gpuwatch.api import Run
from gpuwatch.formatting import duration
from gpuwatch.tools.reports.comparison import Comparison, compare
from gpuwatch.tools.reports.display import BLUE, GREY, ORANGE, SEQUENCE, Look, Scale, scale_for
from gpuwatch.tools.reports.model import RunReport
from gpuwatch.tools.reports.page import legend_of
from gpuwatch_dashboards.render.cards import PAGES, Card, text_card
from gpuwatch_dashboards.render.charts import GRID, Option, decal, line_series, reference, tooltip, value_axis
from gpuwatch_dashboards.selection import run_of
from gpuwatch_dashboards.views.site import Site, box, draw_cards, foot, label_of, remember

EVERY_S = 15.0
MOST_RUNS = 6
PARAM = "runs"
_CHOICE = "compared_runs"


def page(site: Site) -> None:
    lowest = {run.run: run for run in sorted(site.source.runs(kept=True), key=lambda run: -run.rank)}
    firsts = sorted(lowest.values(), key=lambda run: -run.started_s)
    if len(firsts) < 2:
        st.html(PAGES.too_few_to_compare(len(firsts)))
        return
    wanted = _choice(firsts)
    if len(wanted) < 2:
        st.html(PAGES.nothing("Choose a second run: the first one is what the others are compared with."))
        return
    reports = [site.source.report(run) for run in wanted]
    comparisons = [compare(reports[0], other) for other in reports[1:]]
    for number, found in enumerate(comparisons):
        box(f"outcome-{number}", PAGES.outcome(found))
    draw_cards("grid-two", (speeds_card(reports[0], comparisons), steps_card(reports)))
    box("shares", PAGES.shares(reports, legend_of(state for report in reports for state in report.shares)))
    st.html(foot(site))


def _choice(firsts: Sequence[Run]) -> list[Run]:
    """Draw the choice of runs; return those chosen, the one to compare with first."""
    by_key = {run.run: run for run in firsts}
    names = {run.run: label_of(run) for run in firsts}
    if _CHOICE not in st.session_state:
        asked = dict.fromkeys(run_of(firsts, unquote(name)) for name in st.query_params.get(PARAM, "").split(","))
        st.session_state[_CHOICE] = [*filter(None, asked)][:MOST_RUNS] or [run.run for run in firsts[1::-1]]
    known = [key for key in st.session_state[_CHOICE] if key in by_key]
    if known != st.session_state[_CHOICE]:
        st.session_state[_CHOICE] = known
    chosen = st.multiselect(
        "Runs to compare; the first is what the others are compared with",
        list(by_key),
        format_func=lambda key: names.get(key, key),
        key=_CHOICE,
        max_selections=MOST_RUNS,
        on_change=lambda: remember(**{PARAM: ",".join(map(quote, st.session_state[_CHOICE])) or None}),
    )
    return [by_key[key] for key in chosen]


ROW_PX = 46
_TIMES = Scale(1.0, "×")
_SINCE = (Scale(1 / 3600, " h", 7200), Scale(1 / 60, " min", 120), Scale(1.0, " s", float("-inf")))
_SPEEDS = "Predicted and achieved"
_STEPS = "Step time over the run"


def speeds_card(base: RunReport, found: Sequence[Comparison]) -> Card:
    """Return predicted and achieved throughput, in times that of the first run."""
    entries = [Look("predicted, at most", ORANGE, "/"), Look("achieved", BLUE)]
    question = f"How many times the throughput of {base.name}? Predicted is the gain of its first finding."
    head = PAGES.panel_head(_SPEEDS, question, entries=entries)
    if all(each.speedup is None for each in found):
        return text_card("speeds", head, "One of the runs has no steps to compare.")
    predicted = [None if each.prediction is None else round(each.prediction.predicted, 2) for each in found]
    achieved = [None if each.speedup is None else round(each.speedup, 2) for each in found]
    label = {"show": True, "position": "right", "formatter": "{c}×"}
    series = [
        {"type": "bar", "name": "predicted, at most", "data": predicted, "color": ORANGE, "itemStyle": decal("/"), "label": label},
        {"type": "bar", "name": "achieved", "data": achieved, "color": BLUE, "label": label, "markLine": reference("xAxis", [1.0], GREY)},
    ]  # fmt: skip
    names = [each.b.name for each in found]
    option: Option = {
        "grid": {**GRID, "left": 12, "right": 56, "outerBoundsMode": "same"},
        "tooltip": {**tooltip(_TIMES), "axisPointer": {"type": "shadow"}},
        "xAxis": value_axis(_TIMES, 1.1 * max(1.0, *(v for v in (*predicted, *achieved) if v is not None))),
        "yAxis": {"type": "category", "data": names, "inverse": True},
        "series": series,
    }
    values = "; ".join(
        f"{name}: predicted {p if p is not None else 'nothing'}, achieved {a if a is not None else 'not known'}"
        for name, p, a in zip(names, predicted, achieved, strict=True)
    )
    return Card("panel-speeds", head, option, 60 + ROW_PX * len(found), f"{_SPEEDS}, times {base.name}: {values}")


def steps_card(reports: Sequence[RunReport]) -> Card:
    """Return the median step time of each run over its own time."""
    looks = [Look(report.name, SEQUENCE[n % len(SEQUENCE)]) for n, report in enumerate(reports)]
    known = [(look, report) for look, report in zip(looks, reports, strict=True) if report.steps_over_time.time_s]
    notes = [f" {report.name}: {note}." for _, report in known if (note := report.plotted_steps)]
    question = f"Median of each group of steps, by the time since the run began.{''.join(notes)}"
    head = PAGES.panel_head(_STEPS, question, entries=[look for look, _ in known])
    if not known:
        return text_card("steps", head, "No steps of these runs are stored.")
    peak = max(max(report.steps_over_time.median_s) for _, report in known)
    longest_s = max(report.steps_over_time.time_s[-1] - report.started_s for _, report in known)
    scale, since = scale_for("s", peak), next(each for each in _SINCE if longest_s > each.least)
    series = []
    for look, report in known:
        points = [
            [round((at_s - report.started_s) * since.factor, 3), round(median_s * scale.factor, 3)]
            for at_s, median_s in zip(report.steps_over_time.time_s, report.steps_over_time.median_s, strict=True)
        ]
        series.append(line_series(look.name, look.colour, data=points))
    label = {"formatter": f"{{value}}{since.suffix}", "alignMaxLabel": "right"}
    option: Option = {
        "grid": GRID,
        "tooltip": tooltip(scale),
        "xAxis": {"type": "value", "min": 0, "axisLabel": label},
        "yAxis": value_axis(scale, 1.15 * peak),
        "series": series,
    }
    medians = ", ".join(f"{r.name} {duration(r.step_time.median_s)}" for _, r in known if r.step_time is not None)
    return Card("panel-steps", head, option, 200, f"{_STEPS}: medians {medians}")
