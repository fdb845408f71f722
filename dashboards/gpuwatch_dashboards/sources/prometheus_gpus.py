"""A node's GPUs as its agent exported them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuwatch.api import Gpu
from gpuwatch_dashboards.query.evaluate import Match
from gpuwatch_dashboards.query.promql import INSTANCE, selector
from gpuwatch_dashboards.sources.prometheus_answer import Result, value_of

GAUGES = {
    "utilization_ratio": "gpuwatch_gpu_utilization_ratio",
    "memory_used_bytes": "gpuwatch_gpu_memory_used_bytes",
    "memory_total_bytes": "gpuwatch_gpu_memory_total_bytes",
    "power_watts": "gpuwatch_gpu_power_watts",
}


def scraped_gpus(instant: Callable[[str], list[Result]], instance: str, window: str) -> tuple[Gpu, ...] | None:
    """Return the GPUs of a node, None where nothing says whether it has any; `state` is the largest of the window."""
    where = selector(Match(INSTANCE, "=", instance))
    seen = instant(f"gpuwatch_gpus_seen{{{where}}}")
    gauges = {name: _by_gpu(instant(f"{metric}{{{where}}}")) for name, metric in GAUGES.items()}
    names = {_key(r.metric): r.metric.get("model", "") for r in instant(f"gpuwatch_gpu_info{{{where}}}")}
    owners = {_key(r.metric): r.metric for r in instant(f"gpuwatch_gpu_owner_info{{{where}}}")}
    states: dict[tuple[str, str], tuple[float, str]] = {}
    for result in instant(f"increase(gpuwatch_gpu_seconds_total{{{where}}}[{window}])"):
        key, found = _key(result.metric), (value_of(result), result.metric.get("state", ""))
        if found[0] > 0.0:
            states[key] = max(states.get(key, (0.0, "")), found)
    keys = sorted({*names, *states, *(key for values in gauges.values() for key in values)}, key=_by_number)
    if not keys:
        return () if seen and value_of(seen[0]) == 0 else None
    return tuple(
        Gpu(
            gpu,
            uuid,
            name=names.get((gpu, uuid), ""),
            state=states[gpu, uuid][1] if (gpu, uuid) in states else None,
            run=owners.get((gpu, uuid), {}).get("run") or None,
            owner=_owner(owners.get((gpu, uuid), {})),
            **{name: values.get((gpu, uuid)) for name, values in gauges.items()},
        )
        for gpu, uuid in keys
    )


def _by_gpu(results: list[Result]) -> dict[tuple[str, str], float]:
    return {_key(result.metric): value_of(result) for result in results}


def _key(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get("gpu", ""), labels.get("UUID", "")


def _by_number(key: tuple[str, str]) -> tuple[int, str]:
    return (int(key[0]) if key[0].isdigit() else 1 << 30, key[1])


def _owner(labels: Mapping[str, str]) -> str | None:
    said = [labels.get("user", ""), f"job {labels['job_id']}" if labels.get("job_id") else ""]
    return ", ".join(part for part in said if part) or None
