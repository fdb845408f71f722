"""The panel: one type for Streamlit, Grafana and `gpuwatch top`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports.display import UNITS, Unit
from gpuwatch_dashboards.query import Match, Query

Kind = Literal["lines", "stack", "stat", "table"]
Severity = Literal["warning", "critical"]
_TITLES = {
    "alertname": "Alert", "instance": "Node", "job_id": "Job", "gpu": "GPU", "UUID": "UUID", "timeline": "Clock",
    "workload_namespace": "Namespace", "workload_pod": "Pod", "workload_container": "Container", "version": "gpuwatch",
    "world_size": "Ranks", "num_workers": "Loader workers", "GPU_I_ID": "MIG instance", "GPU_I_PROFILE": "Profile",
}  # fmt: skip
_PARTS = ("state", "phase")  # A quotient by these labels is a share: its divisor is the sum over them


@dataclass(frozen=True)
class Curve:
    """One query of a panel, `live`, `promql` or both: a line for each set of its labels, or a column of a table."""

    legend: str = ""
    """With labels in braces: "read {device}"; a single label of `display.LOOKS` is shown by its name there. Of a table:
    the title of the value's column (empty: the value is not shown)."""
    promql: str = ""
    """For Prometheus instead of `live`, with Grafana's variables (`$instance`, `$__range`) and recorded series."""
    unit: Unit | None = None  # None: the panel's
    live: Query | None = None  # for agents and Prometheus. None: only Prometheus can answer, by `promql`.
    dashed: bool = False  # marks a limit of the other lines
    over_stack: bool = False  # draws a line over the panel's stack instead of a part of it

    @property
    def query(self) -> Query:
        """Return the query for an agent. Raises TypeError where only Prometheus can answer."""
        if self.live is None:
            raise TypeError(f"{self.promql}: only Prometheus can answer this")
        return self.live


def line(
    legend: str, metric: str, over: str = "", where: tuple[Match, ...] = (), *, greatest: bool = False, **more: Any
) -> Curve:
    """Return a curve that agents and Prometheus answer: a metric, or its quotient, by the labels of its legend.

    GPUs are distinguished by UUID, too. Of a quotient by state or phase the divisor is the sum over all of them.
    """
    labels = tuple(re.findall(r"\{(\w+)\}", legend.replace("{gpu}", "{gpu}{UUID}")))
    divisor = Query(over, tuple(label for label in labels if label not in _PARTS)) if over else None
    return Curve(legend, live=Query(metric, labels, where, divisor, greatest), **more)


@dataclass(frozen=True)
class Panel:
    """Everything that Streamlit, Grafana and `gpuwatch top` need to show a panel."""

    key: str
    title: str
    unit: Unit = ""  # empty: that of the first curve's metric, else a number
    kind: Kind = "lines"
    question: str = ""
    curves: tuple[Curve, ...] = ()
    columns: tuple[str, ...] = ()
    sort: str = ""  # title of the column that sorts a table, largest value first
    maximum: float | None = None  # upper end of the axis; None: of the data. The lower end is always 0.
    warning: str = ""
    critical: str = ""  # fields of `gpuwatch.diagnosis.thresholds`, from whose values on it warns; empty: none
    empty: str = "No samples in this time range."  # shown instead of an empty panel: the reason, or what to do
    runbook: str = ""  # the alert whose runbook it links to
    repeat: str = ""  # Grafana draws it once for each value of this variable
    width: int = 8  # approximate, of Grafana's 24 columns: each line of panels is stretched to fill them
    more: bool = False  # A detail: on the page "Live" only after "More panels", to keep the page short and fast

    def asks(self, question: str, *curves: Curve | str) -> Panel:
        """Return the panel with its question and what answers it: curves, or PromQL for a curve without a legend."""
        drawn = tuple(Curve(promql=each) if isinstance(each, str) else each for each in curves)
        unit = self.unit or (unit_of(drawn[0].live) if drawn[0].live is not None else "1")
        return replace(self, question=question, curves=drawn, unit=unit)

    @property
    def is_live(self) -> bool:
        """Whether an agent can answer all of it."""
        return all(curve.live is not None for curve in self.curves)

    def thresholds(self, own: Thresholds | None = None) -> list[tuple[float, Severity]]:
        """Return the values from which on it warns, by a site's thresholds (None: the defaults)."""
        named: tuple[tuple[str, Severity], ...] = ((self.warning, "warning"), (self.critical, "critical"))
        return [(float(getattr(own or THRESHOLDS, name)), severity) for name, severity in named if name]


def title_of(label: str) -> str:
    return _TITLES.get(label, label.capitalize())


detail = partial(Panel, more=True)
table = partial(Panel, kind="table")
stack = partial(Panel, kind="stack")
stat = partial(Panel, kind="stat", more=True, width=3)


def alerts(key: str, selected: str, *labels: str) -> Panel:
    """Return the table of firing alerts with these labels and conditions on labels."""
    labels = ("alertname", "severity", *labels)
    firing = f'max by ({", ".join(labels)}) (ALERTS{{alertstate="firing", {selected}}})'
    panel = table(key, "Alerts", columns=labels, empty="No alert is firing.", width=9)
    return panel.asks("Which alerts are firing now?", firing)


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
