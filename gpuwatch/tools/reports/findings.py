"""Every finding that a run has had, one entry a cause: what it said last, and when it was there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuwatch.api import Finding
from gpuwatch.diagnosis import finding
from gpuwatch.diagnosis.rules import RULES
from gpuwatch.tools.reports.model import Found

_ENDS_A_RUN = tuple(rule.cause for rule in RULES if rule.ends_run)
"""Causes that nothing is weighed against: they are found once, at the end."""


def merge(rows: Sequence[Finding]) -> tuple[Found, ...]:
    """Return the findings: what has ended the run, then roots by the time they cost, each followed by its consequences."""
    by_cause: dict[tuple[int, str, str], list[Finding]] = {}
    for row in sorted(rows, key=lambda row: row.since_s or 0.0):
        by_cause.setdefault((row.rank or 0, row.cause, row.gpu or ""), []).append(row)
    return ordered([_found(episodes) for episodes in by_cause.values()])


def ordered(found: Sequence[Found]) -> tuple[Found, ...]:
    """Return them in the order of a report. A consequence whose root was never there stands for itself."""
    weighed = sorted(
        found,
        key=lambda each: (
            each.cause not in _ENDS_A_RUN,
            each.severity == "info",
            -each.ratio * max(each.active_s, 1.0),
        ),
    )
    causes = {(each.rank, each.cause) for each in weighed}
    standing = [
        each if (each.rank, each.root) in causes else msgspec.structs.replace(each, root=None) for each in weighed
    ]
    result: list[Found] = []
    for root in [each for each in standing if each.root is None]:
        _with_consequences(root, standing, result)
    return (*result, *(each for each in standing if each not in result))


def _with_consequences(root: Found, found: Sequence[Found], result: list[Found]) -> None:
    result.append(root)
    for each in found:
        if each.root == root.cause and each.rank == root.rank and each not in result:
            _with_consequences(each, found, result)


def _found(rows: Sequence[Finding]) -> Found:
    last = {name: getattr(rows[-1], name) for name in finding.Finding.__struct_fields__}
    return Found(
        **last,
        episodes=tuple((row.since_s or 0.0, row.seen_s or 0.0) for row in rows),
        stacks=next((row.stacks for row in reversed(rows) if row.stacks is not None), None),
    )
