"""Make a `RunReport` from what a source knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

import msgspec

from gpuwatch import __version__
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.api import LastSteps, Run, RunSource
from gpuwatch.diagnosis.finding import Verdict
from gpuwatch.diagnosis.rates import Cost, cost_of, total_cost
from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.window import StepColumns, Window
from gpuwatch.ledger.states import RUN_STATES, shares
from gpuwatch.tools.reports import model
from gpuwatch.tools.reports.choosing import choose
from gpuwatch.tools.reports.findings import merge
from gpuwatch.tools.reports.statistics import block_means, mean_interval, quantile
from gpuwatch.tools.reports.step_plot import GROUPS, of_buckets, of_steps, step_totals

_INTERVALS = 120
_STEPS = 20_000
_MISSED = 0.01
"""Share of a run's step records that may be missing for other reasons than that they are old."""


def gather(source: RunSource, wanted: str, now_s: float, prices: Prices | None = None) -> model.RunReport:
    """Return the report of a run: its id, its name, or `last`. `now_s` is when the report is made; `prices` go before the agent's.

    Raises: ConfigError where there is no such run.
    """
    ranks = choose(source, wanted)
    first = ranks[0]
    run = first.run
    states = _summed(ranks)
    until_s = max(rank.watermark_s for rank in ranks)
    taken = source.last_steps(run, first.rank, _STEPS)
    columns, times = _columns(taken) if taken else (StepColumns(), [])
    of_last = _of_last(first, taken, columns)
    samples = [rank.samples for rank in ranks if rank.samples is not None]
    return model.RunReport(
        schema=model.SCHEMA,
        gpuwatch=__version__,
        generated_s=now_s,
        run=run,
        name=first.name,
        status=_status(ranks),
        user=first.user,
        job=first.job,
        host=first.host,
        device=first.device,
        timeline="device" if columns.hidden_wait_s else first.timeline,
        world_size=first.world_size,
        started_s=min(rank.started_s for rank in ranks),
        until_s=until_s,
        duration_s=sum(states.values()),
        states=states,
        shares=shares(states),
        steps=first.steps,
        samples=sum(samples) if samples else None,
        records_lost=sum(rank.records_lost for rank in ranks),
        verdict=_verdict(first, states, columns),
        step_time=_statistics(columns, of_last),
        findings=merge(source.findings(run)),
        ranks=tuple(
            model.Rank(rank.rank, rank.host, rank.pid, rank.status, rank.steps, _ordered(rank.states)) for rank in ranks
        ),
        loader=None if first.loader is None else msgspec.structs.asdict(first.loader),
        versions=dict(first.versions),
        tags=dict(first.tags),
        gpus=_gpu_models(source, run, min(rank.started_s for rank in ranks), now_s),
        over_time=_over_time(source, run, min(rank.started_s for rank in ranks), until_s),
        steps_over_time=_steps_over_time(source, first, columns, times, taken is not None and of_last is None),
        cost=_cost(ranks, prices),
    )


def _status(ranks: Sequence[Run]) -> str:
    found = {rank.status for rank in ranks}
    return next(status for status in ("lost", "running", "ended") if status in found)


def _ordered(states: Mapping[str, float]) -> dict[str, float]:
    return {state: states[state] for state in RUN_STATES if states.get(state)}


def _summed(ranks: Sequence[Run]) -> dict[str, float]:
    return _ordered({state: sum(rank.states.get(state, 0.0) for rank in ranks) for state in RUN_STATES})


def _verdict(first: Run, states: dict[str, float], columns: StepColumns) -> Verdict:
    window = Window(
        duration_s=sum(states.values()),
        states_s=states,
        timeline="device" if columns.hidden_wait_s else first.timeline,
        device=first.device,
        steps=columns,
    )
    return give_verdict(window)


