"""What a check says, before and after it is given its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What one look has found. Made by `ok`, `warning`, `problem` and `skipped`."""

    status: Status
    found: str
    """What is, in one line."""
    remedy: str | None = None
    """What to do about it, in one line; None where there is nothing to do."""


@dataclass(frozen=True)
class Check:
    """The outcome of a check of the registry."""

    group: str
    name: str
    status: Status
    found: str
    remedy: str | None


def ok(found: str) -> Outcome:
    """Return that all is well."""
    return Outcome("ok", found)


def warning(found: str, remedy: str) -> Outcome:
    """Return that something works less well than it could, or will not for long."""
    return Outcome("warning", found, remedy)


def problem(found: str, remedy: str) -> Outcome:
    """Return that something does not work."""
    return Outcome("problem", found, remedy)


def skipped(found: str, remedy: str | None = None) -> Outcome:
    """Return that there is nothing to check here, and why; `remedy` is what would make it checkable."""
    return Outcome("skipped", found, remedy)
