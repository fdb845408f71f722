"""What both forms of a report say in words: rows of facts, money, times of the day."""

from __future__ import annotations

from datetime import datetime, timezone

from gpuwatch.costs import money
from gpuwatch.reports.looks import STATES
from gpuwatch.reports.model import Found, RunReport
from gpuwatch.units import duration, percent, size

VISIBLE = 0.0005
"""Shares below it are 0.0% in a table and nothing in a bar."""


def when(time_s: float) -> str:
    """Return e.g. "2026-11-20 20:57 UTC": a report is read elsewhere than it was made."""
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def interval(low_high: tuple[float, float] | None) -> str:
    """Return e.g. "41.2 ms to 43.0 ms", empty where there is none."""
    return "" if low_high is None else f"{duration(low_high[0])} to {duration(low_high[1])}"


def gain(found: Found) -> str:
    """Return what a finding's advice promises, e.g. "predicted: up to 2.4× the throughput"; empty for nothing."""
    if found.predicted_range is not None and found.predicted_range[1] >= 1.05:
        low, high = found.predicted_range
        if high - low >= 0.05:
            return f"predicted: {low:.2f}× to {high:.2f}× the throughput"
        return f"predicted: {high:.2f}× the throughput"
    if found.predicted_speedup is None or found.predicted_speedup < 1.05:
        return ""
    return f"predicted: up to {found.predicted_speedup:.2f}× the throughput"


def state_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Return (word, time, share, cost) of each state, the largest first; cost is empty without a price."""
    cost = report.cost
    return [
        (
            STATES[state][0],
            duration(report.states[state]),
            percent(share),
            money(cost.states.get(state, 0.0), cost.currency) if cost else "",
        )
        for state, share in report.shares.items()
    ]


def facts(report: RunReport) -> list[tuple[str, str]]:
    """Return what the run ran on and with, as (name, value)."""
    loader = report.loader or {}
    rows = [
        ("run", report.run),
        ("status", report.status),
        ("host", report.host),
        ("user", report.user),
        ("job", report.job),
        ("started", when(report.started_s)),
        ("device", f"{report.device}, by the {report.timeline}'s clock"),
        ("GPUs", ", ".join(report.gpus)),
        ("ranks", f"{len(report.ranks)} of {report.world_size}" if report.world_size > 1 else ""),
        ("step records lost", str(report.records_lost) if report.records_lost else ""),
        *((f"loader: {name}", setting(name, value)) for name, value in loader.items() if value is not None),
        *((f"version of {name}", value) for name, value in report.versions.items()),
        *((f"tag {name}", value) for name, value in report.tags.items()),
    ]
    return [(name, value) for name, value in rows if value]


def setting(name: str, value: object) -> str:
    """Return a loader's setting as people read it."""
    return size(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def headline(report: RunReport) -> str:
    """Return e.g. "resnet50-a · 2h 05m, 8,120 steps of 42 ms"."""
    wall = report.until_s - report.started_s
    text = f"{report.name} · {duration(max(0.0, wall))}, {report.steps:,} steps"
    return text + (f" of {duration(report.step_time.mean_s)}" if report.step_time else "")
