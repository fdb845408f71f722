"""Make a `RunReport` of a run that a source knows: choose the run, order its findings, and measure its steps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from statistics import fmean

import msgspec

from gpuwatch import __version__
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.api import Finding, LastSteps, Run, Steps
from gpuwatch.api.client import RunSource
from gpuwatch.diagnosis import finding
from gpuwatch.diagnosis.rates import Cost, cost_of, total_cost
from gpuwatch.diagnosis.report import give_verdict, is_short
from gpuwatch.diagnosis.rules import BY_CAUSE, RULES, after_roots
from gpuwatch.diagnosis.window import StepColumns, Window
from gpuwatch.errors import ConfigError
from gpuwatch.ledger.states import RUN_STATES, shares
from gpuwatch.tools.reports import model
from gpuwatch.tools.reports.statistics import step_statistics

_POINTS = 120  # intervals of the ledger over time, and groups of steps, at most
_STEPS = 20_000
_OF_RUN = ("name", "user", "job", "host", "device", "world_size", "steps", "versions", "tags")
"""What a report takes over from rank 0."""
_MISSED = 0.01  # share of a run's step records that may be missing for other reasons than that they are old
_ENDS_A_RUN = tuple(rule.cause for rule in RULES if rule.ends_run)
"""Causes that nothing is weighed against: they are found once, at the end."""
_DEVICE = ("input_wait_s", "device_transfer_s", "device_compute_s", "host_wait_s")
_HOST = ("data_wait_s", "transfer_s", "compute_s")


def choose(source: RunSource, wanted: str) -> list[Run]:
    """Return a run's ranks by id, name (the latest) or `last`, rank 0 first. Raises: ConfigError if there is none."""
    runs = sorted(source.runs(kept=True), key=lambda run: -run.last_message_s)
    if not runs:
        raise ConfigError(f"{source.where} has no run yet; start a training with gpuwatch.watch(loader)")
    named = next((run for run in runs if run.name == wanted), runs[0] if wanted == "last" else None)
    chosen = next((run for run in runs if run.run == wanted), named)
    if chosen is None:
        names = list(dict.fromkeys(name for run in runs for name in (run.name, run.run)))
        near = get_close_matches(wanted, names, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"its runs: {', '.join(names[:8])}"
        raise ConfigError(f"{source.where} has no run {wanted!r}; {hint}")
    return sorted((run for run in runs if run.run == chosen.run), key=lambda run: run.rank)


def last_two(source: RunSource, wanted: str) -> tuple[str, str]:
    """Return the ids of the run before a run, by its name, and of that run. Raises: ConfigError where there is none."""
    run = choose(source, wanted)[0]
    others = ((r.started_s, r.run) for r in source.runs(kept=True) if r.name == run.name and r.run != run.run)
    if (before := max((each for each in others if each[0] < run.started_s), default=None)) is None:
        raise ConfigError(f"{source.where} has no run before {run.run} that is called {run.name!r}; name two runs")
    return before[1], run.run


def gather(source: RunSource, wanted: str, now_s: float, prices: Prices | None = None) -> model.RunReport:
    """Return the report of a run, by its id, its name, or `last`. `now_s` is when the report is made; `prices` go
    before the agent's. Raises: ConfigError where there is no such run."""
    ranks = choose(source, wanted)
    first = ranks[0]
    run = first.run
    states = _ordered({state: sum(rank.states.get(state, 0.0) for rank in ranks) for state in RUN_STATES})
    joules = _ordered({state: sum(rank.energy_joules.get(state, 0.0) for rank in ranks) for state in RUN_STATES})
    started_s = min(rank.started_s for rank in ranks)
    lasted = ((rank, sum(rank.states.values())) for rank in ranks)  # by the ledger where the clock was set back
    until_s = max(rank.watermark_s if rank.watermark_s > rank.started_s else rank.started_s + s for rank, s in lasted)
    mfu = source.series("gpuwatch_run_mfu_estimated_ratio", {"run": run}, started_s, until_s, _POINTS)
    means = [each.mean for each in mfu if each.mean is not None]
    phases = {name: sum(r.phases.get(name, 0.0) for r in ranks) for each in ranks for name in each.phases}
    taken = source.last_steps(run, first.rank, _STEPS)
    columns = _columns(taken) if taken is not None else StepColumns()
    expected = (1 - _MISSED) * (first.steps - first.records_lost)
    timeline = "device" if columns.hidden_wait_s else first.timeline
    duration_s = sum(states.values())
    samples = [rank.samples for rank in ranks if rank.samples is not None]
    short, device = is_short(first.steps, duration_s), first.device
    window = Window(duration_s, states, phases, is_short=short, timeline=timeline, device=device, steps=columns)
    conclusions = {rank.rank: rank.conclusion for rank in ranks if rank.conclusion is not None}
    end = conclusions.get(first.rank)
    loader = msgspec.structs.asdict(first.loader) if first.loader is not None else {}
    return model.RunReport(
        schema=model.SCHEMA,
        gpuwatch=__version__,
        generated_s=now_s,
        run=run,
        **{name: getattr(first, name) for name in _OF_RUN},
        status=next(each for each in ("lost", "running", "ended") if any(rank.status == each for rank in ranks)),
        timeline=timeline,
        started_s=started_s,
        until_s=until_s,
        duration_s=duration_s,
        states=states,
        shares=shares(states),
        phases=phases,
        mfu_estimated_ratio=fmean(means) if means else None,
        breakdown={name: sum(r.breakdown.get(name, 0.0) for r in ranks) for each in ranks for name in each.breakdown},
        energy_joules=joules,
        samples=sum(samples) if samples else None,
        records_lost=sum(rank.records_lost for rank in ranks),
        verdict=end.verdict if end is not None and end.ranks >= len(ranks) else give_verdict(window),
        step_time=step_statistics(columns, len(columns) if len(columns) < expected else None),
        findings=merge_findings(source.findings(run), conclusions, (started_s, until_s)),
        ranks=tuple(model.Rank(r.rank, r.host, r.pid, r.status, r.steps, _ordered(r.states)) for r in ranks),
        loader={name: value for name, value in loader.items() if name != "worker_pids"} or None,
        gpus=tuple(model or "GPU" for rank in ranks for model in rank.gpus),
        over_time=_over_time(source, run, started_s, until_s),
        steps_over_time=_steps_over_time(source.steps(run, first.rank, _POINTS) or Steps()),
        cost=_cost(ranks, prices),
    )


def _ordered(states: Mapping[str, float]) -> dict[str, float]:
    return {state: states[state] for state in RUN_STATES if states.get(state)}


def _columns(taken: LastSteps) -> StepColumns:
    """Return steps as a diagnosis sees them; rows without host times are left out."""
    rows: list[tuple[float, float, float, bool, float]] = []
    columns = [getattr(taken, name) for name in (*_HOST, *_DEVICE, "epoch_start")]
    for wait, copy, rest, felt, device_copy, device_rest, host_wait, first in zip(*columns, strict=True):
        if wait is None or copy is None or rest is None:
            continue
        if felt is None:
            rows.append((wait, copy, rest, bool(first), 0.0))
        else:
            rest = (device_rest or 0.0) + (host_wait or 0.0)
            rows.append((felt, device_copy or 0.0, rest, bool(first), max(0.0, wait - felt)))
    waits, copies, rests, firsts, hiddens = zip(*rows, strict=True) if rows else ((),) * 5
    on_device = any(felt is not None for felt in taken.input_wait_s)
    return StepColumns(waits, copies, rests, firsts, hiddens if on_device else ())


def _steps_over_time(found: Steps) -> model.StepsOverTime:
    """Return groups of steps. Of old steps only sums are kept: their groups come first, as means."""
    groups: list[tuple[float, float, float, float, float]] = []
    means = 0

    def mean(name: str, index: int) -> float | None:
        column = found.columns.get(name)
        return None if column is None else column.mean[index]

    for index, begin_s in enumerate(found.time_s):
        device = [mean(name, index) for name in _DEVICE]
        wait_s, *rest = device if device[0] is not None else [mean(name, index) for name in _HOST]
        if wait_s is None:
            continue
        low, middle, high = (found.bucket_s[name][index] for name in ("p5", "p50", "p95"))
        if low is None or middle is None or high is None:
            means += 1
            low = middle = high = wait_s + sum(part for part in rest if part is not None)
        groups.append((begin_s, low, middle, high, wait_s))
    time_s, p05_s, median_s, p95_s, data_wait_s = zip(*groups, strict=True) if groups else ((),) * 5
    return model.StepsOverTime(time_s, p05_s, median_s, p95_s, data_wait_s, found.steps, means)


def _over_time(source: RunSource, run: str, started_s: float, until_s: float) -> model.LedgerOverTime:
    """Return the growth of the run's counters from 0, all ranks together, in at most 120 intervals."""
    grown: dict[float, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for series in source.series("gpuwatch_run_seconds_total", {"run": run}, started_s, until_s + 2, _POINTS):
        points = [(at_s, value) for at_s, value in series.points if value is not None]
        for (_, before), (at_s, value) in pairwise([(started_s, 0.0), *points]):
            grown[at_s][series.labels["state"]] += max(0.0, value - before)
    ends = [end for end in sorted(grown) if any(grown[end].values())]  # the counters of an ended run no longer grow
    seen = [state for state in RUN_STATES if any(grown[end].get(state) for end in ends)]
    columns = {state: tuple(grown[end].get(state, 0.0) for end in ends) for state in seen}
    return model.LedgerOverTime(tuple(ends), columns)


def _cost(ranks: Sequence[Run], prices: Prices | None) -> Cost | None:
    """Return the ranks' costs together: by the prices given here, else as the agent has them; None if none is known."""
    if prices is None or prices.gpu_hour is None:
        costs = [rank.cost for rank in ranks]
    else:
        held = ((rank, prices.hourly(rank.gpus, rank.gpu_share), sum(rank.energy_joules.values())) for rank in ranks)
        costs = [cost_of(rank.states, of, prices.currency, joules, prices.kwh) for rank, of, joules in held]
    return total_cost([cost for cost in costs if cost is not None])


def merge_findings(
    rows: Sequence[Finding], conclusions: Mapping[int, finding.Conclusion], span: tuple[float, float]
) -> tuple[model.Found, ...]:
    """Return one entry a cause: what ended the run, then roots by the time they cost, each before its consequences.

    What a rank has concluded at its end, by rank, comes first, unchanged. `span` is the run's time.
    """
    by_cause: dict[tuple[int, str, str], list[Finding]] = {}
    for row in sorted(rows, key=lambda row: row.since_s or 0.0):
        by_cause.setdefault((row.rank or 0, row.cause, row.gpu or ""), []).append(row)
    concluded = {(n, each.cause, each.gpu or ""): each for n, of in conclusions.items() for each in of.findings}
    kept = {key: of[-1] for key, of in by_cause.items() if not _is_superseded(of[-1], conclusions.get(key[0]))}
    place = {key: number for number, key in enumerate(concluded)}
    found = [
        model.Found(
            **{name: getattr(last, name) for name in finding.Finding.__struct_fields__ if name != "rank"},
            rank=key[0],
            episodes=tuple((row.since_s or 0.0, row.seen_s or 0.0) for row in by_cause.get(key, ())) or (span,),
            stacks=next((row.stacks for row in reversed(by_cause.get(key, ())) if row.stacks is not None), None),
        )
        for key, last in (kept | concluded).items()
    ]
    found.sort(key=lambda f: (f.severity == "info", -f.ratio * max(f.active_s, 1.0)))
    found.sort(key=lambda f: (f.cause not in _ENDS_A_RUN, place.get((f.rank, f.cause, f.gpu or ""), len(place))))
    causes = {(each.rank, each.cause) for each in found}
    # a consequence without its root is a root
    found = [f if (f.rank, f.root) in causes else msgspec.structs.replace(f, root=None) for f in found]
    return tuple(after_roots(found, of_one_rank=True))


def _is_superseded(row: Finding, conclusion: finding.Conclusion | None) -> bool:
    """Whether an earlier cause is left out: the rank's conclusion explains the same, or it says little by itself."""
    if conclusion is None or row.cause in _ENDS_A_RUN or row.gpu is not None:
        return False
    rule = BY_CAUSE.get(row.cause)
    explained = {BY_CAUSE[each.cause].alert for each in conclusion.findings if each.cause in BY_CAUSE}
    return rule is None or row.severity == "info" or rule.fallback or (rule.alert or "") in explained
