"""All GPUs of a site, from the series that Prometheus records (gpuwatch/alerting): a thousand nodes answer at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuwatch_dashboards.model import Span, Trace
from gpuwatch_dashboards.sources.prometheus import PrometheusSource

LEVELS: dict[str, str] = {"user": "user", "job": "job_id", "node": "instance", "run": "run"}
"""What lost time is told by, and the label that carries it."""
LOST_KINDS = ("starved", "idle", "stalled")
RATE, HOURS, COST = "gpuwatch_gpu_seconds:rate5m", "gpuwatch_gpu_hours:increase5m", "gpuwatch_gpu_cost:increase5m"
STATES = "state:gpuwatch_gpu_seconds:rate5m"
LEAST_STEP_S = 300.0
"""States are recorded every five minutes."""


@dataclass(frozen=True)
class Holder:
    """A user, job, node or run, and what its GPUs did over a stretch of time."""

    name: str
    """Empty: of GPUs for which nobody says so."""
    hours: Mapping[str, float]
    """GPU-hours by kind: useful, starved, idle, stalled; all."""
    gpus: float | None = None
    """GPUs' worth of time now; None: none."""
    cost: float | None = None
    """Of the lost hours, in the money of the rules' prices; None: no price is configured."""

    @property
    def lost_hours(self) -> float:
        return sum(self.hours.get(kind, 0.0) for kind in LOST_KINDS)


@dataclass(frozen=True)
class Fleet:
    """A site now, and over a stretch of time."""

    gpus_now: Mapping[str, float]
    """GPUs' worth of time by kind, over the last minutes; empty: nothing is recorded."""
    nodes: int
    silent_nodes: int
    """Nodes that are scraped and do not answer."""
    states: tuple[Trace, ...]
    """GPUs by state over the time."""
    hours: Mapping[str, float]
    """GPU-hours by kind over the time."""
    cost: float | None
    """Of the lost hours; None: no price is configured."""
    holders: tuple[Holder, ...]
    """Who lost most first."""


def fleet(source: PrometheusSource, level: str, span: Span) -> Fleet:
    """Return the fleet, its lost time told by a level of LEVELS. Raises SourceError."""
    label = LEVELS[level]
    window = f"{max(LEAST_STEP_S, span.end_s - span.start_s):.0f}s"
    step_s = max(LEAST_STEP_S, (span.end_s - span.start_s) / span.points)
    kinds = f'kind=~"{"|".join(LOST_KINDS)}"'
    return Fleet(
        gpus_now=_by(source.instant(f"kind:{RATE}"), "kind"),
        nodes=int(_one(source, f'count(node_kind:{RATE}{{kind="all"}})')),
        silent_nodes=int(_one(source, 'count(up{job=~".*gpuwatch.*"} == 0)')),
        states=tuple(source.range(STATES, span, step_s)),
        hours=_by(source.instant(f"sum_over_time(kind:{HOURS}[{window}])", span.end_s), "kind"),
        cost=_sum(source.instant(f"sum_over_time(kind:{COST}{{{kinds}}}[{window}])", span.end_s)),
        holders=_holders(source, level, label, window, span.end_s),
    )


def _holders(source: PrometheusSource, level: str, label: str, window: str, at_s: float) -> tuple[Holder, ...]:
    hours: dict[str, dict[str, float]] = {}
    for labels, value in source.instant(f"sum_over_time({level}_kind:{HOURS}[{window}])", at_s):
        hours.setdefault(labels.get(label, ""), {})[labels.get("kind", "")] = value
    now = _by(source.instant(f'{level}_kind:{RATE}{{kind="all"}}'), label)
    kinds = f'kind=~"{"|".join(LOST_KINDS)}"'
    found = source.instant(f"sum by ({label}) (sum_over_time({level}_kind:{COST}{{{kinds}}}[{window}]))", at_s)
    costs = _by(found, label)
    holders = [Holder(name, of, now.get(name), costs.get(name)) for name, of in hours.items()]
    return tuple(sorted(holders, key=lambda holder: -holder.lost_hours))


def _by(found: list[tuple[dict[str, str], float]], label: str) -> dict[str, float]:
    return {labels.get(label, ""): value for labels, value in found}


def _one(source: PrometheusSource, expr: str) -> float:
    return next((value for _, value in source.instant(expr)), 0.0)


def _sum(found: list[tuple[dict[str, str], float]]) -> float | None:
    return sum(value for _, value in found) if found else None
