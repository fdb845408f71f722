"""Which run a page shows, and which stretch of time."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch_dashboards.model import Run, Span

WINDOWS_S: dict[str, float | None] = {"5 min": 300.0, "15 min": 900.0, "1 h": 3600.0, "All": None}
"""What the reader may choose; None: the whole run."""
DEFAULT_WINDOW = "15 min"
MAX_POINTS = 300
LEAST_SPACING_S = 2.0
"""Closer than this a line shows the rhythm of messages and not that of training."""


def key_of(run: Run) -> str:
    """Return the name of a run's rank: unique, and what a link carries."""
    return f"{run.run}/{run.rank}"


def find(runs: Sequence[Run], run: str | None, rank: str | None = None) -> Run | None:
    """Return the run that a link names (of several ranks the first, unless one is named), or None."""
    named = [r for r in runs if r.run == run and (rank is None or str(r.rank) == rank)]
    return min(named, key=lambda r: r.rank, default=None)


def select(runs: Sequence[Run], wanted: Run | None, shown: str | None) -> Run | None:
    """Return the run to show: the wanted one, else the one on the page while it runs, else the newest running.

    `runs` is the source's order (most recently active first), `shown` the key of the run on the page until now.
    """
    if wanted is not None:
        return wanted
    running = [run for run in runs if run.status == "running"]
    on_page = next((run for run in running if key_of(run) == shown), None)
    return on_page or max(running, key=lambda r: (r.started_s, -r.rank), default=None) or (runs[0] if runs else None)


def span_of(run: Run, window_s: float | None, now_s: float) -> Span:
    """Return the stretch of time to draw: it ends with the run, and does not begin before it."""
    end_s = now_s if run.status == "running" else min(now_s, max(run.last_message_s, run.watermark_s))
    start_s = run.started_s if window_s is None else max(run.started_s, end_s - window_s)
    length_s = max(10.0, end_s - start_s)
    return Span(end_s - length_s, end_s, max(10, min(MAX_POINTS, int(length_s / LEAST_SPACING_S))))
