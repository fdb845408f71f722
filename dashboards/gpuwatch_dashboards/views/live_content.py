"""What the page "Live" shows of a run, its node and its GPUs: the same for all who look at it, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuwatch_dashboards import gpu_strip, markup
from gpuwatch_dashboards.cards import HEIGHT_PX, Card, card
from gpuwatch_dashboards.model import Node, Run, Scope, Span
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
class Content:
    """The page's parts, ready to draw. Those about a run are empty without one."""

    top: Card | None
    run: tuple[Card, ...]
    gpu: tuple[Card, ...]
    node: tuple[Card, ...]
    findings: str
    """HTML."""
    strip: str
    """HTML; empty without a GPU."""
    runs: str
    """HTML: all runs that go on; empty where there is no other."""


def content(source: Source, runs: Sequence[Run], run: Run | None, node: Node, span: Span, gpu: str | None) -> Content:
    """Return the content for a stretch of time; `gpu` narrows the GPU panels to one. Raises SourceError."""
    of_run = (TOP_PANEL, *RUN_ROW) if run is not None else ()
    of_gpu = GPU_ROW if node.gpus else ()
    node_scope = Scope(instance=run.instance if run is not None else node.instance)
    scope = Scope(run.run, str(run.rank), run.instance) if run is not None else node_scope
    gpu_scope = Scope(instance=scope.instance, gpu=gpu)
    small = replace(span, points=min(span.points, SMALL_POINTS))
    cards = _cards(source, of_run[:1], scope, span)
    cards |= _cards(source, (*of_run[1:], *NODE_ROW), scope, small) | _cards(source, of_gpu, gpu_scope, small)
    strip = ""
    if node.gpus:
        shares = gpu_strip.shares_by_gpu(source.growth(gpu_strip.LEDGER, node_scope, span))
        strip = gpu_strip.strip(node.gpus, shares, runs)
    found = (*(run.findings if run is not None else ()), *node.findings)
    return Content(
        top=cards.get(TOP_PANEL),
        run=tuple(cards[key] for key in RUN_ROW) if run is not None else (),
        gpu=tuple(cards[key] for key in of_gpu),
        node=tuple(cards[key] for key in NODE_ROW),
        findings=markup.findings(found, span.end_s, run is None or run.status == "running"),
        strip=strip,
        runs=run_strip(runs, run) if run is not None else "",
    )


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
