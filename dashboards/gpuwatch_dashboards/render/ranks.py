"""The ranks of a run beside each other: which one do the others wait for?"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gpuwatch.api import Finding, Run
from gpuwatch.ledger.states import shares
from gpuwatch.tools.reports.display import digits, display
from gpuwatch_dashboards.render.gpu_strip import share_bar
from gpuwatch_dashboards.render.markup import STATUS_SIGNS

COLUMNS = ("Rank", "Where", "Step p50", "Step p95", "Data wait", "Its time", "Steps")
SLOW = 1.1
"""A rank whose usual step takes so many times the quickest rank's is marked."""


def ranks_of(runs: Sequence[Run], run: Run) -> list[Run]:
    """Return all ranks of a run that are known, in order."""
    return sorted((each for each in runs if each.run == run.run), key=lambda each: each.rank)


def rank_table(ranks: Sequence[Run]) -> str:
    """Return the comparison as an HTML table, everything escaped."""
    quickest = min((r.recent.step_s_p50 for r in ranks if r.recent and r.recent.step_s_p50), default=None)
    head = "".join(f'<th scope="col">{text}</th>' for text in COLUMNS)
    rows = "".join(_row(rank, quickest) for rank in ranks)
    return f'<table class="gw-gpus"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _row(rank: Run, quickest: float | None) -> str:
    recent = rank.recent
    p50 = recent.step_s_p50 if recent else None
    slow = p50 is not None and quickest is not None and p50 > SLOW * quickest
    said = display(p50, "s") + (
        f" <strong>{digits((p50 or 0.0) / (quickest or 1.0))}× the quickest</strong>" if slow else ""
    )
    cells = (
        ("Where", f"{STATUS_SIGNS[rank.status]} {escape(rank.host)}"),
        ("Step p50", said),
        ("Step p95", display(recent.step_s_p95 if recent else None, "s")),
        ("Data wait", display(recent.data_wait_s_p50 if recent else None, "s")),
        ("Its time", share_bar(shares(recent.states if recent and recent.states else rank.states))),
        ("Steps", f"{rank.steps:,}"),
    )
    return (
        f'<tr data-rank="{rank.rank}"{" data-slow=true" if slow else ""}><th scope="row">{rank.rank}</th>'
        f"{''.join(f'<td data-label={chr(34)}{label}{chr(34)}>{cell}</td>' for label, cell in cells)}</tr>"
    )


def findings_of(runs: Sequence[Run], run: Run | None) -> list[Finding]:
    """Return a rank's findings, then those of the run's other ranks that this one waits for."""
    if run is None:
        return []
    others = [other for other in runs if other.run == run.run and other.rank != run.rank]
    return [*run.findings, *(found for other in others for found in other.findings if found.rank is not None)]
