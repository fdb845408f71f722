"""Pieces of the pages as HTML, by the templates that reports use too (`PAGES`): what goes into them is prepared here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from gpuwatch.api import Finding, Gpu, Run
from gpuwatch.formatting import duration
from gpuwatch.tools.reports.display import SEVERITIES, display
from gpuwatch.tools.reports.page import macros
from gpuwatch_dashboards.model import Growth
from gpuwatch_dashboards.selection import key_of

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
    """Return the table of the runs that go on, the one shown marked; empty where that is the only one."""
    going = [run for run in runs if run.status == "running"]
    if not going or [key_of(run) for run in going] == [key_of(shown)]:
        return Markup()
    rows = [(run, key_of(run) == key_of(shown)) for run in going[:MOST_RUNS]]
    return PAGES.runs(rows, len(going) - MOST_RUNS)


def rank_table(ranks: Sequence[Run]) -> Markup:
    quickest_s = min((r.recent.step_s_p50 for r in ranks if r.recent and r.recent.step_s_p50), default=None)
    return PAGES.ranks(ranks, quickest_s)


def gpu_table(gpus: Sequence[Gpu], growth: Sequence[Growth], runs: Sequence[Run]) -> Markup:
    """Return a node's GPUs as a table; `growth` is that of their ledgers over the time shown, by UUID and state."""
    seconds: dict[str, dict[str, float]] = {}
    for each in growth:
        if each.value > 0.0:
            seconds.setdefault(each.labels["UUID"], {})[each.labels["state"]] = each.value
    shares = {uuid: {s: value / sum(of.values()) for s, value in of.items()} for uuid, of in seconds.items()}
    names: Mapping[str, str] = {run.run: run.name or run.run for run in runs}
    return PAGES.gpus(gpus, shares, names)


def ranks_of(runs: Sequence[Run], run: Run) -> list[Run]:
    """Return all ranks of a run that are known, in order."""
    return sorted((each for each in runs if each.run == run.run), key=lambda each: each.rank)


def findings_of(runs: Sequence[Run], run: Run | None) -> list[Finding]:
    """Return a rank's findings, then those of the run's other ranks that this one waits for."""
    if run is None:
        return []
    others = [other for other in runs if other.run == run.run and other.rank != run.rank]
    return [*run.findings, *(found for other in others for found in other.findings if found.rank is not None)]
