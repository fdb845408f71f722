"""Numbers for people: a value with its unit, and the scale of an axis."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwatch.formatting import percent
from gpuwatch_dashboards.panels.panel import Unit


@dataclass(frozen=True)
class Scale:
    """How an axis is labelled: value × factor, then the suffix."""

    factor: float
    suffix: str


_S = ((1.0, Scale(1.0, " s")), (1e-3, Scale(1e3, " ms")), (0.0, Scale(1e6, " µs")))
_BYTES = tuple((1024.0**n, Scale(1024.0**-n, f" {unit}")) for n, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")))
_BYTES_PER_S = tuple((least, Scale(scale.factor, f"{scale.suffix}/s")) for least, scale in _BYTES)

SCALES: dict[Unit, tuple[tuple[float, Scale], ...]] = {
    "s": _S,
    "ratio": ((0.0, Scale(100.0, "%")),),
    "bytes": (*_BYTES, (0.0, Scale(1.0, " B"))),
    "bytes/s": (*_BYTES_PER_S, (0.0, Scale(1.0, " B/s"))),
    "1/s": ((0.0, Scale(1.0, " /s")),),
    "watts": ((0.0, Scale(1.0, " W")),),
    "celsius": ((0.0, Scale(1.0, " °C")),),
    "hertz": ((1e9, Scale(1e-9, " GHz")), (0.0, Scale(1e-6, " MHz"))),
    "hours": ((0.0, Scale(1.0, " h")),),
    "money/h": ((0.0, Scale(1.0, " /h")),),
    **dict.fromkeys(("1", "money", "up"), ((0.0, Scale(1.0, "")),)),
}
"""By unit: the least magnitude that a scale is meant for, largest first."""


def scale_for(unit: Unit, magnitude: float) -> Scale:
    """Return the scale in which a value of this magnitude is easy to read."""
    scales = SCALES[unit]
    if unit == "s" and magnitude == 0:
        return scales[0][1]
    return next((scale for least, scale in scales if abs(magnitude) >= least), scales[-1][1])


def display(value: float | None, unit: Unit) -> str:
    """Return a value with its unit, three digits: "103 ms", "62%", "1.21 GiB/s"; "–" when it was not measured."""
    if value is None:
        return "–"
    if unit == "ratio":
        return percent(value)
    if unit == "up":
        return "yes" if value else "no"
    scale = scale_for(unit, value)
    return f"{digits(value * scale.factor)}{scale.suffix}"


def digits(value: float) -> str:
    """Return a number with three significant digits, more before the point."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
