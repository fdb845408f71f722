"""What a panel over a whole site is: asked of Prometheus in its own words, since only it knows all nodes and the past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuwatch_dashboards.panels.panel import Threshold

Shape = Literal["lines", "stack", "number", "table"]
SiteUnit = Literal[
    "1", "ratio", "s", "1/s", "bytes", "bytes/s", "watts", "celsius", "hertz", "hours", "money", "money/h", "up"
]
"""`money` is in the site's currency (`[prices]`); `up` is 1 or 0, shown as words."""
Link = Literal["fleet", "node", "run", "user", "job", "runbook"]
"""Where a cell leads: to the fleet's, node's or run's dashboard with this value chosen, or to an alert's runbook."""


@dataclass(frozen=True)
class SiteCurve:
    """One query of a panel, or the value columns of one in a table."""

    expr: str
    """PromQL with the dashboard's variables: `$instance`, `$__range` …; recorded series by their default names."""
    legend: str = ""
    """With labels in braces; of a table, the column's title (empty: the value is not shown)."""
    unit: SiteUnit | None = None
    """None: the panel's."""


@dataclass(frozen=True)
class Column:
    """A label that is a column of a table."""

    label: str
    title: str
    link: Link | None = None


@dataclass(frozen=True)
class SitePanel:
    """One panel of a dashboard over a site."""

    key: str
    title: str
    question: str
    unit: SiteUnit
    shape: Shape
    curves: tuple[SiteCurve, ...]
    columns: tuple[Column, ...] = ()
    sort: str = ""
    """Title of the column that a table is sorted by, the largest first."""
    maximum: float | None = None
    thresholds: tuple[Threshold, ...] = ()
    empty: str = "No samples in this time range."
    runbook: str = ""
    """The alert whose runbook tells what to do about it."""
    repeat: str = ""
    """The variable for each of whose values it is drawn once."""
