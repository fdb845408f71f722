"""All GPUs of a site, from the series that Prometheus records (gpuwatch/alerting): a thousand nodes are answered quickly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.query import Match
from gpuwatch_dashboards.sources.prometheus import SITE_TIMEOUT_S, PrometheusSource

LEVELS: dict[str, str] = {"user": "user", "job": "job_id", "node": "instance", "run": "run"}
"""Whose lost time is listed, and the label for it."""
LOST_KINDS = ("starved", "idle", "stalled")
RATE, HOURS, COST = "gpuwatch_gpu_seconds:rate5m", "gpuwatch_gpu_hours:increase5m", "gpuwatch_gpu_cost:increase5m"
RECORDED_S = 300.0
"""Prometheus records these series every five minutes: they need not be read more often."""
_LOST = f'kind=~"{"|".join(LOST_KINDS)}"'


@dataclass(frozen=True)
class Holder:
    """A user, job, node or run, and the time of its GPUs by kind."""

    name: str
    """Empty: not known whose the GPUs are."""
    hours: Mapping[str, float]
    """GPU-hours by kind: useful, starved, idle, stalled; all."""
    gpus: float | None = None
    """Its GPUs now; None: none."""
    cost: float | None = None
    """Of the lost hours, in the currency of the rules' prices; None: no price is configured."""

    @property
    def lost_hours(self) -> float:
        return sum(self.hours.get(kind, 0.0) for kind in LOST_KINDS)


@dataclass(frozen=True)
class Holders:
    """Those who lost most."""

    most: tuple[Holder, ...]
    """The one who lost most first."""
    others: int = 0
    others_lost_hours: float = 0.0


def now(source: PrometheusSource) -> dict[str, float]:
    """Return the number of GPUs by kind over the last minutes; empty: nothing is recorded. Raises SourceError."""
    return _by("kind", source, f"kind:{RATE}")


def holders(source: PrometheusSource, level: str, span: Span, most: int) -> Holders:
    """Return at most `most` of a level of LEVELS. Raises SourceError.

    The lost kinds of all are summed to find the first ones; all kinds are read of those only.
    """
    label, window, end_s = LEVELS[level], f"{max(RECORDED_S, span.end_s - span.start_s):.0f}s", span.end_s
    lost = f"sum by ({label}) (sum_over_time({level}_kind:{HOURS}{{{_LOST}}}[{window}]))"
    by_name = _by(label, source, lost, end_s)
    ordered = sorted(by_name, key=lambda name: -by_name[name])
    first, others = ordered[:most], ordered[most:]
    if not first:
        return Holders(())
    own = Match(label, "=~", "|".join(re.escape(name) for name in first))
    hours_of: dict[str, dict[str, float]] = {name: {} for name in first}
    hours = f"sum_over_time({level}_kind:{HOURS}{{{own}}}[{window}])"
    for labels, value in source.instant(hours, end_s, SITE_TIMEOUT_S):
        hours_of.setdefault(labels.get(label, ""), {})[labels.get("kind", "")] = value
    gpus = _by(label, source, f'{level}_kind:{RATE}{{kind="all", {own}}}')
    spent = f"sum by ({label}) (sum_over_time({level}_kind:{COST}{{{_LOST}, {own}}}[{window}]))"
    costs = _by(label, source, spent, end_s)
    return Holders(
        tuple(Holder(name, hours_of[name], gpus.get(name), costs.get(name)) for name in first),
        len(others),
        sum(by_name[name] for name in others),
    )


def _by(label: str, source: PrometheusSource, expr: str, time_s: float | None = None) -> dict[str, float]:
    return {labels.get(label, ""): value for labels, value in source.instant(expr, time_s, SITE_TIMEOUT_S)}
