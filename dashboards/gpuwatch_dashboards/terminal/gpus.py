"""What is known of a node's GPUs: from its agent's status, or from what Prometheus scraped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuwatch.api import Series
from gpuwatch_dashboards.model import Node, Scope, Span
from gpuwatch_dashboards.query import Query
from gpuwatch_dashboards.sources import Source
from gpuwatch_dashboards.terminal.facts import GpuFacts
from gpuwatch_dashboards.terminal.strands import RECENT_S

BY_GPU = ("gpu", "UUID")
_SECONDS = "gpuwatch_gpu_seconds_total"
_LEDGER = Query(_SECONDS, by=(*BY_GPU, "state"), over=Query(_SECONDS, by=BY_GPU))


def ledgers(source: Source, scope: Scope, now_s: float) -> dict[tuple[str, str], dict[str, float]]:
    """Return each GPU's shares of the last minute by state, by (gpu, UUID). Raises SourceError."""
    traces = source.evaluate([_LEDGER], scope, Span(now_s - RECENT_S, now_s, 30))[0]
    shares: dict[tuple[str, str], dict[str, float]] = {}
    for trace in traces:
        if trace.mean:
            shares.setdefault(_key(trace), {})[trace.labels["state"]] = trace.mean
    return shares


def with_ledgers(gpus: Sequence[GpuFacts], shares: dict[tuple[str, str], dict[str, float]]) -> tuple[GpuFacts, ...]:
    return tuple(replace(gpu, states=shares.get((gpu.gpu, gpu.uuid), {})) for gpu in gpus)


def scraped(node: Node) -> tuple[GpuFacts, ...]:
    """Return a node's GPUs as its source gives them."""
    return tuple(
        GpuFacts(
            gpu=gpu.gpu,
            uuid=gpu.uuid,
            name=gpu.name or None,
            state=gpu.state,
            utilization_ratio=gpu.utilization_ratio,
            memory_used_bytes=gpu.memory_used_bytes,
            memory_total_bytes=gpu.memory_total_bytes,
            power_watts=gpu.power_watts,
            owner=gpu.owner,
            run=gpu.run,
        )
        for gpu in node.gpus or ()
    )


def by_number(key: tuple[str, str]) -> tuple[int, str, str]:
    """Return what sorts GPUs as people count them: 2 before 10."""
    return (int(key[0]) if key[0].isdigit() else 1 << 30, *key)


def _key(trace: Series) -> tuple[str, str]:
    return trace.labels.get("gpu", ""), trace.labels.get("UUID", "")
