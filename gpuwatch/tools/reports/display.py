"""How states, severities and numbers are shown, everywhere: reports, pages, Grafana and `gpuwatch top`.

Colours are Okabe and Ito's (distinct for colour-blind readers, on light and dark), with greys for what is not training.
States that mean trouble without a loader to blame also have a pattern, so that colour is never the only carrier.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuwatch.api import Gpu
from gpuwatch.formatting import percent
from gpuwatch.ledger.states import ENERGY_KINDS, WITHOUT_PROCESS, shares

BLUE, VERMILLION, ORANGE, GREEN = "#0072B2", "#D55E00", "#E69F00", "#009E73"
SKY, PINK, YELLOW = "#56B4E9", "#CC79A7", "#E3D02F"
GREY, LIGHT_GREY, SAND, WINE = "#8C8C8C", "#B5B5B5", "#A8946A", "#882255"

SEQUENCE = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILLION, GREY, SAND)  # if a colour has no meaning: of GPUs, mounts


@dataclass(frozen=True)
class Look:
    name: str
    colour: str
    pattern: str = ""  # hatched for a state that means trouble ("/" and "x" in opposite directions, "." as "/")

    @property
    def hatch(self) -> str:
        """Return the classes of parts.css that hatch an area so; empty without a pattern."""
        return {"": "", "x": "gw-hatch gw-back"}.get(self.pattern, "gw-hatch")


STATES: dict[str, Look] = {
    "compute": Look("computing", BLUE),
    "eval": Look("evaluation", GREEN),
    "checkpoint": Look("checkpoint", SKY),
    "compile": Look("compiling", SAND),
    "startup": Look("start-up", GREY),
    "transfer": Look("transfer", ORANGE),
    "input_wait": Look("waiting for data", VERMILLION),
    "host_wait": Look("waiting for the host", PINK),
    "comm_wait": Look("waiting for other ranks", YELLOW),
    "other": Look("other", LIGHT_GREY),
    "stalled": Look("stalled", WINE, "/"),
    "unknown": Look("unknown", LIGHT_GREY, "x"),
    "busy_unattributed": Look("busy, no hook", SKY, "."),
    "held_idle": Look("held idle", WINE, "x"),
    "allocated_unused": Look("allocated, unused", WINE, "."),
    "unallocated": Look("unallocated", GREY, "."),
    "free": Look("free", GREY, "/"),
}
"""Bottom of a stack first: what is useful lies on the axis, so that its upper edge is the number to raise."""

PHASES: dict[str, Look] = {
    "compute": STATES["compute"],
    "transfer": STATES["transfer"],
    "data_wait": Look("data wait", VERMILLION),
}

WAITS: dict[str, Look] = {
    "exposed": Look("wait for data, exposed: the device starved", VERMILLION),
    "hidden": Look("wait for data, hidden behind the device's work", "#F2B48C"),
}

PERCENTILES: dict[str, Look] = {"p50": Look("p50", GREEN), "p95": Look("p95", PINK)}
"""Lines over the phases: in colours that no phase has."""

KINDS: dict[str, Look] = {
    "useful": STATES["compute"],
    "rest": Look("anything else", LIGHT_GREY),
    "stalled": STATES["stalled"],
    "idle": STATES["held_idle"],
    "starved": STATES["input_wait"],
}
"""Kinds of GPU time, as recorded for a site; `rest` is what the others leave."""

LOOKS = {"state": STATES, "phase": PHASES, "wait": WAITS, "percentile": PERCENTILES, "kind": KINDS}
"""By the label that a panel groups by."""

VERDICTS: dict[str, Look] = {
    "input": STATES["input_wait"],
    "transfer": Look("copying to the device", ORANGE),
    "compute": STATES["compute"],
    "eval": STATES["eval"],
    "checkpoint": Look("checkpoints", SKY),
    "startup": STATES["startup"],
    "host": STATES["host_wait"],
    "comm": STATES["comm_wait"],
    "straggler": Look("the other ranks wait", VERMILLION),
    "stalled": Look("stalled", WINE),
    "other": Look("other", GREY),
    "unknown": Look("unknown", GREY),
}

SEVERITIES: dict[str, Look] = {
    "critical": Look("critical", WINE),
    "warning": Look("warning", VERMILLION),
    "info": Look("for information", BLUE),
}

STATUS_SIGNS = {"running": "●", "ended": "■", "lost": "✕", "gone": "○"}


@dataclass(frozen=True)
class Scale:
    """How an axis is labelled: value × factor, then the suffix."""

    factor: float
    suffix: str
    least: float = 0.0  # the least magnitude that it is meant for


@dataclass(frozen=True)
class Shown:
    """How values of a unit are shown, and which metrics have it."""

    scales: tuple[Scale, ...]  # the largest first
    grafana: str = "short"
    metric: str | None = None  # the unit of metrics (`gpuwatch/metrics.yml`) whose values are in this one
    rate_of: str | None = None  # the unit of metrics whose rates are in this one


_BYTES = tuple(Scale(1024.0**-n, f" {unit}", 1024.0**n) for n, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B")))
Unit = str
UNITS: dict[Unit, Shown] = {
    "1": Shown((Scale(1.0, ""),), metric="count"),
    "ratio": Shown((Scale(100.0, "%"),), "percentunit", metric="ratio", rate_of="seconds"),
    "s": Shown((Scale(1.0, " s", 1.0), Scale(1e3, " ms", 1e-3), Scale(1e6, " µs")), "s", metric="seconds"),
    "1/s": Shown((Scale(1.0, " /s"),), "ops", rate_of="count"),
    "bytes": Shown(_BYTES, "bytes", metric="bytes"),
    "bytes/s": Shown(tuple(replace(scale, suffix=f"{scale.suffix}/s") for scale in _BYTES), "binBps", rate_of="bytes"),
    "watts": Shown((Scale(1.0, " W"),), "watt", metric="watts", rate_of="joules"),
    "celsius": Shown((Scale(1.0, " °C"),), "celsius", metric="celsius"),
    "hertz": Shown((Scale(1e-9, " GHz", 1e9), Scale(1e-6, " MHz")), "hertz", metric="hertz"),
    "hours": Shown((Scale(1.0, " h"),), "h"),
    "money": Shown((Scale(1.0, ""),), "currency:USD"),
    "money/h": Shown((Scale(1.0, " /h"),), "currency:USD"),
    "up": Shown((Scale(1.0, ""),)),
}
"""Every unit of a panel. `money` is in the site's currency (`[prices]`); `up` is 1 or 0, shown as yes or no."""


