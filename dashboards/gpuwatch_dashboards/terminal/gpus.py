"""What is known of a node's GPUs: from its agent's status, or from what Prometheus scraped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuwatch_dashboards.model import Collector, Finding, Node, Scope, Span, Trace
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.query import Query
from gpuwatch_dashboards.sources import Source
from gpuwatch_dashboards.sources.http import JsonApi
from gpuwatch_dashboards.terminal.facts import GpuFacts
from gpuwatch_dashboards.terminal.strands import RECENT_S

BY_GPU = ("gpu", "UUID")
_SECONDS = "gpuwatch_gpu_seconds_total"
_LEDGER = Query(_SECONDS, by=(*BY_GPU, "state"), over=Query(_SECONDS, by=BY_GPU))
_UTILIZATION = BY_KEY["gpu_utilization"].curves[0].query
_POWER = BY_KEY["gpu_power"].curves[0].query
_USED = Query("gpuwatch_gpu_memory_used_bytes", by=BY_GPU)
_TOTAL = Query("gpuwatch_gpu_memory_total_bytes", by=BY_GPU)
_OWNER = Query("gpuwatch_gpu_owner_info", by=(*BY_GPU, "user", "run"))
_INFO = Query("gpuwatch_gpu_info", by=(*BY_GPU, "model"))


@dataclass(frozen=True)
class History:
    failures: int = 0


@dataclass(frozen=True)
class Status:
    """/api/v1/status."""

    host: str
    collectors: tuple[Collector, ...] = ()
    gpus: tuple[GpuFacts, ...] | None = None
    history: History = History()


@dataclass(frozen=True)
class _GpuFinding(Finding):
    run: str | None = None


@dataclass(frozen=True)
class _Findings:
    findings: tuple[_GpuFinding, ...]


def read_findings(api: JsonApi) -> tuple[Finding, ...]:
    """Return the findings about GPUs that no run explains. Raises SourceError."""
    return tuple(found for found in api.get("/api/v1/findings", _Findings).findings if found.run is None)


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


def scraped(source: Source, node: Node, scope: Scope, now_s: float) -> tuple[GpuFacts, ...]:
    """Return the GPUs as metrics tell them: the state is the one that had most of the last seconds. Raises SourceError."""
    queries = [_UTILIZATION, _POWER, _USED, _TOTAL, _OWNER, _INFO, _LEDGER]
    answers = source.evaluate(queries, scope, Span(now_s - RECENT_S, now_s, 30))
    utilization, power, used, total = ({_key(t): t.last for t in traces} for traces in answers[:4])
    owners = {_key(trace): trace.labels for trace in answers[4]}
    names = {_key(trace): trace.labels.get("model") for trace in answers[5]}
    now: dict[tuple[str, str], tuple[float, str]] = {}
    for trace in answers[6]:
        now[_key(trace)] = max(now.get(_key(trace), (0.0, "")), (trace.last or 0.0, trace.labels["state"]))
    keys = {(gpu.gpu, gpu.uuid) for gpu in node.gpus or ()} | set(utilization)
    return tuple(
        GpuFacts(
            gpu=key[0],
            uuid=key[1],
            name=names.get(key),
            state=now[key][1] or None if key in now else None,
            utilization_ratio=utilization.get(key),
            memory_used_bytes=used.get(key),
            memory_total_bytes=total.get(key),
            power_watts=power.get(key),
            owner=owners.get(key, {}).get("user") or None,
            run=owners.get(key, {}).get("run") or None,
        )
        for key in sorted(keys, key=by_number)
    )


def by_number(key: tuple[str, str]) -> tuple[int, str, str]:
    """Return what sorts GPUs as people count them: 2 before 10."""
    return (int(key[0]) if key[0].isdigit() else 1 << 30, *key)


def _key(trace: Trace) -> tuple[str, str]:
    return trace.labels.get("gpu", ""), trace.labels.get("UUID", "")
