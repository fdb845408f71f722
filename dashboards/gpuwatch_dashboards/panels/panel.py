"""The panel: one type for Streamlit, Grafana and `gpuwatch top`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports.display import UNITS, Unit
from gpuwatch_dashboards.query import Query

Kind = Literal["lines", "stack", "stat", "table"]
Link = Literal["fleet", "node", "run", "user", "job", "runbook"]
"""Target of a table cell's link: the fleet's, node's or run's page with this value selected, or an alert's runbook."""
Severity = Literal["warning", "critical"]
_TITLES: dict[str, tuple[str, Link | None]] = {
    "alertname": ("Alert", "runbook"),
    "severity": ("Severity", None),
    "instance": ("Node", "node"),
    "run": ("Run", "run"),
    "rank": ("Rank", None),
    "name": ("Name", None),
    "user": ("User", "user"),
    "job_id": ("Job", "job"),
    "gpu": ("GPU", None),
    "UUID": ("UUID", None),
    "workload_namespace": ("Namespace", None),
    "workload_pod": ("Pod", None),
    "workload_container": ("Container", None),
    "device": ("Device", None),
    "timeline": ("Clock", None),
    "world_size": ("Ranks", None),
    "num_workers": ("Loader workers", None),
    "version": ("gpuwatch", None),
    "cause": ("Cause", None),
    "kind": ("Kind", None),
    "collector": ("Collector", None),
    "GPU_I_ID": ("MIG instance", None),
    "GPU_I_PROFILE": ("Profile", None),
}
"""Of a label's column in every table: its title, and what its values link to."""
_THRESHOLD_NAMES = {each.name for each in fields(Thresholds)}


@dataclass(frozen=True)
class Threshold:
    """A value from which on a panel warns: a field of `gpuwatch.diagnosis.thresholds`. Raises ValueError for another name."""

    name: str
    severity: Severity = "warning"

    def __post_init__(self) -> None:
        if self.name not in _THRESHOLD_NAMES:
            raise ValueError(f"{self.name}: not a field of gpuwatch.diagnosis.thresholds.Thresholds; add it there")

    @property
    def value(self) -> float:
        return self.value_in(THRESHOLDS)

    def value_in(self, thresholds: Thresholds) -> float:
        """Return the value in a site's configuration."""
        return float(getattr(thresholds, self.name))


@dataclass(frozen=True)
class Curve:
    """One query of a panel, `live`, `promql` or both: a line for each set of its labels, or a column of a table."""

    live: Query | None = None
    """For agents and Prometheus. None: only Prometheus can answer, by `promql`."""
    legend: str = ""
    """With labels in braces: "read {device}"; a single label of `display.LOOKS` is shown by its name there. Of a table:
    the title of the value's column (empty: the value is not shown)."""
    promql: str = ""
    """For Prometheus instead of `live`, with Grafana's variables (`$instance`, `$__range`) and recorded series."""
    unit: Unit | None = None
    """None: the panel's."""
    dashed: bool = False
    """Marks a limit of the other lines."""
    over_stack: bool = False
    """Draws a line over the panel's stack instead of a part of it."""

    @property
    def query(self) -> Query:
        """Return the query for an agent. Raises TypeError where only Prometheus can answer."""
        if self.live is None:
            raise TypeError(f"{self.promql}: only Prometheus can answer this")
        return self.live


@dataclass(frozen=True)
class Column:
    """A label that is a column of a table."""

    label: str
    title: str
    link: Link | None = None


def columns(*labels: str) -> tuple[Column, ...]:
    return tuple(Column(label, *_TITLES[label]) for label in labels)


@dataclass(frozen=True)
class Panel:
    """Everything that Streamlit, Grafana and `gpuwatch top` need to show a panel."""

    key: str
    title: str
    question: str
    """Its description, for a reader who sees it for the first time."""
    unit: Unit
    curves: tuple[Curve, ...]
    kind: Kind = "lines"
    columns: tuple[Column, ...] = ()
    sort: str = ""
    """Title of the column that sorts a table, largest value first."""
    maximum: float | None = None
    """Upper end of the axis; None: of the data. The lower end is always 0."""
    thresholds: tuple[Threshold, ...] = ()
    empty: str = "No samples in this time range."
    """Shown instead of an empty panel: the reason, or what to do."""
    runbook: str = ""
    """The alert whose runbook it links to."""
    repeat: str = ""
    """Grafana draws it once for each value of this variable."""
    width: int = 8
    """Approximate, of Grafana's 24 columns: each line of panels is stretched to fill them."""
    more: bool = False
    """A detail: on the page "Live" only after "More panels", to keep the page short and fast."""

    @property
    def is_live(self) -> bool:
        """Whether an agent can answer all of it."""
        return all(curve.live is not None for curve in self.curves)

    @property
    def stacked(self) -> bool:
        return self.kind == "stack"


detail = partial(Panel, more=True)
"""A panel that the page "Live" shows only after "More panels"."""
table = partial(Panel, kind="table", unit="1")
stack = partial(Panel, kind="stack")


def stat(key: str, title: str, question: str, unit: Unit, curve: Curve | str, warning: str = "", **more: str) -> Panel:
    """Return a panel of one number, from PromQL or a curve; `warning` is the name of its threshold."""
    curves = (Curve(promql=curve) if isinstance(curve, str) else curve,)
    limits = (Threshold(warning),) if warning else ()
    return Panel(key, title, question, unit, curves, "stat", thresholds=limits, more=True, width=3, **more)  # type: ignore[arg-type]


def alerts(key: str, selected: str, *labels: str) -> Panel:
    """Return the table of firing alerts with these labels; `selected` are conditions on labels, or empty."""
    labels = ("alertname", "severity", *labels)
    firing = f'ALERTS{{alertstate="firing"{", " + selected if selected else ""}}}'
    return Panel(
        key=key,
        title="Alerts",
        question="Which alerts are firing now?",
        unit="1",
        kind="table",
        curves=(Curve(promql=f"max by ({', '.join(labels)}) ({firing})"),),
        columns=columns(*labels),
        empty="No alert is firing.",
        width=9,
    )


def unit_of(query: Query) -> Unit:
    """Return the unit of a query's values, from the metrics' units. Raises KeyError for one that no panel can have."""
    unit: str = BY_NAME[query.metric].unit
    if query.over is not None:
        divisor = BY_NAME[query.over.metric].unit
        of_same_kind = query.is_rate == query.over.is_rate
        if unit == divisor if of_same_kind else (unit, divisor) == ("seconds", "count"):
            return "ratio"
        if divisor != "count" or not of_same_kind:
            raise KeyError(f"no panel has a unit for {unit} over {divisor}")
    is_rate = query.over is None and (query.is_rate or query.metric.endswith("_per_second"))
    return {shown.rate_of if is_rate else shown.metric: name for name, shown in UNITS.items()}[unit]
