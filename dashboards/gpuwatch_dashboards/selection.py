"""Which run a page shows, and which stretch of time; what a finding is about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from msgspec.structs import asdict

from gpuwatch.api import Finding, Run
from gpuwatch.formatting import duration
from gpuwatch.ledger.states import HOST_WAIT, INPUT_WAIT, STALLED, TRANSFER, UNKNOWN, shares
from gpuwatch.tools.reports.display import display
from gpuwatch_dashboards.panels import BY_KEY, GROUPS, Panel
from gpuwatch_dashboards.query import Span

WINDOWS_S: dict[str, float | None] = {"5 min": 300.0, "15 min": 900.0, "1 h": 3600.0, "All": None}
"""What the reader may choose; None: the whole run."""
DEFAULT_WINDOW = "15 min"
MAX_POINTS = 300
SAMPLES_LATE_S = 1.5  # a sample is in the agent's history so long after it was taken, at most
SAMPLED_S = 2.0  # a shorter run has no rates: it is sampled every second, and a rate takes two samples
CLEARLY = 0.05  # a rank is marked as the worst when it loses so much more of its time than the run's median rank
LEAST_SPACING_S = 2.0  # closer than this a line shows the rhythm of messages and not that of training


Stretch = tuple[float, float] | None  # a stretch of time that the reader has chosen, in Unix seconds; None: none


def stretch_of(params: Mapping[str, str]) -> Stretch:
    """Return the stretch of time that a link names, in Unix seconds; None without one that makes sense."""
    try:
        start_s, end_s = float(params["from"]), float(params["to"])
    except (KeyError, ValueError):
        return None
    return (start_s, end_s) if 0.0 <= start_s < end_s < 1e11 else None


def key_of(run: Run) -> str:
    """Return the name of a run's rank: unique, and what a link carries."""
    return f"{run.run}/{run.rank}"


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Return runs in a stable order: running first, newest first, ranks together."""
    started = {run.run: run.started_s for run in sorted(runs, key=lambda run: -run.started_s)}  # of its first rank
    return sorted(runs, key=lambda run: (run.status != "running", -started[run.run], run.run, run.rank))


def worst_of(ranks: Sequence[Run]) -> Run | None:
    """Return the rank that needs attention: one that is lost or late, or that loses clearly more than the others."""
    if len(ranks) < 2:
        return None
    if named := [run for run in ranks if run.status == "lost" or any(f.rank == run.rank for f in run.findings)]:
        return max(named, key=lambda run: (run.status == "lost", _lost_share(run)))
    worst = max(ranks, key=_lost_share)
    return worst if _lost_share(worst) > median(map(_lost_share, ranks)) + CLEARLY else None


def _lost_share(run: Run) -> float:
    """Return the share of the last minute that the rank itself lost. Its wait for other ranks is their loss."""
    states = run.recent.states if run.recent else {}
    return sum(shares(states).get(state, 0.0) for state in (INPUT_WAIT, TRANSFER, HOST_WAIT, STALLED, UNKNOWN))


def run_panels(run: Run | None, panels: Sequence[Panel]) -> list[Panel]:
    """Return panels as they are for a run: until it has been sampled, the empty ones of its own say so."""
    if run is None or run.watermark_s - run.started_s >= SAMPLED_S:
        return [*panels]
    empty = BY_KEY["ledger"].empty if run.status == "running" else "This run ended before its first sample."
    return [replace(panel, empty=empty) if panel in GROUPS["run"] else panel for panel in panels]


def concluded(run: Run) -> list[Finding]:
    """Return what the process of a run found over the whole of it, once it has ended without an active finding."""
    found = run.conclusion.findings if run.conclusion is not None and not run.findings else ()
    return [Finding(**asdict(each)) for each in found]


def facts_of(finding: Finding, now_s: float) -> list[str]:
    """Return an active finding's share, the GPU (its UUID) or rank that it is about, and how long it has been there."""
    facts = [display(finding.ratio, "ratio"), *([finding.gpu] if finding.gpu else [])]
    facts += [f"rank {finding.rank}"] if finding.rank is not None else []
    return facts + ([f"for {duration(max(1, round(now_s - finding.since_s)))}"] if finding.since_s is not None else [])


def run_of(runs: Sequence[Run], name: str | None) -> str | None:
    """Return the id of the run that a link names, by its id or its name (the newest of that name); None: not known."""
    named = [run for run in runs if run.run == name] or [run for run in runs if name and run.name == name]
    return max(named, key=lambda run: run.started_s).run if named else None


def select(runs: Sequence[Run], shown: str | None, name: str | None = None, rank: str | None = None) -> Run | None:
    """Return the run to show: the one named by a link, else the one on the page while it runs, else the newest running.

    Of its ranks it is the one that the link names, else the one on the page, else the worst, else the first. `runs` is
    the source's order (most recently active first), `shown` the key of the run on the page until now.
    """
    running = [run for run in runs if run.status == "running"]
    asked = run_of(runs, name)
    named = [run for run in runs if run.run == asked and rank in (None, str(run.rank))]
    on_page = [run for run in named or running if key_of(run) == shown]
    newest = max(running or runs[:1], key=lambda run: run.started_s, default=None)
    ranks = on_page or named or [run for run in runs if newest is not None and run.run == newest.run]
    return worst_of(ranks) or min(ranks, key=lambda run: run.rank, default=None)


def span_of(run: Run | None, window_s: float | None, now_s: float) -> Span:
    """Return the stretch of time to draw, of a run or (None) of a node: it ends with the run, and begins within it."""
    if run is None:
        end_s, start_s = now_s, now_s - (window_s or 3600.0)
    else:
        end_s = now_s if run.status == "running" else min(now_s, max(run.last_message_s, run.watermark_s))
        start_s = run.started_s if window_s is None else max(run.started_s, end_s - window_s)
    length_s = max(10.0, end_s - start_s)
    return Span(end_s - length_s, end_s, max(10, min(MAX_POINTS, int(length_s / LEAST_SPACING_S))))


def settled(span: Span) -> Span:
    """Return a stretch that ends now, moved by whole intervals between its points, whose samples are all there.

    Between two moves nothing that is drawn changes: the browser does not redraw, and the tooltip under a pointer stays.
    """
    spacing_s = max(LEAST_SPACING_S, (span.end_s - span.start_s) / span.points)
    end_s = (span.end_s - SAMPLES_LATE_S) // spacing_s * spacing_s
    return replace(span, start_s=span.start_s - (span.end_s - end_s), end_s=end_s)


def span_between(start_s: float, end_s: float) -> Span:
    """Return a stretch that the reader has chosen, in full detail as far as there are points for it."""
    return Span(start_s, end_s, max(10, min(MAX_POINTS, int(end_s - start_s) + 1)))
