"""What the page "Live" shows of a run, its node and its GPUs: the same for all who look at it, made once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuwatch.api import Finding, Run
from gpuwatch_dashboards import gpu_strip, markup
from gpuwatch_dashboards.cards import HEIGHT_PX, Card, card
from gpuwatch_dashboards.model import Node, Scope, Span
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.panels.gpu import GPU_PANELS
from gpuwatch_dashboards.run_strip import run_strip
from gpuwatch_dashboards.sources import Source

TOP_PANEL, TOP_HEIGHT_PX = "ledger", 300
SMALL_POINTS = 160
"""A small chart is some 400 px wide: more points than this fall on each other."""
RUN_ROW = ("step_time", "loader_workers", "throughput")
GPU_ROW = ("gpu_ledger", "gpu_utilization", "gpu_memory", "gpu_power")
NODE_ROW = ("cpu", "pressure", "shm", "network", "disk")


@dataclass(frozen=True)
class Charts:
    """What is drawn over a stretch of time. Those about a run are empty without one."""

    run: tuple[Card, ...]
    gpu: tuple[Card, ...]
    node: tuple[Card, ...]
    gpu_shares: Mapping[str, Mapping[str, float]]
    """Of each GPU's time by state, by UUID."""


@dataclass(frozen=True)
class Words:
    """What is said of now, as HTML."""

    findings: str
    runs: str
    """All runs that go on; empty where there is no other."""


def ledger(source: Source, run: Run, span: Span) -> Card:
    """Return where a run's time goes: the one chart that is drawn before all others. Raises SourceError."""
    return _cards(source, (TOP_PANEL,), Scope(run.run, str(run.rank), run.instance), span)[TOP_PANEL]


def charts(source: Source, run: Run | None, node: Node, span: Span, gpu: str | None) -> Charts:
    """Return the other charts of a stretch of time; `gpu` narrows the GPU panels to one. Raises SourceError."""
    of_run = RUN_ROW if run is not None else ()
    of_gpu = GPU_ROW if node.gpus else ()
    node_scope = Scope(instance=run.instance if run is not None else node.instance)
    scope = Scope(run.run, str(run.rank), run.instance) if run is not None else node_scope
    small = replace(span, points=min(span.points, SMALL_POINTS))
    cards = _cards(source, (*of_run, *NODE_ROW), scope, small)
    cards |= _cards(source, of_gpu, replace(node_scope, gpu=gpu), small)
    grown = source.growth(gpu_strip.LEDGER, node_scope, span) if node.gpus else []
    return Charts(
        run=tuple(cards[key] for key in of_run),
        gpu=tuple(cards[key] for key in of_gpu),
        node=tuple(cards[key] for key in NODE_ROW),
        gpu_shares=gpu_strip.shares_by_gpu(grown),
    )


def words(runs: Sequence[Run], run: Run | None, node: Node, now_s: float) -> Words:
    """Return what is said of now."""
    found = (*(run.findings if run is not None else ()), *_stragglers(runs, run), *node.findings)
    return Words(
        findings=markup.findings(found, now_s, run is None or run.status == "running"),
        runs=run_strip(runs, run) if run is not None else "",
    )


def _stragglers(runs: Sequence[Run], run: Run | None) -> Iterator[Finding]:
    """Yield what is found of the run's other ranks that this one waits for."""
    for other in runs:
        if run is not None and other.run == run.run and other.rank != run.rank:
            yield from (finding for finding in other.findings if finding.rank is not None)


def _cards(source: Source, keys: Sequence[str], scope: Scope, span: Span) -> dict[str, Card]:
    panels = [BY_KEY[key] for key in keys]
    answers = iter(source.evaluate([curve.query for panel in panels for curve in panel.curves], scope, span))
    return {
        panel.key: card(
            panel,
            [next(answers) for _ in panel.curves],
            span,
            TOP_HEIGHT_PX if panel.key == TOP_PANEL else HEIGHT_PX,
            zoom=panel.key == TOP_PANEL,
            empty="This GPU does not report it." if panel in GPU_PANELS else None,
        )
        for panel in panels
    }
