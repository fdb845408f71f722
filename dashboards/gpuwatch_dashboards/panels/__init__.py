"""The panels by group, for the Streamlit pages, the Grafana dashboards and `gpuwatch top`: one type for all three.

Each is an entry of fleet.yml, run.yml, gpu.yml, node.yml or agent.yml, with the fields of `Panel` that are not as by
default, and `curves`: PromQL, or the fields of `Curve`. `${name}` is a text of texts.yml. `for_each` repeats an entry,
each time with texts of its own; a column or curve that they leave empty is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from gpuwatch.config import own_config
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.ledger.states import LOST_KINDS
from gpuwatch.metrics import BY_NAME
from gpuwatch.tables import fill, table
from gpuwatch.tools.reports.display import UNITS, Unit
from gpuwatch_dashboards.query import Match, Query

Kind = Literal["lines", "stack", "stat", "table"]
Severity = Literal["warning", "critical"]
THRESHOLDS = own_config().thresholds  # of the pages and of `gpuwatch top`
_PARTS = ("state", "phase")  # A quotient by these labels is a share: its divisor is the sum over them


@dataclass(frozen=True)
class Curve:
    """A panel's query, by `metric`, `promql` or both: a line for each set of its labels, or a column of a table."""

    legend: str = ""
    """With labels in braces: "read {device}"; a single label of `display.LOOKS` is shown by its name there. Of a table:
    the title of the value's column (empty: the value is not shown)."""
    metric: str = ""  # for agents and Prometheus. Empty: only Prometheus can answer, by `promql`.
    over: str = ""  # the metric that divides it; of a quotient by state or phase its sum over all of them
    where: Sequence[str] = ()  # a condition: label, operator, value
    by: Sequence[str] | None = None  # its labels. None: those of the legend. GPUs are distinguished by UUID, too.
    greatest: bool = False  # as in `Query`
    total: bool = False  # as in `Query`
    promql: str = ""
    """For Prometheus instead of `metric`, with Grafana's variables (`$instance`, `$__range`) and recorded series."""
    unit: Unit | None = None  # None: the panel's
    dashed: bool = False  # marks a limit of the other lines
    over_stack: bool = False  # draws a line over the panel's stack instead of a part of it

    @cached_property
    def query(self) -> Query:
        """The query of the metric, for an agent. Raises TypeError where only Prometheus can answer."""
        if not self.metric:
            raise TypeError(f"{self.promql}: only Prometheus can answer this")
        named = re.findall(r"\{(\w+)\}", self.legend.replace("{gpu}", "{gpu}{UUID}"))
        labels = tuple(named if self.by is None else self.by)
        parts = tuple(label for label in labels if label not in _PARTS)
        matches: Any = (Match(*self.where),) if self.where else ()  # type: ignore[arg-type]  # of three texts
        divisor = Query(self.over, parts) if self.over else None
        return Query(self.metric, labels, matches, divisor, self.greatest, self.total)


@dataclass(frozen=True)
class Panel:
    """Everything that Streamlit, Grafana and `gpuwatch top` need to show a panel."""

    key: str
    title: str
    question: str
    curves: tuple[Curve, ...]
    unit: Unit  # by default that of the first curve's metric, else a number
    kind: Kind = "lines"
    columns: tuple[str, ...] = ()
    sort: str = ""  # title of the column that sorts a table, largest value first
    maximum: float | None = None  # upper end of the axis; None: of the data. The lower end is always 0.
    warning: str = ""
    critical: str = ""  # fields of `gpuwatch.diagnosis.thresholds`, from whose values on it warns; empty: none
    empty: str = "No samples in this time range."  # shown instead of an empty panel: the reason, or what to do
    runbook: str = ""  # the alert whose runbook it links to
    repeat: str = ""  # Grafana draws it once for each value of this variable
    width: int = 8  # approximate, of Grafana's 24 columns: each line of panels is stretched to fill them. A stat's: 3.
    all_ranks: bool = False  # it compares or counts the ranks of a run: on a page too, which otherwise shows one
    more: bool = False  # A detail, as every stat: on "Live" only after "More panels", to keep it short and fast

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Panel:
        """Return the panel of an entry of a group. Raises TypeError for a field that it does not have."""
        fields = {"more": True, "width": 3, **entry} if entry.get("kind") == "stat" else dict(entry)
        curves = [Curve(promql=each) if isinstance(each, str) else Curve(**each) for each in entry["curves"] if each]
        fields["curves"], fields["columns"] = tuple(curves), tuple(filter(None, entry.get("columns", ())))
        if "unit" not in entry:
            fields["unit"] = unit_of(curves[0].query) if curves[0].metric else "1"
        return cls(**fields)

    @property
    def is_live(self) -> bool:
        """Whether an agent can answer all of it."""
        return all(curve.metric for curve in self.curves)

    def thresholds(self, own: Thresholds | None = None) -> list[tuple[float, Severity]]:
        """Return the values from which on it warns, by these thresholds (None: `THRESHOLDS`)."""
        named: tuple[tuple[str, Severity], ...] = ((self.warning, "warning"), (self.critical, "critical"))
        return [(float(getattr(own or THRESHOLDS, name)), severity) for name, severity in named if name]


def title_of(label: str) -> str:
    return str(_TITLES.get(label, label.capitalize()))


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


def _parsed(name: str) -> Any:
    return table("gpuwatch_dashboards.panels", f"{name}.yml")


_TITLES = _parsed("titles")
_TEXTS = {"lost": "|".join(LOST_KINDS), **_parsed("texts")}


def panels(group: str) -> tuple[Panel, ...]:
    """Return the panels of a file here."""
    entries = [(entry.pop("for_each", [{}]), entry) for entry in _parsed(group)]
    return tuple(Panel.of(fill(entry, {**_TEXTS, **each})) for repeats, entry in entries for each in repeats)


GROUPS: dict[str, tuple[Panel, ...]] = {name: panels(name) for name in ("fleet", "run", "gpu", "node", "agent")}
PANELS: tuple[Panel, ...] = tuple(panel for group in GROUPS.values() for panel in group)
BY_KEY: dict[str, Panel] = {panel.key: panel for panel in PANELS}
_GPU_SECONDS, _EACH_GPU = "gpuwatch_gpu_seconds_total", ("gpu", "UUID")
GPU_STATES = Query(_GPU_SECONDS, (*_EACH_GPU, "state"), over=Query(_GPU_SECONDS, _EACH_GPU))
"""Each GPU's shares of time, for the tables of GPUs."""


def live_panels(*groups: str) -> Iterator[Panel]:
    """Yield the panels of these groups (default: all) that an agent can answer: those of `gpuwatch top`."""
    for name in groups or GROUPS:
        yield from (panel for panel in GROUPS[name] if panel.is_live)
