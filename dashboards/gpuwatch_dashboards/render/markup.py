"""Pieces of the pages as HTML, by the templates that reports use too (`PAGES`): what goes into them is prepared here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from gpuwatch.api import Finding, Gpu, Recent, Run
from gpuwatch.diagnosis.cost import money
from gpuwatch.formatting import duration
from gpuwatch.tools.reports.display import SEVERITIES, VERDICTS, digits, display
from gpuwatch.tools.reports.page import macros
from gpuwatch_dashboards.model import Growth
from gpuwatch_dashboards.selection import key_of

PAGES = macros("pages.html")
"""The macros of templates/pages.html: functions that return HTML with every value escaped."""
MOST_RUNS = 16
Figure = tuple[str, str, str]
"""Class, number, what it is."""


def verdict(run: Run) -> Markup:
    """Return the head of the page Live: who the run is, what is wrong in one sentence, and its key numbers."""
    recent = run.recent or Recent()
    figures: list[Figure] = []
    if run.verdict and run.verdict.ratio is not None:
        look = VERDICTS.get(run.verdict.state, VERDICTS["unknown"])
        figures.append(("ratio", display(run.verdict.ratio, "ratio"), look.name))
    if recent.steps_per_s is not None:
        figures.append(("steps", digits(recent.steps_per_s), "steps/s"))
    if recent.samples_per_s:
        figures.append(("samples", digits(recent.samples_per_s), "samples/s"))
    if recent.step_s_p50 is not None:
        figures.append(("p50", display(recent.step_s_p50, "s"), "step p50"))
    if recent.step_s_p95 is not None:
        figures.append(("p95", display(recent.step_s_p95, "s"), "step p95"))
    figures += rate_figures(run)
    best = max(run.findings, key=lambda f: f.predicted_speedup or 1.0, default=None)
    if best is not None and best.gain:
        figures.append(("gain", best.gain, "the throughput, predicted"))
    return run_head(run, [*figures, ("count", f"{run.steps:,}", "steps done"), *cost_figures(run)])


def run_head(run: Run, figures: Sequence[Figure]) -> Markup:
    """Return who a run is, its verdict, and some numbers."""
    facts = [f"rank {run.rank} of {run.world_size}" if run.world_size > 1 else f"rank {run.rank}"]
    facts.append("@".join(part for part in (run.user, run.host) if part))
    if run.loader and run.loader.num_workers is not None:
        workers = run.loader.num_workers
        facts.append(f"{workers} loader worker{'' if workers == 1 else 's'}" if workers else "no loader workers")
    facts.append(f"for {duration(round(run.watermark_s - run.started_s))}")
    return PAGES.head(run, figures, [fact for fact in facts if fact])


def rate_figures(run: Run) -> list[Figure]:
    """Return the rates that the training declares; nothing where it declares none."""
    recent = run.recent or Recent()
    figures = []
    if recent.tokens_per_s is not None:
        figures.append(("tokens", f"{recent.tokens_per_s:,.0f}", "tokens/s"))
    if recent.flops_per_s is not None:
        figures.append(("flops", f"{recent.flops_per_s / 1e12:.3g}", "TFLOP/s"))
    if recent.mfu_ratio is not None:
        figures.append(("mfu", display(recent.mfu_ratio, "ratio"), "MFU"))
    return figures


def cost_figures(run: Run) -> list[Figure]:
    """Return what a run's GPUs cost; nothing where that is not known."""
    cost = run.cost
    if cost is None:
        return []
    return [
        ("cost", money(cost.total, cost.currency), "cost so far" if run.status == "running" else "cost"),
        ("lost", money(cost.outside_compute, cost.currency), "of it outside compute"),
    ]


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
