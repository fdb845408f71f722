"""Every finding that a run has had, one entry a cause: what it said last, and when it was there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuwatch.reports.model import EvidenceItem, Found
from gpuwatch.reports.source import Json
from gpuwatch.rules import ENDINGS
from gpuwatch.stacks.records import Stacks

_ENDS_A_RUN = tuple(rule.__name__ for rule in ENDINGS)
"""Causes that nothing is weighed against: they are found once, at the end."""


def merge(rows: Sequence[Json]) -> tuple[Found, ...]:
    """Return the findings: what has ended the run, then roots by the time they cost, each followed by its consequences."""
    by_cause: dict[tuple[int, str, str], list[Json]] = {}
    for row in sorted(rows, key=lambda row: row["since_s"]):
        by_cause.setdefault((row["rank"], row["cause"], row.get("gpu") or ""), []).append(row)
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


def _found(rows: Sequence[Json]) -> Found:
    last = rows[-1]
    gains = last.get("predicted_range")
    return Found(
        cause=last["cause"],
        severity=last["severity"],
        title=last["title"],
        ratio=last["ratio"],
        evidence=tuple(EvidenceItem(e["what"], e["value"], e["unit"], e["text"]) for e in last["evidence"]),
        advice=last["advice"],
        predicted_speedup=last["predicted_speedup"],
        root=last.get("root"),
        gpu=last.get("gpu"),
        rank=last["rank"],
        episodes=tuple((row["since_s"], row["seen_s"]) for row in rows),
        predicted_range=tuple(gains) if gains else None,
        stacks=next((msgspec.convert(row["stacks"], Stacks) for row in reversed(rows) if row.get("stacks")), None),
    )
