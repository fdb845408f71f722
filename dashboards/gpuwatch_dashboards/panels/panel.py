"""What a panel is: one type for Streamlit, Grafana and `gpuwatch top`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports.display import Unit
from gpuwatch_dashboards.query.evaluate import Query

Kind = Literal["lines", "stack", "stat", "table"]
Link = Literal["fleet", "node", "run", "user", "job", "runbook"]
"""Where a table's cell leads: to the page of the fleet, node or run with this value selected, or to an alert's runbook."""
Severity = Literal["warning", "critical"]
_THRESHOLD_NAMES = {each.name for each in fields(Thresholds)}


@dataclass(frozen=True)
class Threshold:
    """A value from which a panel warns, by its name in `gpuwatch.diagnosis.thresholds`. Raises ValueError for an unknown name."""

    name: str
    severity: Severity = "warning"

    def __post_init__(self) -> None:
        if self.name not in _THRESHOLD_NAMES:
            raise ValueError(f"{self.name}: not a field of gpuwatch.diagnosis.thresholds.Thresholds; add it there")

    @property
    def value(self) -> float:
        return self.value_in(THRESHOLDS)

    def value_in(self, thresholds: Thresholds) -> float:
        """Return the value with a site's own thresholds."""
        return float(getattr(thresholds, self.name))


@dataclass(frozen=True)
class Curve:
    """One query of a panel: a line for each value of its labels, or the columns of a table. `live`, `promql` or both."""

    live: Query | None = None
    """Answered by an agent and by Prometheus. None: only Prometheus can answer, by `promql`."""
    legend: str = ""
    """With labels in braces: "read {device}"; a single label of `display.LOOKS` is shown by its name there. In a table,
    the title of the value's column (empty: the value is not shown)."""
    promql: str = ""
    """For Prometheus in place of `live`, with Grafana's variables: `$instance`, `$__range`. Recorded series by default name."""
    unit: Unit | None = None
    """None: the panel's."""
    dashed: bool = False
    """For a limit that other lines are compared with."""
    over_stack: bool = False
    """A line over the panel's stack, not a part of it."""

    @property
    def query(self) -> Query:
        """Return what an agent is asked. Raises TypeError where only Prometheus can answer."""
        if self.live is None:
            raise TypeError(f"{self.promql}: only Prometheus can answer this")
        return self.live


@dataclass(frozen=True)
class Column:
    """A label that is a column of a table."""

    label: str
    title: str
    link: Link | None = None


@dataclass(frozen=True)
class Panel:
    """One panel: everything that Streamlit, Grafana and `gpuwatch top` need to show it."""

    key: str
    title: str
    question: str
    """What it answers, for a reader who has never seen it."""
    unit: Unit
    curves: tuple[Curve, ...]
    kind: Kind = "lines"
    columns: tuple[Column, ...] = ()
    sort: str = ""
    """Title of the column that a table is sorted by, the largest first."""
    maximum: float | None = None
    """Upper end of the axis; None: by the data. The lower end is always 0."""
    thresholds: tuple[Threshold, ...] = ()
    empty: str = "No samples in this time range."
    """Shown in the panel's place when there is nothing to draw: why, or what to do."""
    runbook: str = ""
    """The alert whose runbook applies."""
    repeat: str = ""
    """The variable for each of whose values Grafana draws it once."""
    width: int = 8
    """Of Grafana's 24 columns, about: each line of panels is stretched to fill them."""
    more: bool = False
    """On the page "Live", drawn only after "More panels": for details, to keep the page short and quick."""

    @property
    def is_live(self) -> bool:
        """Whether an agent can answer all of it."""
        return all(curve.live is not None for curve in self.curves)

    @property
    def stacked(self) -> bool:
        return self.kind == "stack"


def stat(key: str, title: str, question: str, unit: Unit, curve: Curve | str, warning: str = "", **more: str) -> Panel:
    """Return a panel of one number, from PromQL or a curve; `warning` names its threshold."""
    curves = (Curve(promql=curve) if isinstance(curve, str) else curve,)
    limits = (Threshold(warning),) if warning else ()
    return Panel(key, title, question, unit, curves, "stat", thresholds=limits, more=True, width=3, **more)  # type: ignore[arg-type]


def alerts(key: str, selected: str, *columns: Column) -> Panel:
    """Return the table of firing alerts with these labels; `selected` are further conditions, or empty."""
    labels = ", ".join(["alertname", "severity", *(column.label for column in columns)])
    selector = f'ALERTS{{alertstate="firing"{", " + selected if selected else ""}}}'
    return Panel(
        key=key,
        title="Alerts",
        question="Which alerts fire now?",
        unit="1",
        kind="table",
        curves=(Curve(promql=f"max by ({labels}) ({selector})"),),
        columns=(Column("alertname", "Alert", "runbook"), Column("severity", "Severity"), *columns),
        empty="No alert fires.",
        width=9,
    )


def unit_of(query: Query) -> Unit:
    """Return the unit of a query's values by the catalogue. Raises KeyError for one that no panel can have."""
    unit: str = BY_NAME[query.metric].unit
    if query.over is not None:
        divisor = BY_NAME[query.over.metric].unit
        of_same_kind = query.is_rate == query.over.is_rate
        if unit == divisor and of_same_kind:
            return "ratio"
        if divisor == "count" and of_same_kind:
            return {"seconds": "s", "bytes": "bytes", "count": "1"}[unit]  # type: ignore[return-value]
        return {("seconds", "count"): "ratio"}[(unit, divisor)]  # type: ignore[return-value]
    if query.is_rate:
        return {"seconds": "ratio", "bytes": "bytes/s", "count": "1/s", "joules": "watts"}[unit]  # type: ignore[return-value]
    by_unit = {"seconds": "s", "count": "1"}
    return by_unit.get(unit, unit)  # type: ignore[return-value]
