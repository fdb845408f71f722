"""Checks as people and scripts read them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from gpuwatch.tools.doctor.outcome import Check, Status

if TYPE_CHECKING:
    from rich.console import Console

_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "bold red"),
    "skipped": ("–", "dim"),
}
_ORDER: tuple[Status, ...] = ("problem", "warning", "ok", "skipped")


def as_json(checks: Sequence[Check], version: str, host: str) -> str:
    """Return the document that docs/guides/doctor.md describes."""
    counts = Counter(check.status for check in checks)
    return json.dumps(
        {
            "version": version,
            "host": host,
            "counts": {status: counts[status] for status in _ORDER},
            "checks": [
                {
                    "group": check.group,
                    "name": check.name,
                    "status": check.status,
                    "found": check.found,
                    "remedy": check.remedy,
                }
                for check in checks
            ],
        },
        indent=2,
        ensure_ascii=False,
    )


def as_text(checks: Sequence[Check], title: str) -> str:
    """Return plain lines for a pipe: one a check, never wrapped, its status as a word first; remedies below, indented."""
    width = max(len(check.name) for check in checks)
    lines = [title]
    for group, members in groupby(checks, key=lambda check: check.group):
        lines += ["", group]
        for check in members:
            lines.append(f"{check.status:<8} {check.name:<{width}}  {check.found}")
            if check.remedy:
                lines.append(f"{'':<8} {'':<{width}}  -> {check.remedy}")
    return "\n".join([*lines, "", summary(checks)])


def show(checks: Sequence[Check], title: str, console: Console) -> None:
    """Print for a terminal: marks and colours, long lines wrapped in their column."""
    from rich.table import Table
    from rich.text import Text

    width = max(len(check.name) for check in checks)
    console.print(Text(title, style="bold"))
    for group, members in groupby(checks, key=lambda check: check.group):
        console.print()
        console.print(Text(group, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column(width=3, justify="right", no_wrap=True)
        table.add_column(width=width + 1, no_wrap=True)
        table.add_column()
        for check in members:
            mark, style = _MARKS[check.status]
            quiet = "dim" if check.status == "skipped" else ""
            cut = check.status == "ok"
            found = Text(check.found, quiet, no_wrap=cut, overflow="ellipsis" if cut else "fold")
            table.add_row(Text(mark, style), Text(check.name, quiet), found)
            if check.remedy:
                table.add_row("", "", Text(f"→ {check.remedy}", "dim" if quiet else "cyan"))
        console.print(table)
    console.print()
    worst = next(status for status in _ORDER if any(check.status == status for check in checks))
    console.print(Text(summary(checks), style=_MARKS[worst][1]))


def summary(checks: Sequence[Check]) -> str:
    """Return the counts in words: "1 problem (driver), 2 warnings (NTP, cores), 20 ok, 3 skipped"."""
    words = []
    for status in _ORDER:
        names = [check.name for check in checks if check.status == status]
        if status in ("problem", "warning"):
            which = f" ({', '.join(names)})" if names else ""
            words.append(f"{len(names) or 'no'} {status}{'' if len(names) == 1 else 's'}{which}")
        elif names:
            words.append(f"{len(names)} {status}")
    return ", ".join(words)
