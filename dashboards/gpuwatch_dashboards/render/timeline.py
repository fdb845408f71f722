"""The timeline of a run's steps over a long time: what a step is made of on the host and on the device, and what stands out."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.api import Series, Steps
from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.panels import Panel
from gpuwatch_dashboards.panels.run import DEVICE_STEPS, HOST_STEPS, LONGEST, WAITS
from gpuwatch_dashboards.render import markup
from gpuwatch_dashboards.render.buckets import DEVICE, HOST, hidden, merged, trace
from gpuwatch_dashboards.render.cards import Card, card, text_card
from gpuwatch_dashboards.render.marks import Mark
from gpuwatch_dashboards.render.step_rows import shown_one_by_one, step_rows

MOST_BUCKETS = 300
HEIGHT_PX = 200


def step_cards(steps: Steps, span: Span, marks: Sequence[Mark]) -> list[Card]:
    """Return the host's chart and, where it was measured, the device's; few steps are drawn one by one."""
    few = merged(steps, MOST_BUCKETS)
    host = [trace(few, of.mean, "phase", name[:-2]) for name in HOST if (of := few.column(name)) is not None]
    one_by_one = [step_rows(steps)] if shown_one_by_one(steps) else []
    return [
        *one_by_one,
        _card(HOST_STEPS, [host], span, marks),
        *_device(few, span, marks),
        *([] if one_by_one else [_longest(few, span, marks)]),
    ]


def nothing_card(why: str | None = None) -> Card:
    head = markup.panel_head(HOST_STEPS.title, HOST_STEPS.question)
    usual = "No step of this run is kept for this time. Steps are kept for seven days."
    return text_card(HOST_STEPS.key, head, why or usual)


def _device(steps: Steps, span: Span, marks: Sequence[Mark]) -> list[Card]:
    device = [trace(steps, column.mean, "state", _state(name)) for name in DEVICE if (column := steps.column(name))]
    out_of_sight = hidden(steps)
    felt = steps.column("input_wait_s")
    if not device or felt is None or out_of_sight is None:
        return []
    waits = [trace(steps, felt.mean, "wait", "exposed"), trace(steps, out_of_sight, "wait", "hidden")]
    return [_card(DEVICE_STEPS, [device], span, marks), _card(WAITS, [waits], span, marks)]


def _state(column: str) -> str:
    return column.removesuffix("_s").removeprefix("device_")


def _longest(steps: Steps, span: Span, marks: Sequence[Mark]) -> Card:
    """Return the longest and the mean wait of each interval, so that a spike among a thousand steps is seen."""
    waited = steps.column("data_wait_s")
    lines = [] if waited is None else [[trace(steps, values, "", "")] for values in (waited.max, waited.mean)]
    return _card(LONGEST, lines or [[], []], span, marks)


def _card(panel: Panel, traces: Sequence[Sequence[Series]], span: Span, marks: Sequence[Mark]) -> Card:
    return card(panel, traces, span, HEIGHT_PX, marks=marks, zoom=True)
