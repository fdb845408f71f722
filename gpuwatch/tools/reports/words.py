"""What both forms of a report say in words: rows of facts, money, times of the day."""

from __future__ import annotations

from datetime import datetime, timezone

from gpuwatch.diagnosis.rates import money
from gpuwatch.formatting import duration, percent, size
from gpuwatch.tools.reports.looks import STATES
from gpuwatch.tools.reports.model import Found, RunReport

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
    return f"predicted: {found.gain} the throughput" if found.gain else ""


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
    if report.step_time is None:
        return text
    last = "" if report.step_time.of_last is None else f", the last {report.step_time.of_last:,}"
    return f"{text}{last} of {duration(report.step_time.mean_s)}"


def measured_steps(report: RunReport) -> str:
    """Return which steps the times of a step are of, e.g. "the last 20,000 of 1,200,000 steps"; empty where all are."""
    of_last = None if report.step_time is None else report.step_time.of_last
    return "" if of_last is None else f"the last {of_last:,} of {report.steps:,} steps"


def plotted_steps(report: RunReport) -> str:
    """Return what of the run's steps a plot of their times shows otherwise than as single steps, or not at all; empty for nothing."""
    over = report.steps_over_time
    if report.step_time is not None and report.step_time.of_last == over.steps:  # an agent that does not condense
        return f"shown are {measured_steps(report)}"
    if not over.means:
        return ""
    until = "" if over.means == len(over.time_s) else f"up to {when(over.time_s[over.means])} "
    return f"{until}means alone: single steps from then are no longer kept"
