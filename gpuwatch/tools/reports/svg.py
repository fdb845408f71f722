"""Plots as inline SVG, made for any width: shapes stretch, text does not. Each returns a complete `<svg>` element.

The shapes lie in an inner `<svg>` that is stretched to the plot's area; texts are placed in per cent of the outer one, so that
they keep their size on a phone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

from gpuwatch.formatting import duration
from gpuwatch.tools.reports.looks import SEVERITIES, STATES

_BOTTOM = 22
"""Pixels below a plot for the times."""
_MANY, _FLATTENED, _ROOM_ABOVE = 20, 2.0, 1.25
"""`step_top_s`: from so many points on, a highest one of more than so many times what all but one in twenty stay below is cut off."""


def stacked_shares(
    end_s: Sequence[float], states: Mapping[str, Sequence[float]], start_s: float, until_s: float
) -> str:
    """Return the share of each state over time, stacked to 100%, as steps: an interval's share is a mean. Empty without intervals."""
    if not end_s:
        return ""
    span = max(until_s - start_s, 1e-9)
    edges = [0.0, *(min(1000.0, (at - start_s) / span * 1000) for at in end_s)]
    floors = [0.0] * len(end_s)
    wholes = [sum(column[index] for column in states.values()) or 1.0 for index in range(len(end_s))]
    shapes = []
    for state in (name for name in STATES if name in states):
        tops = [low + states[state][i] / wholes[i] * 1000 for i, low in enumerate(floors)]
        outline = [f"{edges[i + side]:.1f},{1000 - tops[i]:.1f}" for i in range(len(tops)) for side in (0, 1)]
        outline += [
            f"{edges[i + side]:.1f},{1000 - floors[i]:.1f}" for i in reversed(range(len(tops))) for side in (1, 0)
        ]
        word, colour = STATES[state]
        shapes.append(f'<polygon points="{" ".join(outline)}" fill="{colour}"><title>{escape(word)}</title></polygon>')
        floors = tops
    return _plot("".join(shapes), 180, [(0.0, "0%"), (0.5, "50%"), (1.0, "100%")], span, "share of time by state")


def step_band(
    time_s: Sequence[float],
    low_s: Sequence[float],
    median_s: Sequence[float],
    high_s: Sequence[float],
    wait_s: Sequence[float],
    start_s: float,
    until_s: float,
    top_s: float = 0.0,
) -> str:
    """Return step time over time: a band from the 5th to the 95th percentile, the median, the mean wait for data. Empty without steps.

    `top_s` is what the scale must reach at least, so that two plots can have the same one. What is higher is cut off, and said.
    """
    if not time_s:
        return ""
    span = max(until_s - start_s, 1e-9)
    top = _round_up(max(step_top_s(high_s, wait_s), top_s))
    highest = max(*high_s, *wait_s)
    above = f"higher here and there: up to {duration(highest)}" if highest > top else ""
    xs = [(at - start_s) / span * 1000 for at in time_s]

    def points(values: Sequence[float]) -> list[str]:
        return [f"{x:.1f},{1000 - value / top * 1000:.1f}" for x, value in zip(xs, values, strict=True)]

    band = [*points(high_s), *reversed(points(low_s))]
    shapes = (
        f'<polygon points="{" ".join(band)}" fill="#0072B2" fill-opacity="0.28"/>'
        f"{_line(points(median_s), '#0072B2')}{_line(points(wait_s), '#D55E00', '4 3')}"
    )
    ticks = [(0.0, "0"), (0.5, duration(top / 2)), (1.0, duration(top))]
    return _plot(shapes, 180, ticks, span, "step time, 5th to 95th percentile, median; wait for data", above)


def step_top_s(high_s: Sequence[float], wait_s: Sequence[float]) -> float:
    """Return what the scale of step times has to reach: their highest, unless one in twenty would flatten all the others."""
    values = sorted(max(pair) for pair in zip(high_s, wait_s, strict=True))
    if not values:
        return 0.0
    usual = _ROOM_ABOVE * values[int(0.95 * (len(values) - 1))]
    return values[-1] if len(values) < _MANY or values[-1] <= _FLATTENED * usual else usual


