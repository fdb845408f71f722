"""How states, verdicts and severities look in a terminal: the palette's colours, and a glyph for each state.

A reader who sees no colour (NO_COLOR, a pipe, colour-blindness) tells states apart by glyph: solid is useful work, slanted strokes
are waiting, signs are trouble.
"""

from __future__ import annotations

from rich.color import Color
from rich.style import Style
from rich.text import Text

from gpuwatch_dashboards.palette import SEVERITIES, STATES, VERDICTS, Look

GLYPHS: dict[str, str] = {
    "compute": "█",
    "eval": "▓",
    "checkpoint": "▒",
    "compile": "=",
    "startup": "░",
    "transfer": "▞",
    "input_wait": "╱",
    "host_wait": "╲",
    "comm_wait": "╳",
    "other": "·",
    "stalled": "!",
    "unknown": "?",
    "busy_unattributed": "▐",
    "held_idle": "─",
    "unallocated": ":",
}
"""By state, one cell wide each."""
BLOCKS = "█▓▒░▞▐"
"""Glyphs that are drawn in the state's colour; the others are thin, and stand on a ground of it."""

DIM, BOLD, TITLE = Style(dim=True), Style(bold=True), Style(bold=True, underline=True)
KEY, SELECTED = Style(bold=True, reverse=True), Style(bold=True)
SEVERITY_SIGNS = {"critical": "‼", "warning": "!", "info": "i"}


def words(text: str, style: Style | str = "") -> Text:
    """Return text in a style that ends with it. (Text(text, style) would also style whatever is appended later.)"""
    return Text().append(text, style)


def state_look(state: str) -> Look:
    return STATES.get(state, Look(state.replace("_", " "), STATES["unknown"].colour))


def glyph(state: str) -> str:
    return GLYPHS.get(state, GLYPHS["unknown"])


def state_style(state: str) -> Style:
    """Return the style of a state's cells: blocks in its colour, other glyphs in black or white on it."""
    colour = state_look(state).colour
    if glyph(state) in BLOCKS:
        return Style(color=colour)
    return Style(color=_ink(colour), bgcolor=colour)


def verdict_style(state: str | None) -> Style:
    """Return the style of a verdict's sentence."""
    return _plate(VERDICTS.get(state or "unknown", VERDICTS["unknown"]))


def severity_style(severity: str) -> Style:
    return _plate(SEVERITIES.get(severity, SEVERITIES["info"]))


def _plate(look: Look) -> Style:
    """Return a style for words: black or white on the colour, which is readable on light and on dark terminals alike."""
    return Style(color=_ink(look.colour), bgcolor=look.colour, bold=True)


def _ink(colour: str) -> str:
    red, green, blue = Color.parse(colour).get_truecolor()
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
