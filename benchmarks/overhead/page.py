"""docs/evidence/overhead.md: the table of costs, and which targets are met."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.overhead.variants import VARIANTS, Variant

Costs = Mapping[str, dict[str, Any] | str]

PROFILER_US = 26.8
"""What torch.profiler added to a step where the 2 and 5 µs targets were set: the scale for machines of other speeds."""


def row(variant: Variant, cost: dict[str, Any] | str, unit_us: float | None) -> str:
    """Return a variant's line of the table; `unit_us` is what gpuwatch adds."""
    if isinstance(cost, str):
        return f"| {variant.title} | {variant.against} | {cost} | | | | | | |"
    low, high = cost["added_quartiles_us"]
    ratio = f"{cost['added_us'] / unit_us:.1f}" if unit_us and not variant.ours else ""
    lost = "" if cost["lost"] is None else f"{cost['lost']:,} of {cost['steps']:,}"
    return (
        f"| {variant.title} | {variant.against} | {cost['added_us']:.1f} ({low:.1f} … {high:.1f}) | {cost['between_us']:.1f} "
        f"| {cost['other_threads_us']:.1f} | {_tail(cost, '')} | {_tail(cost, 'bare_')} | {ratio} | {lost} |"
    )


def _tail(cost: Mapping[str, Any], which: str) -> str:
    low, high = cost[f"{which}tail_spread_us"]
    return f"{cost[f'{which}tail_us']:,.0f} ({low:,.0f} … {high:,.0f})"


def targets(costs: Costs, extras: Mapping[str, Any]) -> list[str]:
    """Return the table of targets. A target whose numbers are missing is not called met."""

    def of(key: str, field: str) -> float | None:
        cost = costs.get(key)
        return float(cost[field]) if isinstance(cost, dict) else None

    def total(key: str) -> float | None:
        added, others = of(key, "added_us"), of(key, "other_threads_us")
        return None if added is None or others is None else added + others

    def ratio(key: str, of_ours: str = "whole_host_timeline") -> float | None:
        """By default of more than the clocks and the queue: evidence and samples, which every user has."""
        ours, theirs = of(of_ours, "added_us"), of(key, "added_us")
        return ours / theirs if ours is not None and theirs else None

    def extra(name: str, key: str) -> float | None:
        return (extras.get(name) or {}).get(key)

    million = extras.get("million") or {}
    grown = million["last_tenth_mb"] - million["second_tenth_mb"] if million else None
    no_agent, agent = of("whole_host_timeline", "added_us"), of("with_an_agent", "added_us")
    apart = None if no_agent is None or agent is None else abs(no_agent - agent)
    lines = [
        ("host timeline alone, training thread, µs", of("clocks_and_queue", "added_us"), 2.0),
        ("the same, all threads, µs of CPU", total("clocks_and_queue"), 3.0),
        ("with evidence and two copies timed, training thread, µs", of("with_copies", "added_us"), 5.0),
        ("the same, all threads, µs of CPU", total("with_copies"), 6.0),
        ("host timeline alone ÷ torch.profiler", ratio("torch_profiler", "clocks_and_queue"), 2 / PROFILER_US),
        ("with evidence and two copies ÷ torch.profiler", ratio("torch_profiler", "with_copies"), 5 / PROFILER_US),
        ("`watch(loader)` ÷ TraceML", ratio("traceml"), 1 / 30),
        ("`watch(loader)` ÷ three `record_function`", ratio("record_functions"), 1 / 10),
        ("`watch(loader)` ÷ Ignite BasicTimeProfiler", ratio("ignite_profiler"), 1 / 5),
        ("`watch(loader)` ÷ Lightning SimpleProfiler", ratio("lightning_simple_profiler"), 1 / 5),
        ("`watch(loader)` ÷ Lightning DeviceStatsMonitor", ratio("lightning_device_stats"), 1 / 5),
        ("with CUDA events, µs", of("cuda_events", "added_us"), 10.0),
        ("bracketed cost at a step of 5 ms, µs", of("at_5_ms", "between_us"), 5.0),
        ("agent or none, difference in µs (noise: 2)", apart, 2.0),
        ("step records lost at 10,000 steps a second, agent listening", extra("loss", "records_lost"), 0.0),
        ("bytes a step on the wire at 10,000 steps a second", extra("wire", "at_10000"), 80.0),
        ("bytes a step on the wire at steps of 5 ms", extra("wire", "at_200"), 80.0),
        ("resident memory over pyzmq and msgspec, MB", extra("memory", "added_mb"), 10.0),
        ("`import gpuwatch` after torch, ms of CPU", extra("import", "median_ms"), 25.0),
        ("kept memory, growth from the 2nd to the 10th 100,000 steps, MB", grown, 1.0),
    ]
    table = ["| target | at most | measured | |", "|---|---:|---:|---|"]
    for what, bound, measured in [(what, bound, measured) for what, measured, bound in lines]:
        output = "not run here" if measured is None else ("met" if measured <= bound else "**not met**")
        table.append(f"| {what} | {bound:.3g} | {'' if measured is None else f'{measured:.3g}'} | {output} |")
    return table