def episodes(rows: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], start_s: float, end_s: float) -> str:
    """Return when each finding was there: rows of (label, severity, [(begin, end)]). Empty without rows."""
    if not rows:
        return ""
    span = max(end_s - start_s, 1e-9)
    height = 34 * len(rows)
    parts = []
    for index, (label, severity, times) in enumerate(rows):
        y = 34 * index
        parts.append(f'<text x="0" y="{y + 12}" class="row">{escape(label)}</text>')
        parts.append(f'<rect x="0" y="{y + 17}" width="100%" height="9" class="lane"/>')
        for begin, end in times:
            left = max(0.0, (begin - start_s) / span) * 100
            width = max(0.4, min(1.0, (end - begin) / span) * 100)
            title = f"{duration(max(0.0, begin - start_s))} to {duration(max(0.0, end - start_s))}"
            parts.append(
                f'<rect x="{min(left, 99.6):.2f}%" y="{y + 17}" width="{width:.2f}%" height="9" fill="{SEVERITIES[severity]}">'
                f"<title>{title}</title></rect>"
            )
    times_text = _times(span, height + 16)
    return (
        f'<svg role="img" aria-label="findings over time" class="axis" height="{height + _BOTTOM}">'
        f"{''.join(parts)}{times_text}</svg>"
    )


def share_bar(shares: Mapping[str, float]) -> str:
    """Return the whole run as one bar."""
    left, parts = 0.0, []
    for state, (word, colour) in STATES.items():
        share = shares.get(state, 0.0) * 100
        if share > 0:
            title = f"{escape(word)} {share:.1f}%"
            parts.append(
                f'<rect x="{left:.3f}%" y="0" width="{share:.3f}%" height="26" fill="{colour}"><title>{title}</title></rect>'
            )
            left += share
    return f'<svg role="img" aria-label="where the time went" width="100%" height="26">{"".join(parts)}</svg>'


def _line(points: list[str], colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.8"{dashed} '
        'vector-effect="non-scaling-stroke"/>'
    )


def _plot(
    shapes: str, height: int, ticks: Sequence[tuple[float, str]], span_s: float, label: str, above: str = ""
) -> str:
    """Return shapes drawn on 1000 × 1000 in a plot with ticks (0 at the bottom, 1 on top) and elapsed times; `above`: what is cut off."""
    grid = "".join(
        f'<line x1="0" x2="100%" y1="{height * (1 - at):.1f}" y2="{height * (1 - at):.1f}" class="grid"/>'
        for at, _ in ticks
    )
    words = "".join(
        f'<text x="-6" y="{max(9.0, height * (1 - at) + 4):.1f}" text-anchor="end" class="tick">{escape(text)}</text>'
        for at, text in ticks
    )
    cut = f'<text x="100%" y="12" text-anchor="end" class="tick">{escape(above)}</text>' if above else ""
    return (
        f'<svg role="img" aria-label="{escape(label)}" class="axis" height="{height + _BOTTOM}">{grid}'
        f'<svg x="0" y="0" width="100%" height="{height}" viewBox="0 0 1000 1000" preserveAspectRatio="none">{shapes}</svg>'
        f"{words}{cut}{_times(span_s, height + 16)}</svg>"
    )


def _times(span_s: float, y: int) -> str:
    """Return elapsed times below a plot, three of them: they fit on a phone."""
    marks = ((0, "start", 0.0), (50, "middle", span_s / 2), (100, "end", span_s))
    return "".join(
        f'<text x="{x}%" y="{y}" text-anchor="{anchor}" class="tick">{"0" if not at else escape(duration(at))}</text>'
        for x, anchor, at in marks
    )


def _round_up(value: float) -> float:
    """Return the next number of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten."""
    if value <= 0:
        return 1.0
    scale = float(10 ** floor(log10(value)))
    return next(
        (step * scale for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if value <= step * scale),
        ceil(value / scale) * scale,
    )
