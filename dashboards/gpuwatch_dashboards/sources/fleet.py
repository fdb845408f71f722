"""All GPUs of a site, from the series that Prometheus records (gpuwatch/alerting): a thousand nodes are answered quickly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.query.evaluate import Match
from gpuwatch_dashboards.query.promql import selector
from gpuwatch_dashboards.sources.prometheus import PrometheusSource

LEVELS: dict[str, str] = {"user": "user", "job": "job_id", "node": "instance", "run": "run"}
"""Whose lost time is listed, and the label that carries it."""
LOST_KINDS = ("starved", "idle", "stalled")
RATE, HOURS, COST = "gpuwatch_gpu_seconds:rate5m", "gpuwatch_gpu_hours:increase5m", "gpuwatch_gpu_cost:increase5m"
RECORDED_S = 300.0
"""States and hours are recorded every five minutes: nothing of them is asked for more often."""
_LOST = f'kind=~"{"|".join(LOST_KINDS)}"'


@dataclass(frozen=True)
class Holder:
    """A user, job, node or run, and what its GPUs did over a stretch of time."""

    name: str
    """Empty: of GPUs whose holder is not known."""
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
class Holders:
    """Those who lost most."""

    most: tuple[Holder, ...]
    """Who lost most first."""
    others: int = 0
    others_lost_hours: float = 0.0


def now(source: PrometheusSource) -> dict[str, float]:
    """Return GPUs' worth of time by kind over the last minutes; empty: nothing is recorded. Raises SourceError."""
    return _by(source.instant(f"kind:{RATE}"), "kind")


def holders(source: PrometheusSource, level: str, span: Span, most: int) -> Holders:
    """Return at most `most` of a level of LEVELS. Raises SourceError.

    Of a thousand nodes only the lost kinds are summed, which say who is first, and all kinds of those few alone.
    """
    label, window = LEVELS[level], _window(span)
    lost = f"sum by ({label}) (sum_over_time({level}_kind:{HOURS}{{{_LOST}}}[{window}]))"
    by_name = _by(source.instant(lost, span.end_s), label)
    ordered = sorted(by_name, key=lambda name: -by_name[name])
    first, others = ordered[:most], ordered[most:]
    if not first:
        return Holders(())
    own = selector(Match(label, "=~", "|".join(re.escape(name) for name in first)))
    hours_of: dict[str, dict[str, float]] = {name: {} for name in first}
    for labels, value in source.instant(f"sum_over_time({level}_kind:{HOURS}{{{own}}}[{window}])", span.end_s):
        hours_of.setdefault(labels.get(label, ""), {})[labels.get("kind", "")] = value
    gpus = _by(source.instant(f'{level}_kind:{RATE}{{kind="all", {own}}}'), label)
    spent = f"sum by ({label}) (sum_over_time({level}_kind:{COST}{{{_LOST}, {own}}}[{window}]))"
    costs = _by(source.instant(spent, span.end_s), label)
    return Holders(
        tuple(Holder(name, hours_of[name], gpus.get(name), costs.get(name)) for name in first),
        len(others),
        sum(by_name[name] for name in others),
    )


def _window(span: Span) -> str:
    return f"{max(RECORDED_S, span.end_s - span.start_s):.0f}s"


def _by(found: list[tuple[dict[str, str], float]], label: str) -> dict[str, float]:
    return {labels.get(label, ""): value for labels, value in found}
