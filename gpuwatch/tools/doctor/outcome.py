"""The result of a check, and the report of all of them: for a terminal, for a pipe and as JSON."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import typer

from gpuwatch import formatting

Status = Literal["ok", "warning", "problem", "skipped"]
_STYLES: dict[Status, dict[str, Any]] = {
    "problem": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "ok": {"fg": "green"},
    "skipped": {"dim": True},
}


@dataclass(frozen=True)
class Outcome:
    status: Status
    found: str
    remedy: str | None = None  # one line; None where there is nothing to do
    group: str = ""
    name: str = ""


ok, skipped = partial(Outcome, "ok"), partial(Outcome, "skipped")
warning, problem = partial(Outcome, "warning"), partial(Outcome, "problem")
"""Of `found` and `remedy`. A warning: it works less well than it could, or may soon fail. A problem: it does not work."""


def as_text(checks: Sequence[Outcome], title: str, columns: int | None = None) -> str:
    """Return one line per check, never wrapped, status first, its remedy below; for a terminal wrapped to `columns`, in colour."""
    width = max(len(check.name) for check in checks)
    lines = [title]
    for group, members in groupby(checks, key=lambda check: check.group):
        lines += ["", group]
        for check in members:
            texts = [f"{check.status:<8} {check.name:<{width}}  {check.found}"]
            texts += [f"{'':<8} {'':<{width}}  -> {check.remedy}"] if check.remedy else []
            if columns is not None:
                indent = " " * (width + 11)
                texts = [line for text in texts for line in textwrap.wrap(text, columns, subsequent_indent=indent)]
                texts[0] = typer.style(check.status, **_STYLES[check.status]) + texts[0].removeprefix(check.status)
            lines += texts
    summary = ", ".join(f"{status}: {count}" for status, count in _counts(checks).items())
    return "\n".join([*lines, "", summary])


def as_json(checks: Sequence[Outcome], version: str, host: str) -> str:
    return formatting.as_json({"version": version, "host": host, "counts": _counts(checks), "checks": checks})


def _counts(checks: Sequence[Outcome]) -> dict[Status, int]:
    return {status: sum(check.status == status for check in checks) for status in _STYLES}
