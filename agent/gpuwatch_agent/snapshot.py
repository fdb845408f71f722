"""One moment of the node, ready to be served: made once a second by the sampler, read by any number of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuwatch import api
from gpuwatch_agent.exporter import Page


@dataclass(frozen=True)
class Snapshot:
    """What the HTTP side knows. It is replaced whole, never changed."""

    time_s: float
    monotonic_s: float
    page: Page
    runs: list[api.Run] = field(default_factory=list)
    findings: list[api.Finding] = field(default_factory=list)
    gpus: list[api.Gpu] = field(default_factory=list)
    collectors: list[api.Collector] = field(default_factory=list)
