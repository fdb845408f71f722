"""Lines of text of an exact width. What other processes said (names, evidence, advice) cannot control the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gpuwatch_dashboards.terminal.looks import DIM, words

_WRAPPER = Console(width=80, color_system=None, force_terminal=False, legacy_windows=False)
"""Only what Rich's wrapping asks for; nothing is ever printed to it."""


def harmless(text: str) -> str:
    """Return text of the same length, each character that could act on a terminal (escape, bidi, newline) as "·"."""
    if text.isascii() and text.isprintable():
        return text
    return "".join("·" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def finish(line: Text, width: int) -> Text:
    """Return the line harmless and exactly `width` cells wide: cut with "…" or filled with spaces."""
    done = line.copy()
    safe = harmless(done.plain)
    if safe != done.plain:
        done = Text(safe, style=line.style, spans=line.spans)
    done.truncate(width, overflow="ellipsis", pad=True)
    return done


def cell(text: str, width: int, right: bool = False) -> str:
    """Return a table cell: the text cut with "…" or filled to `width` cells."""
    text = harmless(text)
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def wrapped(text: str, width: int, style: Style | str = "", indent: int = 0) -> list[Text]:
    """Return a paragraph in lines of at most `width` cells, all indented by `indent`; a newline is a space."""
    body = words(harmless(" ".join(text.split())), style)
    found = body.wrap(_WRAPPER, max(8, width - indent))
    for line in found:
        line.rstrip()
        line.pad_left(indent)
    return list(found)


def flowed(pieces: Iterable[Text], width: int, indent: int = 1, gap: str = "  ") -> list[Text]:
    """Return pieces side by side, as many a line as fit; a piece is never broken."""
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + len(gap) + piece.cell_len <= width:
            lines[-1].append(gap)
        else:
            lines.append(Text(" " * indent))
        lines[-1].append_text(piece)
    return lines


def rule(title: Text | str, width: int) -> Text:
    """Return a section's head: its title, and a line to the right edge."""
    line = Text("── ", style="")
    line.stylize(DIM)
    line.append_text(Text(title, style="bold") if isinstance(title, str) else title)
    line.append(" ")
    line.append("─" * max(0, width - line.cell_len), DIM)
    return line
