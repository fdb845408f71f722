"""Words and colours of states, as on the live page (a test compares them)."""

from __future__ import annotations

STATES: dict[str, tuple[str, str]] = {
    "compute": ("computing", "#0072B2"),
    "eval": ("evaluation", "#009E73"),
    "checkpoint": ("checkpoint", "#56B4E9"),
    "compile": ("compiling", "#A8946A"),
    "startup": ("start-up", "#8C8C8C"),
    "transfer": ("transfer", "#E69F00"),
    "input_wait": ("waiting for data", "#D55E00"),
    "host_wait": ("waiting for the host", "#CC79A7"),
    "comm_wait": ("waiting for other ranks", "#E3D02F"),
    "other": ("other", "#B5B5B5"),
    "stalled": ("stalled", "#882255"),
    "unknown": ("unknown", "#B5B5B5"),
}
"""What is useful first: it lies at the bottom of a stack."""

SEVERITIES: dict[str, str] = {"critical": "#882255", "warning": "#D55E00", "info": "#0072B2"}
