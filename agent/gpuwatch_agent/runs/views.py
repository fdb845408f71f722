"""Runs and findings as the structs of gpuwatch.api."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from gpuwatch import api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis.finding import Finding
from gpuwatch.diagnosis.rates import Done, cost_of, throughput
from gpuwatch.diagnosis.rules import BY_CAUSE
from gpuwatch.diagnosis.window import Window
from gpuwatch.ledger.states import percentile
from gpuwatch.tools.stacks.records import Stacks
from gpuwatch.tools.stacks.records import evidence as stack_evidence
from gpuwatch_agent.runs import ENDED, Run


@dataclass
class ActiveFinding:
    """A finding as it is now."""

    finding: Finding
    since_s: float  # Unix time when it was first seen
    seen_s: float
    since_ns: int
    seen_ns: int  # the same on the agent's monotonic clock: the wall clock may be set
    active: bool = False
    brief: str = ""  # the finding's own, as it was once its numbers had settled; empty: not yet
    has_gain: bool = False  # `brief` names one: of a short run none is predicted
    stacks_taken: bool = False  # stacks were requested
    stacks: Stacks | None = None  # the processes' stacks when it began; None: none were taken


def run_view(run: Run, prices: Prices, watermark_s: float | None = None, **live: Any) -> api.Run:
    """Return a run's entry of /api/v1/runs. `watermark_s` and `live` are a live one's; else the history keeps it."""
    hello, counts, gpus, joules = run.hello, run.counts, tuple(run.gpus.values()), dict(run.energy_joules)
    states_s = {state: ns / 1e9 for state, ns in run.ledger.totals_ns.items() if ns} if run.ledger is not None else {}
    share = max(0.0, 1 - run.lent_s / max(1e-9, sum(states_s.values()) * len(gpus)))
    about: dict[str, Any] = {"name": run.run, "timeline": "host"} | {name: getattr(run, name) for name in _OF_RUN}
    if hello is not None:
        about |= {name: getattr(hello, name) for name in _OF_HELLO} | {"pid": hello.pid or None}
    if run.status == ENDED and run.conclusion is not None:
        about["conclusion"], live["verdict"] = run.conclusion, run.conclusion.verdict
    return api.Run(
        **about,
        **live,
        watermark_s=_last_s(run, sum(states_s.values())) if watermark_s is None else watermark_s,
        owner=api.Owner(*(getattr(run.owner, name) or None for name in api.Owner.__struct_fields__)),
        steps=counts.steps,
        samples=counts.samples if counts.samples >= 0 else None,
        tokens=counts.tokens if counts.tokens >= 0 else None,
        records_lost=run.lost,
        states=states_s,
        phases={name: ns / 1e9 for name, ns in counts.declared_ns.items()},
        breakdown={name: ns / 1e9 for name, ns in counts.breakdown_ns.items()},
        energy_joules=joules,
        attempts=run.job.attempts if run.job is not None else 1,
        goodput_ratio=run.job.goodput_ratio if run.job is not None else None,
        goodput_is_exact=run.job is None or run.job.attempts == 1 or run.job.repeated_s is not None,
        gpus=gpus,
        gpu_share=share,
        cost=cost_of(states_s, prices.hourly(gpus, share), prices.currency, sum(joules.values()), prices.kwh),
    )


def _last_s(run: Run, spent_s: float) -> float:
    """Return up to when a run that is no longer live is known: its last process may have begun long after the first."""
    sent = [(each, sum(each.sent.states_ns.values()) / 1e9) for each in run.senders.values() if each.sent is not None]
    return max([run.started_s + spent_s, *(each.started_s - (each.moved_s or 0.0) + of_it_s for each, of_it_s in sent)])


_OF_RUN = ("run", "rank", "status", "started_s", "last_message_s", "user")
_OF_HELLO = ("name", "job", "host", "pid", "world_size", "timeline", "device", "versions", "tags", "loader")


def finding_view(entry: ActiveFinding) -> api.Finding:
    """Return a finding with its begin and the evidence of its stacks."""
    finding, stacks = entry.finding, entry.stacks
    fields = msgspec.structs.asdict(finding)
    if stacks is not None:
        fields["evidence"] += tuple(stack_evidence(stacks, BY_CAUSE[finding.cause].stacks != "workers"))
    return api.Finding(**fields, since_s=entry.since_s, stacks=stacks)


def recent_view(run: Run, window: Window) -> api.Recent | None:
    """Return the figures of the last minute; None without any step in it."""
    steps = run.steps
    if not window.states_s or not steps:
        return None
    totals, first = sorted(steps.step_s), int(len(steps) > 1)
    # Steps are kept for a minute, or up to a maximum: the rate is that since the first one of several has ended.
    span_s = (steps.end_ns[-1] - steps.end_ns[0]) / 1e9 if first else totals[0]
    count, counted = len(steps) - first, steps.samples[first:]
    _, _, now, then = run.recent()
    samples = sum(counted) if span_s > 0 and min(counted) >= 0 else None
    tokens = None
    if now.tokens >= 0 and now.steps > then.steps:
        tokens = (now.tokens - max(0, then.tokens)) / (now.steps - then.steps) * count
    done = Done(span_s, count, samples, tokens)
    return api.Recent(
        duration_s=window.duration_s,
        states=dict(window.states_s),
        step_s_p50=median(totals),
        step_s_p95=percentile(totals, 95),
        data_wait_s_p50=median(steps.data_wait_s),
        steps_per_s=count / span_s if span_s > 0 else None,
        mfu_estimated_ratio=window.mfu_estimate,
        **msgspec.structs.asdict(throughput(done, run.hello.flops if run.hello is not None else None)),
    )
