"""The result of a check, and the report of all of them: for a terminal, for a pipe and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

from gpuwatch import formatting

Status = Literal["ok", "warning", "problem", "skipped"]
_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "bold red"),
    "skipped": ("–", "dim"),
}
_ORDER: tuple[Status, ...] = ("problem", "warning", "ok", "skipped")


@dataclass(frozen=True)
class Outcome:
    status: Status
    found: str
    remedy: str | None = None
    """One line; None where there is nothing to do."""
    group: str = ""
    name: str = ""


ok, skipped = partial(Outcome, "ok"), partial(Outcome, "skipped")
warning, problem = partial(Outcome, "warning"), partial(Outcome, "problem")
"""Of `found` and `remedy`. A warning: it works less well than it could, or may soon fail. A problem: it does not work."""


def as_text(checks: Sequence[Outcome], title: str) -> str:
    """Return plain lines for a pipe: one per check, never wrapped, status first; remedies below, indented."""
    width = max(len(check.name) for check in checks)
    lines = [title]
    for group, members in groupby(checks, key=lambda check: check.group):
        lines += ["", group]
        for check in members:
            lines.append(f"{check.status:<8} {check.name:<{width}}  {check.found}")
            if check.remedy:
                lines.append(f"{'':<8} {'':<{width}}  -> {check.remedy}")
    return "\n".join([*lines, "", summary(checks)])


def show(checks: Sequence[Outcome], title: str, console: Any) -> None:
    """Print for a terminal: marks and colours, long lines wrapped in their column, lines that are ok cut."""
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
                table.add_row("", "", Text(f"→ {check.remedy}", quiet or "cyan"))
        console.print(table)
    console.print()
    worst = next(status for status in _ORDER if any(check.status == status for check in checks))
    console.print(Text(summary(checks), style=_MARKS[worst][1]))


def as_json(checks: Sequence[Outcome], version: str, host: str) -> str:
    return formatting.as_json({"version": version, "host": host, "counts": _counts(checks), "checks": checks})


def _counts(checks: Sequence[Outcome]) -> dict[Status, int]:
    return {status: sum(check.status == status for check in checks) for status in _ORDER}


def summary(checks: Sequence[Outcome]) -> str:
    """Return e.g. "problem: 1, warning: 0, ok: 20, skipped: 3"."""
    return ", ".join(f"{status}: {count}" for status, count in _counts(checks).items())
