"""Runs and findings as the structs of gpuwatch.api."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from statistics import median
from typing import Any, cast

import msgspec

from gpuwatch import api, wire
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis.finding import Finding, Verdict
from gpuwatch.diagnosis.rates import Done, cost_of, throughput
from gpuwatch.diagnosis.rules import BY_CAUSE
from gpuwatch.diagnosis.window import Window
from gpuwatch.tools.stacks.records import Stacks
from gpuwatch.tools.stacks.records import evidence as stack_evidence
from gpuwatch_agent.runs import Run
from gpuwatch_agent.runs.records import RunRecord, add_counters


@dataclass
class ActiveFinding:
    """A finding as it is now."""

    finding: Finding
    since_s: float
    """Unix time when it was first seen."""
    seen_s: float
    since_ns: int
    seen_ns: int
    """The same on the agent's monotonic clock: the wall clock may be set."""
    active: bool = False
    stacks_taken: bool = False
    """Stacks were requested."""
    stacks: Stacks | None = None
    """The processes' stacks when it began; None: none were taken."""


@dataclass(frozen=True)
class Evaluation:
    """A run's last minute, verdict and findings, as in the API."""

    recent: api.Recent | None
    verdict: Verdict | None
    findings: tuple[api.Finding, ...]


def run_view(
    run: Run, evaluation: Evaluation, wall_offset_ns: int, host_pid: int | None = None, prices: Prices | None = None
) -> api.Run:
    """Return a live run's entry of /api/v1/runs."""
    ledger = run.ledger
    return _view(
        run,
        {} if ledger is None else ledger.totals_ns,
        run.counts,
        prices,
        watermark_s=run.started_s if ledger is None else (ledger.watermark_ns + wall_offset_ns) / 1e9,
        host_pid=host_pid,
        activity=run.activity,
        recent=evaluation.recent,
        verdict=evaluation.verdict,
        findings=evaluation.findings,
    )


def record_view(record: RunRecord, prices: Prices | None = None) -> api.Run:
    """Return the same of a run that only the history keeps; without `prices` no cost."""
    counts = reduce(add_counters, (sender.sent for sender in record.senders), record.before)
    watermark_s = record.started_s + sum(record.states_ns.values()) / 1e9
    return _view(record, record.states_ns, counts, prices, watermark_s=watermark_s)


def _view(
    run: Run | RunRecord, states_ns: Mapping[str, int], counts: wire.Counters, prices: Prices | None, **more: Any
) -> api.Run:
    hello = run.hello
    states_s, gpus = {state: ns / 1e9 for state, ns in states_ns.items() if ns}, tuple(run.gpus.values())
    if hello is not None:
        more |= {name: getattr(hello, name) for name in _OF_HELLO}
        more["loader"] = None if hello.loader is None else hello.loader.settings()
    return api.Run(
        run=run.run,
        rank=run.rank,
        **{"name": run.run, "timeline": "host", **more},
        status=cast(api.RunStatus, run.status),
        started_s=run.started_s,
        last_message_s=run.last_message_s,
        user=run.user,
        owner=api.Owner(*(getattr(run.owner, name) or None for name in api.Owner.__struct_fields__)),
        steps=counts.steps,
        samples=counts.samples if counts.samples >= 0 else None,
        tokens=counts.tokens if counts.tokens >= 0 else None,
        records_lost=run.lost,
        states=states_s,
        phases={name: ns / 1e9 for name, ns in counts.declared_ns.items()},
        gpus=gpus,
        cost=None if prices is None else cost_of(states_s, prices.hourly(gpus), prices.currency),
    )


_OF_HELLO = ("name", "job", "host", "pid", "world_size", "timeline", "device", "versions", "tags")


def finding_view(entry: ActiveFinding) -> api.Finding:
    """Return a finding with its begin and the evidence of its stacks."""
    finding, stacks = entry.finding, entry.stacks
    fields = msgspec.structs.asdict(finding)
    if stacks is not None:
        fields["evidence"] += tuple(stack_evidence(stacks, BY_CAUSE[finding.cause].stacks != "workers"))
    return api.Finding(**fields, since_s=entry.since_s, stacks=stacks)


def recent_view(run: Run, window: Window) -> api.Recent | None:
    """Return the figures of the last minute; None without any step in it."""
    steps = window.steps
    if not window.states_s or not len(steps):
        return None
    totals = sorted(map(sum, zip(steps.data_wait_s, steps.transfer_s, steps.compute_s, strict=True)))
    columns = run.steps.columns()
    # Steps are kept for a minute, or up to a maximum: the rate is over their own span.
    span_s = max((columns.end_ns[-1] - columns.end_ns[0]) / 1e9, sum(totals[:1])) if len(steps) > 1 else totals[0]
    per_s = len(steps) / span_s if span_s > 0 else None
    known = per_s is not None and min(columns.samples) >= 0
    tokens = run.minute.tokens_per_step()
    done = Done(
        span_s,
        len(steps),
        sum(columns.samples) if known else None,
        None if tokens is None else tokens * len(steps),
    )
    rates = throughput(done, run.hello.flops if run.hello is not None else None)
    return api.Recent(
        duration_s=window.duration_s,
        states=dict(window.states_s),
        step_s_p50=median(totals),
        step_s_p95=totals[min(len(totals) - 1, int(0.95 * len(totals)))],
        data_wait_s_p50=median(steps.data_wait_s),
        steps_per_s=per_s,
        samples_per_s=rates.samples_per_s,
        tokens_per_s=rates.tokens_per_s,
        flops_per_s=rates.flops_per_s,
        mfu_ratio=rates.mfu_ratio,
    )