def _columns(taken: LastSteps) -> tuple[StepColumns, list[float]]:
    """Return steps as a diagnosis sees them, with the begin of each; rows without host times are left out."""
    waits, copies, rests, hidden, firsts, times = [], [], [], [], [], []
    on_device = False
    for index, begin_s in enumerate(taken.time_s):
        wait, copy, rest = (column[index] for column in (taken.data_wait_s, taken.transfer_s, taken.compute_s))
        if wait is None or copy is None or rest is None:
            continue
        exposed = taken.input_wait_s[index]
        if exposed is not None:
            on_device = True
            hidden.append(max(0.0, wait - exposed))
            wait, copy = exposed, taken.device_transfer_s[index] or 0.0
            rest = (taken.device_compute_s[index] or 0.0) + (taken.host_wait_s[index] or 0.0)
        else:
            hidden.append(0.0)
        waits.append(wait)
        copies.append(copy)
        rests.append(rest)
        firsts.append(bool(taken.epoch_start[index]))
        times.append(begin_s)
    columns = StepColumns(tuple(waits), tuple(copies), tuple(rests), tuple(firsts), tuple(hidden) if on_device else ())
    return columns, times


def _statistics(columns: StepColumns, of_last: int | None) -> model.StepStatistics | None:
    kept = [index for index, first in enumerate(columns.epoch_start) if not first]
    if not kept:
        return None
    every = step_totals(columns)
    totals = [every[index] for index in kept]
    ordered = sorted(totals)
    blocks = block_means(totals)
    return model.StepStatistics(
        measured=len(totals),
        mean_s=fmean(totals),
        mean_interval_s=mean_interval(blocks),
        median_s=median(ordered),
        p05_s=quantile(ordered, 0.05),
        p95_s=quantile(ordered, 0.95),
        data_wait_s=fmean(columns.data_wait_s[index] for index in kept),
        transfer_s=fmean(columns.transfer_s[index] for index in kept),
        compute_s=fmean(columns.compute_s[index] for index in kept),
        block_means_s=blocks,
        of_last=of_last,
    )


def _of_last(first: Run, taken: LastSteps | None, columns: StepColumns) -> int | None:
    """Return how many of its last steps were taken, None for all of those whose records came."""
    expected, count = first.steps - first.records_lost, len(columns)
    if taken is None or count >= expected:
        return None
    older = count >= _STEPS or taken.first_step > 0 or count < (1 - _MISSED) * expected
    return count if older else None


def _steps_over_time(
    source: RunSource, first: Run, columns: StepColumns, times: Sequence[float], whole: bool
) -> model.StepsOverTime:
    if whole or not first.steps:
        return of_steps(columns, times)
    condensed = source.steps(first.run, first.rank, GROUPS)
    return of_steps(columns, times) if condensed is None else of_buckets(condensed)


def _over_time(source: RunSource, run: str, started_s: float, until_s: float) -> model.LedgerOverTime:
    """Return the growth of the run's counters, of all ranks, in at most 120 intervals."""
    found = source.series("gpuwatch_run_seconds_total", {"run": run}, started_s, until_s + 2, _INTERVALS)
    grown: dict[float, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for series in found:
        points = [(at_s, value) for at_s, value in series.points if value is not None]
        state = series.labels["state"]
        if points:
            grown[points[0][0]][state] += points[0][1]  # what had passed before the agent's first look
        for (_, before), (at_s, value) in pairwise(points):
            grown[at_s][state] += max(0.0, value - before)
    ends = [end for end in sorted(grown) if any(grown[end].values())]  # of an ended run the counters stand still
    seen = [state for state in RUN_STATES if any(grown[end].get(state) for end in ends)]
    return model.LedgerOverTime(
        tuple(ends), {state: tuple(grown[end].get(state, 0.0) for end in ends) for state in seen}
    )


def _gpu_models(source: RunSource, run: str, started_s: float, now_s: float) -> tuple[str, ...]:
    """Return the models of the GPUs whose owner the run was."""
    owned = source.series("gpuwatch_gpu_owner_info", {"run": run}, started_s, now_s, 2)
    uuids = {series.labels["UUID"] for series in owned}
    if not uuids:
        return ()
    infos = source.series("gpuwatch_gpu_info", {}, started_s, now_s, 2)
    models = {s.labels["UUID"]: s.labels.get("modelName") or s.labels.get("model") for s in infos}
    return tuple(models.get(uuid) or "GPU" for uuid in sorted(uuids))


def _cost(ranks: Sequence[Run], prices: Prices | None) -> Cost | None:
    """Return the sum of the ranks' costs, at the prices given here or else at those of the agent; None without any."""
    if prices is not None and prices.gpu_hour is not None:
        return total_cost(
            [
                cost
                for rank in ranks
                if (cost := cost_of(rank.states, prices.hourly(rank.gpus), prices.currency)) is not None
            ]
        )
    return total_cost([rank.cost for rank in ranks if rank.cost is not None])
