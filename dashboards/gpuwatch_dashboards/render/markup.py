"""Pieces of the pages as HTML, by the templates that reports use too (`PAGES`): what goes into them is prepared here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from gpuwatch.api import Finding, Gpu, Run, Series
from gpuwatch.formatting import duration
from gpuwatch.tools.reports.display import SEVERITIES, display
from gpuwatch.tools.reports.page import macros
from gpuwatch_dashboards.selection import key_of, worst_of

PAGES = macros("pages.html")
"""The macros of templates/pages.html: functions that return HTML with every value escaped."""
MOST_RUNS = 16


def verdict(run: Run) -> Markup:
    """Return the head of the page Live: who the run is, what is wrong in one sentence, and its key numbers."""
    return PAGES.verdict(run, max(run.findings, key=lambda f: f.predicted_speedup or 1.0, default=None))


def findings(found: Sequence[Finding], now_s: float, live: bool) -> Markup:
    """Return the active findings as cards: one for each root, its consequences inside."""

    def facts(each: Finding) -> list[str]:
        facts = [SEVERITIES[each.severity].name, display(each.ratio, "ratio")]
        facts += [f"rank {each.rank}"] if each.rank is not None else []
        facts += [f"GPU {each.gpu}"] if each.gpu else []
        return facts + ([f"for {duration(round(now_s - each.since_s))}"] if each.since_s is not None else [])

    return PAGES.findings(found, facts, live)


def past_findings(found: Sequence[Finding], clock: Callable[[float], str]) -> Markup:
    """Return the findings over a run, the newest first, as a list; `clock` gives a time in the reader's zone."""
    titles = {each.cause: each.title for each in found}

    def facts(each: Finding) -> list[str]:
        seen_s = each.seen_s or 0.0
        facts = [f"{clock(each.since_s or seen_s)} to {clock(seen_s)}", display(each.ratio, "ratio")]
        if (root := titles.get(each.root or "")) is not None:
            return [*facts, f"a consequence of: {root}"]
        return [*facts, f"predicted {each.gain} the throughput"] if each.gain else facts

    return PAGES.past_findings(sorted(found, key=lambda each: -(each.since_s or 0.0)), facts)


def run_table(runs: Sequence[Run], shown: Run) -> Markup:
    """Return the runs that go on, a row each by its worst rank, the one shown marked; empty where that is the only one."""
    going = list(dict.fromkeys(run.run for run in runs if run.status == "running"))
    if going in ([], [shown.run]):
        return Markup()
    ranks = [[run for run in runs if run.run == name] for name in going[:MOST_RUNS]]
    return PAGES.runs([(worst_of(of), of, of[0].run == shown.run) for of in ranks], len(going) - MOST_RUNS)


def rank_table(ranks: Sequence[Run], shown: Run) -> Markup:
    """Return a run's ranks, the worst one marked; empty for a run of one rank."""
    quickest_s = min((r.recent.step_s_p50 for r in ranks if r.recent and r.recent.step_s_p50), default=None)
    worst = worst_of(ranks)
    return PAGES.ranks(ranks, shown, worst, quickest_s) if len(ranks) > 1 else Markup()


def gpu_table(gpus: Sequence[Gpu], states: Sequence[Series], runs: Sequence[Run]) -> Markup:
    """Return a node's GPUs as a table; `states` are their shares of time (`GPU_STATES`) over the time shown."""
    shares: dict[str, dict[str, float]] = {}
    for each in states:
        if each.mean:
            shares.setdefault(each.labels["UUID"], {})[each.labels["state"]] = each.mean
    names: Mapping[str, str] = {run.run: run.name or run.run for run in runs}
    return PAGES.gpus(gpus, shares, names)


def ranks_of(runs: Sequence[Run], run: Run) -> list[Run]:
    """Return all ranks of a run that are known: the worst one, then the others in order."""
    ranks = [each for each in runs if each.run == run.run]
    worst = worst_of(ranks)
    return sorted(ranks, key=lambda each: (worst is None or key_of(each) != key_of(worst), each.rank))


def findings_of(runs: Sequence[Run], run: Run | None) -> list[Finding]:
    """Return a rank's findings, then those of the run's other ranks that this one waits for."""
    if run is None:
        return []
    others = [other for other in runs if other.run == run.run and other.rank != run.rank]
    return [*run.findings, *(found for other in others for found in other.findings if found.rank is not None)]
