"""What a page asks for and what it gets beside the answers of gpuwatch.api: a node, a counter's growth, whose numbers, when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuwatch.api import Collector, Finding, Gpu


@dataclass(frozen=True)
class Node:
    """The node that a run is on."""

    host: str
    collectors: Sequence[Collector] = ()
    gpus: Sequence[Gpu] | None = None
    """None: not known. Empty: the node has none."""
    history_failures: int = 0
    findings: tuple[Finding, ...] = ()
    """Findings about GPUs that no run explains."""
    instance: str | None = None
    """Prometheus's name of its agent; None with an agent as source."""


@dataclass(frozen=True)
class Growth:
    """By how much a counter grew over a stretch of time."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Scope:
    """Whose numbers a query is about. Metrics of a node or a GPU ignore the run, those of a run ignore the node."""

    run: str | None = None
    rank: str | None = None
    instance: str | None = None
    gpu: str | None = None
    """Index of one GPU; None: all of them."""


@dataclass(frozen=True)
class Span:
    start_s: float
    end_s: float
    points: int = 300
    """At most so many points a series."""