def scale_for(unit: Unit, magnitude: float) -> Scale:
    """Return the scale in which a value of this magnitude is easy to read."""
    scales = UNITS[unit].scales
    if unit == "s" and magnitude == 0:
        return scales[0]
    return next((scale for scale in scales if abs(magnitude) >= scale.least), scales[-1])


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


def counted(count: int, what: str) -> str:
    """Return e.g. "1 step", "3,883 steps"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def holder(gpu: Gpu, run: str | None) -> str:
    """Return the run and the processes that hold a GPU, if known; "–" where it is not known that there is none."""
    known = " · ".join(part for part in (run, gpu.owner) if part)
    return known or ("no process" if gpu.state in WITHOUT_PROCESS else "–")


def energy(joules: Mapping[str, float]) -> str:
    """Return e.g. "3.10 kWh, 38% of it waiting for data": the energy by state or kind, and the most besides work."""
    whole = sum(joules.values())
    text = f"{digits(whole / 3.6e6)} kWh" if whole >= 3.6e5 else f"{digits(whole / 3600)} Wh"
    lost = [item for item in shares(joules).items() if item[0] not in ("working", *ENERGY_KINDS["working"])]
    named = ((STATES[each].name if each in STATES else each, share) for each, share in lost[:1] if share >= 0.01)
    return text + "".join(f", {percent(share)} of it {name}" for name, share in named)
