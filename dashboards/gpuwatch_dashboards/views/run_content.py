"""What the page "Run" shows of one rank over a stretch of time: the same for all who look at it, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuwatch.api import Finding, Run, Series, Steps
from gpuwatch.errors import SourceError
from gpuwatch_dashboards import ranks
from gpuwatch_dashboards.buckets import merged, trace
from gpuwatch_dashboards.cards import Card, card
from gpuwatch_dashboards.heatmap import heat_card
from gpuwatch_dashboards.marks import epoch_marks, finding_marks, phase_marks
from gpuwatch_dashboards.model import Scope, Span
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.panels.steps import RANK_STEPS
from gpuwatch_dashboards.sources import Source
from gpuwatch_dashboards.step_rows import shown_one_by_one
from gpuwatch_dashboards.timeline import nothing_card, step_cards

FINE_BUCKETS = 6000
"""The heat map's cells; the timeline's buckets are made of them, so that the agent reads the steps once."""
RANK_BUCKETS, MOST_RANKS = 200, 16
WITHOUT_AGENT = ("step_time", "findings")
"""Panels that say from Prometheus alone what the agent's steps and findings would."""


@dataclass(frozen=True)
class Content:
    steps: Steps
    timeline: tuple[Card, ...]
    ledger: Card
    heat: Card | None
    """None where the steps are few enough to be shown one by one, or none are at hand."""
    ranks: Card | None
    """Step times of all ranks; None for a run of one."""
    table: str
    """HTML; empty for a run of one rank."""
    past: tuple[Finding, ...] | None
    """None: the agent that keeps them is away; the timeline then says so, and has what Prometheus knows."""


def content(source: Source, runs: Sequence[Run], run: Run, span: Span, stretch: tuple[float, float] | None) -> Content:
    """Return the content; `stretch` is the time that was chosen, None for the whole run. Raises SourceError."""
    steps, past, away = _kept(source, run, stretch)
    panel = BY_KEY["ledger"]
    scope = Scope(run.run, str(run.rank), run.instance)
    ledger = source.evaluate([curve.query for curve in panel.curves], scope, span)
    marks = [*epoch_marks(steps.epochs), *phase_marks(ledger[0]), *finding_marks(past)]
    timeline = step_cards(steps, span, marks) if steps.step else [nothing_card(away)]
    if away is not None:
        timeline += [_of_series(source, key, scope, span) for key in WITHOUT_AGENT]
    everyone = ranks.ranks_of(runs, run)
    several = len(everyone) > 1
    return Content(
        steps=steps,
        timeline=tuple(timeline),
        ledger=card(panel, ledger, span, 200, marks=marks, zoom=True),
        heat=None if away is not None or shown_one_by_one(steps) else heat_card(steps),
        ranks=_of_ranks(source, everyone, span, stretch) if several and away is None else None,
        table=ranks.rank_table(everyone) if several else "",
        past=tuple(past) if away is None else None,
    )


def _kept(source: Source, run: Run, stretch: tuple[float, float] | None) -> tuple[Steps, list[Finding], str | None]:
    """Return what only the agent of the run's node keeps; with Prometheus as source, why not, where it does not answer."""
    try:
        return source.steps(run, FINE_BUCKETS, *(stretch or (None, None))), source.past_findings(run), None
    except SourceError as error:
        if run.instance is None:
            raise
        what = f"{error.what[:1].upper()}{error.what[1:]}"
        return (
            Steps(),
            [],
            f"Single steps are kept by the node's own agent. {what}: {error.remedy}. The rest is Prometheus's.",
        )


def _of_series(source: Source, key: str, scope: Scope, span: Span) -> Card:
    panel = BY_KEY[key]
    return card(panel, source.evaluate([curve.query for curve in panel.curves], scope, span), span, 200, zoom=True)


def _of_ranks(source: Source, everyone: Sequence[Run], span: Span, stretch: tuple[float, float] | None) -> Card:
    lines = []
    for rank in everyone[:MOST_RANKS]:
        try:
            steps = merged(source.steps(rank, RANK_BUCKETS, *(stretch or (None, None))), RANK_BUCKETS)
        except SourceError:  # the agent of another node is away: the ranks of the others are compared
            continue
        columns = [steps.column(name) for name in ("data_wait_s", "transfer_s", "compute_s")]
        means = zip(*(column.mean for column in columns if column is not None), strict=True)
        whole = trace(steps, [sum(value or 0.0 for value in parts) for parts in means], "rank", str(rank.rank))
        lines.append(Series({"rank": str(rank.rank)}, whole.points))
    return card(RANK_STEPS, [lines], replace(span, points=RANK_BUCKETS), 200, zoom=True)
