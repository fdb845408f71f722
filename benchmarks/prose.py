"""Wraps the prose of a Markdown page at 120 columns; tables, code and headings stay as they are."""

from __future__ import annotations

import re
from textwrap import fill

_WIDTH = 120
_KEPT = re.compile(r"\s*(\||#|<|>|!\[|    )")
_ITEM = re.compile(r"([-*]|\d+\.) ")


def wrapped(page: str) -> str:
    """Return the page with each paragraph and list item refilled. Code spans are not broken."""
    blocks = re.split(r"(?ms)(^```.*?^```$)", page)
    return "".join(block if at % 2 else _wrapped(block) for at, block in enumerate(blocks))


def _wrapped(text: str) -> str:
    lines: list[str] = []
    paragraph: list[str] = []

    def end() -> None:
        if paragraph:
            lines.append(_filled(" ".join(" ".join(paragraph).split())))
            paragraph.clear()

    for line in text.split("\n"):
        if not line.strip() or (_KEPT.match(line) and not paragraph) or re.match(r"\s*\|", line):
            end()
            lines.append(line)
        else:
            if _ITEM.match(line):
                end()
            paragraph.append(line)
    end()
    return "\n".join(lines)


def _filled(text: str) -> str:
    mark = _ITEM.match(text)
    whole = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    indent = " " * len(mark[0]) if mark else ""
    done = fill(whole, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return done.replace("\0", " ")
