"""A run's steps: what they consist of on host and device, a few of them one by one, and a map of the data wait."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from gpuwatch.api import Series, Spread, Steps
from gpuwatch.ledger.states import percentile
from gpuwatch.tools.reports.display import PHASES, STATES, WAITS, Look, counted, display, scale_for
from gpuwatch_dashboards.panels import Panel, panels
from gpuwatch_dashboards.query import Span
from gpuwatch_dashboards.render.cards import PAGES, Card, card, text_card
from gpuwatch_dashboards.render.charts import GRID, Mark, Option, line_series, time_axis, tooltip

HOST = ("compute_s", "transfer_s", "data_wait_s")
DEVICE = ("device_compute_s", "device_transfer_s", "host_wait_s", "input_wait_s")
"""Columns of phases and of states, bottom of a stack first."""
MOST_BUCKETS = 300
HEIGHT_PX = 200
MOST_STEPS = 300  # up to so many steps are drawn one by one
ROW_PX, GAP_PX = 46, 14
GAP_MS = 0.001  # after its end a piece is interrupted: at the same moment the tooltip would list it twice
ROWS = ("host", "device")
KINDS: dict[str, Look] = {**PHASES, **WAITS, "host_wait": STATES["host_wait"]}

HOST_STEPS, DEVICE_STEPS, WAITS_PANEL, LONGEST, RANK_STEPS = panels("steps")


def step_cards(steps: Steps, span: Span, marks: Sequence[Mark]) -> list[Card]:
    """Return the host's chart and, where it was measured, the device's; few steps are drawn one by one."""
    few = merged(steps, MOST_BUCKETS)

    def traces(label: str, names: Sequence[str]) -> list[Series]:
        known = [(name, column) for name in names if (column := few.columns.get(name))]
        return [trace(few, of.mean, label, name.removeprefix("device_").removesuffix("_s")) for name, of in known]

    host, device = traces("phase", HOST), traces("state", DEVICE)
    drawn: list[tuple[Panel, list[list[Series]]]] = [(HOST_STEPS, [host])]
    waited, felt = few.columns.get("data_wait_s"), few.columns.get("input_wait_s")
    if device and waited and felt:
        pairs = zip(waited.mean, felt.mean, strict=True)
        hidden = [None if a is None or b is None else max(0.0, a - b) for a, b in pairs]
        waits = [trace(few, felt.mean, "wait", "exposed"), trace(few, hidden, "wait", "hidden")]
        drawn += [(DEVICE_STEPS, [device]), (WAITS_PANEL, [waits])]
    one_by_one = shown_one_by_one(steps)
    if waited and not one_by_one:  # the longest of each interval, so that a spike among a thousand steps is seen
        drawn.append((LONGEST, [[trace(few, each, "", "")] for each in (waited.max, waited.mean)]))
    cards = [card(panel, traces, span, HEIGHT_PX, marks=marks, zoom=True) for panel, traces in drawn]
    return [step_rows(steps), *cards] if one_by_one else cards


def merged(steps: Steps, most: int) -> Steps:
    """Return times and columns in at most `most` buckets: means by their numbers of steps, the least, the greatest."""
    size = max(1, -(-len(steps.step) // most))
    groups = [slice(n, n + size) for n in range(0, len(steps.step), size)]
    return Steps(
        time_s=[steps.time_s[group][0] for group in groups],
        end_s=[steps.end_s[group][-1] for group in groups],
        columns={name: spread and _merged(spread, steps.count, groups) for name, spread in steps.columns.items()},
    )


def _merged(spread: Spread, counts: Sequence[int], groups: Sequence[slice]) -> Spread:
    mean: list[float | None] = []
    for group in groups:
        known = [(m, c) for m, c in zip(spread.mean[group], counts[group], strict=True) if m is not None]
        weight = sum(count for _, count in known)
        mean.append(sum(m * count for m, count in known) / weight if weight else None)
    least = [min((v for v in spread.min[group] if v is not None), default=None) for group in groups]
    most = [max((v for v in spread.max[group] if v is not None), default=None) for group in groups]
    return Spread(mean, least, most)


def trace(steps: Steps, values: Sequence[float | None], label: str, name: str) -> Series:
    """Return one line over the buckets' times; where the steps pause (an evaluation, a stall) it is interrupted."""
    points: list[tuple[float, float | None]] = []
    lengths = sorted(end - begin for begin, end in zip(steps.time_s, steps.end_s, strict=True))
    pause_s = max(2 * lengths[len(lengths) // 2], 1.0) if lengths else 1.0
    for n, (time_s, value) in enumerate(zip(steps.time_s, values, strict=True)):
        if n and time_s - steps.end_s[n - 1] > pause_s:
            points += [(steps.end_s[n - 1], values[n - 1]), ((steps.end_s[n - 1] + time_s) / 2, None)]
        points.append((time_s, value))
    if steps.time_s and steps.end_s[-1] > steps.time_s[-1]:
        points.append((steps.end_s[-1], values[-1]))
    return Series({label: name}, tuple(points))


def shown_one_by_one(steps: Steps) -> bool:
    return steps.bucket_steps == 1 and 0 < steps.steps <= MOST_STEPS


def pieces(steps: Steps) -> Iterator[tuple[int, str, float, float]]:
    """Yield what host and device did, by step: row, kind, begin and end in Unix seconds.

    The device's idle time ends when the batch is in hand; what it does after that, it does until it is idle again.
    Where it was measured the host's wait is split: first what the device's work hid, then what starved the device.
    """
    measured = steps.columns.get("input_wait_s") is not None
    for n, begin_s in enumerate(steps.time_s):
        of = {name.removesuffix("_s"): 0.0 if c is None else c.mean[n] or 0.0 for name, c in steps.columns.items()}
        in_hand_s = begin_s + of["data_wait"]
        copied_s = in_hand_s + of["transfer"]
        if measured:
            starved_s = in_hand_s - of["input_wait"]
            yield 0, "hidden", begin_s, starved_s
            yield 0, "exposed", starved_s, in_hand_s
            yield 1, "host_wait", starved_s - of["host_wait"], starved_s
            yield 1, "exposed", starved_s, in_hand_s
            received_s = in_hand_s + of["device_transfer"]
            yield 1, "transfer", in_hand_s, received_s
            yield 1, "compute", received_s, received_s + of["device_compute"]
        else:
            yield 0, "data_wait", begin_s, in_hand_s
        yield 0, "transfer", in_hand_s, copied_s
        yield 0, "compute", copied_s, copied_s + of["compute"]


def step_rows(steps: Steps) -> Card:
    """Return the rows as a card. Each kind of piece is one area of height 1, with gaps where it does something else."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for row, kind, begin_s, end_s in pieces(steps):
        if end_s > begin_s:
            found.setdefault((row, kind), []).append((begin_s, end_s))
    span = Span(steps.time_s[0], steps.end_s[-1])
    rows = sorted({row for row, _ in found})
    used = [kind for kind in KINDS if any(kind == each for _, each in found)]
    scale = scale_for("s", max((end_s - begin_s for of in found.values() for begin_s, end_s in of), default=1.0))
    series = [_area(n, kind, found[n, kind], scale.factor) for n in rows for kind in used if (n, kind) in found]
    label = {"hideOverlap": True, "alignMaxLabel": "right"}
    quiet = {"axisLabel": {"show": False}, "splitLine": {"show": False}}
    of_row = {"type": "value", "min": 0, "max": 1, "nameLocation": "middle", "nameGap": 14, "nameRotate": 0, **quiet}
    option: Option = {
        "tooltip": tooltip(scale),
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
        "grid": [{**GRID, "bottom": None, "top": 8 + n * (ROW_PX + GAP_PX), "height": ROW_PX} for n in rows],
        "xAxis": [{**time_axis(span), "gridIndex": n, "axisLabel": {**label, "show": n == rows[-1]}} for n in rows],
        "yAxis": [{**of_row, "gridIndex": n, "name": ROWS[n]} for n in rows],
        "series": series,
    }
    which = "this step" if steps.steps == 1 else f"each of these {steps.steps:,} steps"
    head = PAGES.panel_head("Step by step", f"What did {which} do, and when?", entries=[KINDS[kind] for kind in used])
    description = f"{counted(steps.steps, 'step')} one by one, a row each of " + " and ".join(ROWS[n] for n in rows)
    return Card("panel-bars", head, option, 36 + len(rows) * (ROW_PX + GAP_PX), description)


def _area(row: int, kind: str, found: Sequence[tuple[float, float]], factor: float) -> Option:
    look = KINDS[kind]
    data: list[list[float | None]] = []
    for begin_s, end_s in found:
        length = round((end_s - begin_s) * factor, 3)
        data += [[1e3 * begin_s, 1, length], [1e3 * end_s, 1, length], [1e3 * end_s + GAP_MS, None, length]]
    columns: Option = {"encode": {"x": 0, "y": 1, "tooltip": [2]}, "xAxisIndex": row, "yAxisIndex": row}
    area: Option = {"lineStyle": {"width": 0}, "areaStyle": {"opacity": 1}}
    return line_series(look.name, look.colour, data=data, **columns, **area)


HEAT_TITLE = "Data wait over the run"
HEAT_ROWS, HEAT_COLUMNS = 100, 120
HEAT_ROW_PX = 12
COVER = 98  # the colour is full at so many per cent of all cells: one pause at the start must not make all else pale
MEDIAN_SHADE = 3.0
"""And at no less than this many times the median wait, if any is as long: outliers stand out where others are alike."""
SHADES = ("rgba(213,94,0,0.05)", "rgba(213,94,0,0.35)", "rgba(213,94,0,1)")
"""From no wait to the longest; translucent, so that they are shades of the page's own background, light or dark."""


def heat_card(steps: Steps) -> Card:
    """Return the map as a card; its rows are epochs where there are two or more, else of a fixed number of steps."""
    waited = steps.columns.get("data_wait_s")
    if waited is None or len(steps.step) < 2 or all(wait is None for wait in waited.max):
        head = PAGES.panel_head(HEAT_TITLE, "When did steps wait for data?")
        return text_card("heat", head, "No steps of this run are stored for this time range.")
    starts = sorted({epoch.step for epoch in steps.epochs})
    by_epoch = len(starts) >= 2
    # a run that was resumed counts its steps from 0 again: those of one number share a cell
    first, last = min(steps.step), max(map(sum, zip(steps.step, steps.count, strict=True)))
    if by_epoch:
        edges = [*([first] if first < starts[0] else []), *starts]
    else:
        width = max(steps.bucket_steps, -(-(last - first) // min(HEAT_ROWS, max(1, len(steps.step) // 25))))
        edges = list(range(first, last, width))
    length = max(end - begin for begin, end in pairwise([*edges, last]))
    columns = max(1, min(HEAT_COLUMNS, length // steps.bucket_steps))
    together = -(-len(edges) // HEAT_ROWS)  # epochs in a row
    cells: dict[tuple[int, int], tuple[float, int]] = {}
    for step, count, wait in zip(steps.step, steps.count, waited.max, strict=True):
        # steps across two rows are shown in the later one: their longest is as good as always its first batch
        row = max(0, bisect_right(edges, step + count - 1) - 1)
        place = min(columns - 1, max(0, step - edges[row]) * columns // length), row // together
        if wait is not None and wait > cells.get(place, (-1.0, 0))[0]:
            cells[place] = wait, step
    known = sorted(wait for wait, _ in cells.values())
    most = full_colour_s(known)
    if not by_epoch:
        wrap, names = "All rows have the same number of steps", [f"{edge:,}" for edge in edges]
    elif steps.step[0] > 0 or [*steps.step] != sorted(steps.step):  # epochs before are not known, or begin again
        wrap, names = "Each row begins with an epoch", [f"step {edge:,}" for edge in edges[::together]]
    elif together == 1:
        wrap, names = "Each row is an epoch", [f"epoch {number + 1}" for number in range(len(edges))]
    else:
        rows = range(0, len(edges), together)
        wrap, names = "Each row is an epoch", [f"{n + 1}–{min(len(edges), n + together)}" for n in rows]
    head = PAGES.panel_head(
        HEAT_TITLE,
        f"{wrap}, from left to right; a cell is as dark as its longest wait. Full colour: {display(most, 's')} or more.",
    )
    description = f"{HEAT_TITLE}: {len(names)} rows; longest wait {display(known[-1], 's')}"
    titles = [f"+{column * max(1, length // columns):,}" for column in range(columns)]
    scale = scale_for("s", most)
    found = [[*place, round(wait * scale.factor, 3), step] for place, (wait, step) in cells.items()]
    label = {"show": True, "interval": "auto", "hideOverlap": True}
    text = f"step {{@[3]}}<br>longest data wait <b>{{@[2]}}{scale.suffix}</b>"
    shade = {"min": 0, "max": most * scale.factor, "inRange": {"color": list(SHADES)}}
    option: Option = {
        "grid": {**GRID, "left": 74},
        "tooltip": {"confine": True, "formatter": text, "transitionDuration": 0},
        "xAxis": {"type": "category", "data": titles, "axisLabel": label},
        "yAxis": {"type": "category", "data": names, "inverse": True, "axisLabel": label},
        "visualMap": {"show": False, "dimension": 2, **shade},
        "series": [{"type": "heatmap", "data": found, "emphasis": {"disabled": True}, "progressive": 0}],
    }
    return Card("panel-heat", head, option, max(110, min(440, len(names) * HEAT_ROW_PX + 40)), description)


def full_colour_s(known: list[float]) -> float:
    """Return the wait of full colour; `known` are those of all cells, the shortest first."""
    return max(percentile(known, COVER), min(known[-1], MEDIAN_SHADE * known[len(known) // 2])) or known[-1] or 1.0
