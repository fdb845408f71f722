"""The last minutes of a run and its node, by the panels' own queries."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.api import Points, Run, Series
from gpuwatch_dashboards.model import Scope, Span
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.query import Query
from gpuwatch_dashboards.selection import key_of
from gpuwatch_dashboards.sources import Source
from gpuwatch_dashboards.terminal.facts import Strands

SPAN_S, POINTS = 300.0, 100
RECENT_S = 60.0
_PANELS = ("ledger", "step_time", "loader_workers", "cpu", "pressure", "shm", "network", "disk")
_OF_A_RUN = ("ledger", "step_time", "loader_workers")
_STEPS = Query("gpuwatch_steps_total")
_PHASES = Query("gpuwatch_step_phase_seconds_total", by=("phase",))
_MEMORY = (Query("gpuwatch_memory_available_bytes"), Query("gpuwatch_memory_total_bytes"))

Lines = list[list[Series]]
"""By a panel's curves, the lines of each."""


def read_strands(source: Source, run: Run | None, now_s: float) -> Strands:
    """Return what was sampled over the last `SPAN_S`; without a run the node's part only. Raises SourceError."""
    keys = [key for key in _PANELS if run is not None or key not in _OF_A_RUN]
    queries = [curve.query for key in keys for curve in BY_KEY[key].curves]
    more = [*_MEMORY, *((_STEPS, _PHASES) if run is not None else ())]
    span = Span(now_s - SPAN_S, now_s, POINTS)
    scope = Scope(run.run, str(run.rank), run.instance) if run is not None else Scope()
    answers = iter(source.evaluate([*queries, *more], scope, span))
    panels: dict[str, Lines] = {key: [next(answers) for _ in BY_KEY[key].curves] for key in keys}
    available, total = next(answers), next(answers)
    steps, phases = (next(answers), next(answers)) if run is not None else ([], [])
    ledger = tuple(_lines(panels, "ledger"))
    used, size = _fullest(panels["shm"])
    return Strands(
        key=key_of(run) if run is not None else "",
        start_s=span.start_s,
        end_s=span.end_s,
        ledger=ledger,
        step_s=_sum(_lines(panels, "step_time")),
        input_ratio=next((t.points for t in ledger if t.labels.get("state") == "input_wait"), ()),
        phases_s=_mean_step(steps, phases, now_s - RECENT_S),
        cpu_ratio=_first(_lines(panels, "cpu")),
        shm_ratio=_over(used, size),
        worker_ratio=_first(_lines(panels, "loader_workers")),
        cpu_iowait_ratio=_last(panels["cpu"][1]),
        pressure=_by_legend(panels, "pressure"),
        shm_used_bytes=used.last if used else None,
        shm_size_bytes=size.last if size else None,
        memory_available_bytes=_last(available),
        memory_total_bytes=_last(total),
        rates={**_by_legend(panels, "network"), **_by_legend(panels, "disk")},
    )


def _lines(panels: dict[str, Lines], key: str) -> list[Series]:
    """Return the lines of a panel's first curve; none where the panel was not asked for."""
    return panels[key][0] if key in panels else []


def _first(traces: Sequence[Series]) -> Points:
    return traces[0].points if traces else ()


def _last(traces: Sequence[Series]) -> float | None:
    return traces[0].last if traces else None


def _by_legend(panels: dict[str, Lines], key: str) -> dict[str, float]:
    """Return the last values of a panel whose curves give one line each, by legend; what was not measured is absent."""
    lasts = {
        curve.legend: _last(traces) for curve, traces in zip(BY_KEY[key].curves, panels.get(key, []), strict=False)
    }
    return {legend: value for legend, value in lasts.items() if value is not None}


def _sum(traces: Sequence[Series]) -> Points:
    """Return the sum of lines at each moment that any of them knows."""
    sums: dict[float, float | None] = {}
    for trace in traces:
        for time_s, value in trace.points:
            before = sums.get(time_s)
            sums[time_s] = value if before is None else before + (value or 0.0)
    return tuple(sorted(sums.items()))


def _mean_step(steps: Sequence[Series], phases: Sequence[Series], since_s: float) -> dict[str, float]:
    """Return seconds by phase of the mean step since a moment: time in the phase over steps done; empty phases are left out."""
    done = sum(value for time_s, value in _first(steps) if time_s > since_s and value is not None)
    if done <= 0:
        return {}
    return {
        trace.labels.get("phase", ""): sum(v for t, v in trace.points if t > since_s and v is not None) / done
        for trace in phases
        if any(value for time_s, value in trace.points if time_s > since_s)
    }


def _fullest(curves: Lines) -> tuple[Series | None, Series | None]:
    """Return the lines used and size of the /dev/shm with the least room (the node's, or a run's own)."""
    sizes = {trace.labels.get("mount"): trace for trace in curves[1]}
    pairs = [(used, sizes.get(used.labels.get("mount"))) for used in curves[0]]
    return max(pairs, key=lambda pair: _share(*pair), default=(None, None))


def _share(used: Series, size: Series | None) -> float:
    whole = size.last if size else None
    return (used.last or 0.0) / whole if whole else 0.0


def _over(used: Series | None, size: Series | None) -> Points:
    if used is None or size is None:
        return ()
    sizes = dict(size.points)
    found: list[tuple[float, float | None]] = []
    for time_s, value in used.points:
        whole = sizes.get(time_s)
        found.append((time_s, value / whole if value is not None and whole else None))
    return tuple(found)