def page(costs: Costs, extras: Mapping[str, Any], on_a_gpu: str, notes: str) -> str:
    """Return docs/evidence/overhead.md; `on_a_gpu` (another command's) and `notes` on the table are written by hand."""
    ours = costs.get("whole_host_timeline")
    unit = ours["added_us"] if isinstance(ours, dict) else None
    bares = sorted(cost["bare_us"] for cost in costs.values() if isinstance(cost, dict) and cost["bare_us"] < 1000)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    bare = f"{bares[0]:.0f} to {bares[-1]:.0f} µs" if bares else "not measured"
    table = [
        "| | against | added µs a step (quartiles) | of it between the work | CPU µs of other threads | p99.9 µs (thirds) | bare p99.9 µs (thirds) | ÷ gpuwatch | steps lost |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *[row(variant, costs[variant.key], unit) for variant in VARIANTS if variant.key in costs],
    ]
    memory, wire, loss = (extras.get(name) or {} for name in ("memory", "wire", "loss"))
    return f"""# Overhead of a step

{on_a_gpu}
## On the host

```
python -m benchmarks.overhead --write
```

Written by that command on {platform.system()}, {os.cpu_count()} cores, {where}, Python {platform.python_version()}, torch {torch.__version__}. The step is forward, backward and SGD of a small
model; without any tool it took {bare}, by the variant's process: the wider that range, the busier the machine was, and costs grow with it.

Each variant runs in a separate process, where blocks of bare and of measured steps alternate. **Added** is the median over blocks of the difference between the block's median step and that of the
bare blocks around it. **Between the work** is the part of it from the end of one step's work to the start of the next one's: this bracketed cost is far less noisy, but does not include what a tool
does inside the step, nor the effect of the cold caches that it leaves behind. **÷ gpuwatch** is added µs over those of `watch(loader)`. The 99.9th percentile is of whole steps, with the lowest and highest of three thirds of the run.

{chr(10).join(table)}

{notes}
## Targets

{chr(10).join(targets(costs, extras))}

With an agent listening, at {loss.get("a_second", 0):,.0f} steps a second: {loss.get("taken", 0):,} steps taken, {loss.get("reported", 0):,.0f} counted by the agent, {loss.get("records_lost", 0):,.0f} records lost. Messages
take {wire.get("at_10000", 0):.0f} bytes a step at 10,000 steps a second and {wire.get("at_200", 0):.0f} at 200, including heartbeats and Hello messages. Importing gpuwatch adds {memory.get("import_mb", 0):.1f} MB, running it for 30,000 steps {memory.get("added_mb", 0):.1f} MB in all.

Not visible in the table: TraceML's patches remain in its bare blocks, so its cost is at least the value shown. The row of the model device includes the device's own Python; a CUDA event costs 1.2–2.5 µs to record.
"""
