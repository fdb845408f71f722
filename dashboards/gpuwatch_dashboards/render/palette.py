"""Colours and words for states and phases: one table for Streamlit and Grafana.

Colours are Okabe and Ito's (distinct for colour-blind readers, on light and dark), with greys for what is not training.
States that mean trouble without a loader to blame also have a pattern, so that colour is never the only carrier.
"""

from __future__ import annotations

from dataclasses import dataclass

BLUE, VERMILLION, ORANGE, GREEN, SKY, PINK, YELLOW = (
    "#0072B2",
    "#D55E00",
    "#E69F00",
    "#009E73",
    "#56B4E9",
    "#CC79A7",
    "#E3D02F",
)
GREY, LIGHT_GREY, SAND, WINE = "#8C8C8C", "#B5B5B5", "#A8946A", "#882255"

SEQUENCE = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILLION, GREY, SAND)
"""For lines that have no meaning of their own (GPUs, mounts)."""


@dataclass(frozen=True)
class Look:
    name: str
    """For people."""
    colour: str
    pattern: str = ""
    """Of its area: hatched for a state that means trouble ("/" and "x" in opposite directions, "." as "/")."""

    @property
    def hatch(self) -> str:
        """Return the classes of style.css that hatch an area so; empty without a pattern."""
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
    "unallocated": Look("unallocated", GREY, "."),
}
"""Bottom of a stack first: what is useful lies on the axis, so that its upper edge is the number to raise."""

PHASES: dict[str, Look] = {
    "compute": STATES["compute"],
    "transfer": STATES["transfer"],
    "data_wait": Look("data wait", VERMILLION),
}
"""Phases of a step, bottom of a stack first."""

WAITS: dict[str, Look] = {
    "exposed": Look("wait for data, exposed: the device starved", VERMILLION),
    "hidden": Look("wait for data, hidden behind the device's work", "#F2B48C"),
}
"""The two parts of a data wait."""

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

LOOKS: dict[str, dict[str, Look]] = {
    "state": STATES,
    "phase": PHASES,
    "wait": WAITS,
    "percentile": PERCENTILES,
    "kind": KINDS,
}
"""By the label that a panel groups by."""

VERDICTS: dict[str, Look] = {
    "input": Look("waiting for data", VERMILLION),
    "transfer": Look("copying to the device", ORANGE),
    "compute": Look("computing", BLUE),
    "eval": Look("evaluation", GREEN),
    "checkpoint": Look("checkpoints", SKY),
    "startup": Look("start-up", GREY),
    "host": Look("waiting for the host", PINK),
    "stalled": Look("stalled", WINE),
    "other": Look("other", GREY),
    "unknown": Look("not known", GREY),
}

SEVERITIES: dict[str, Look] = {
    "critical": Look("critical", WINE),
    "warning": Look("warning", VERMILLION),
    "info": Look("for information", BLUE),
}
