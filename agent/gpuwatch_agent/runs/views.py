"""The JSON that the API gives, as plain dicts: see docs/api.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import msgspec

from gpuwatch import wire
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.costs import cost_of
from gpuwatch.finding import Finding
from gpuwatch.stacks.causes import LOOK_AT, WORKERS
from gpuwatch.stacks.records import Stacks
from gpuwatch.stacks.words import evidence as stack_evidence
from gpuwatch.throughput import Done, throughput
from gpuwatch.verdict import Verdict
from gpuwatch.window import Window
from gpuwatch_agent.runs import Run

View = dict[str, Any]


@dataclass
class ActiveFinding:
    """A finding as it is now."""

    finding: Finding
    since_s: float
    """Unix time of the first sign."""
    seen_s: float
    since_ns: int
    seen_ns: int
    """The same on the agent's monotonic clock: the wall clock may be set."""
    active: bool = False
    stacks_taken: bool = False
    """Stacks were requested."""
    stacks: Stacks | None = None
    """The processes' stacks when it began, where they were taken."""


@dataclass(frozen=True)
class Evaluation:
    """What was found of a run, as the API shows it."""

    recent: View | None
    verdict: View | None
    findings: list[View]


def run_view(
    run: Run, evaluation: Evaluation, wall_offset_ns: int, host_pid: int | None = None, prices: Prices | None = None
) -> View:
    """Return one entry of /api/v1/runs."""
    hello, counts, ledger = run.hello, run.counts, run.ledger
    states_s = {} if ledger is None else {state: ns / 1e9 for state, ns in ledger.totals_ns.items() if ns}
    gpus = list(run.gpus.values())
    cost = None if prices is None else cost_of(states_s, prices.hourly(gpus), prices.currency)
    return {
        "run": run.run,
        "rank": run.rank,
        "name": hello.name if hello is not None else run.run,
        "job": hello.job if hello is not None else "",
        "host": hello.host if hello is not None else "",
        "pid": hello.pid if hello is not None else None,
        "host_pid": host_pid,
        "user": run.user,
        "owner": {name: value or None for name, value in msgspec.structs.asdict(run.owner).items() if name != "user"},
        "status": run.status,
        "world_size": hello.world_size if hello is not None else 1,
        "timeline": hello.timeline if hello is not None else "host",
        "device": hello.device if hello is not None else "",
        "started_s": run.started_s,
        "watermark_s": run.started_s if ledger is None else (ledger.watermark_ns + wall_offset_ns) / 1e9,
        "last_message_s": run.last_message_s,
        "steps": counts.steps,
        "samples": counts.samples if counts.samples >= 0 else None,
        "tokens": counts.tokens if counts.tokens >= 0 else None,
        "records_lost": run.lost,
        "activity": run.activity,
        "states": states_s,
        "gpus": gpus,
        "cost": None if cost is None else msgspec.to_builtins(cost),
        "recent": evaluation.recent,
        "verdict": evaluation.verdict,
        "findings": evaluation.findings,
        "loader": loader_view(hello),
        "versions": hello.versions if hello is not None else {},
        "tags": hello.tags if hello is not None else {},
    }


def loader_view(hello: wire.Hello | None) -> View | None:
    """Return the loader's settings, None where they are not known."""
    loader = hello.loader if hello is not None else None
    if loader is None:
        return None
    return {name: getattr(loader, name) for name in loader.__struct_fields__ if name != "worker_pids"}


def finding_view(entry: ActiveFinding) -> View:
    """Return a finding with the time of its first sign, and with the evidence from stacks."""
    finding, stacks = entry.finding, entry.stacks
    if stacks is None:
        return {**msgspec.to_builtins(finding), "since_s": entry.since_s, "stacks": None}
    seen = stack_evidence(stacks, LOOK_AT.get(finding.cause) != WORKERS)
    shown = replace(finding, evidence=(*finding.evidence, *seen))
    return {**msgspec.to_builtins(shown), "since_s": entry.since_s, "stacks": msgspec.to_builtins(stacks)}


def finding_json(entry: ActiveFinding) -> str:
    return json.dumps(finding_view(entry))


def verdict_view(verdict: Verdict | None) -> View | None:
    return None if verdict is None else asdict(verdict)


def recent_view(run: Run, window: Window) -> View | None:
    """Return the figures of the last minute; None without any step in it."""
    steps = window.steps
    if not window.states_s or not len(steps):
        return None
    totals = sorted(map(sum, zip(steps.data_wait_s, steps.transfer_s, steps.compute_s, strict=True)))
    columns = run.steps.columns()
    # Steps are kept for a minute, or as many as there is room for: their own span is what their rate is over.
    span_s = max((columns.end_ns[-1] - columns.end_ns[0]) / 1e9, sum(totals[:1])) if len(steps) > 1 else totals[0]
    per_s = len(steps) / span_s if span_s > 0 else None
    known = per_s is not None and min(columns.samples) >= 0
    tokens_a_step = run.minute.tokens_a_step()
    done = Done(
        span_s,
        len(steps),
        sum(columns.samples) if known else None,
        None if tokens_a_step is None else tokens_a_step * len(steps),
    )
    rates = throughput(done, run.hello.flops if run.hello is not None else None)
    return {
        "duration_s": window.duration_s,
        "states": dict(window.states_s),
        "step_s_p50": median(totals),
        "step_s_p95": totals[min(len(totals) - 1, int(0.95 * len(totals)))],
        "data_wait_s_p50": median(steps.data_wait_s),
        "steps_per_s": per_s,
        "samples_per_s": rates.samples_per_s,
        "tokens_per_s": rates.tokens_per_s,
        "flops_per_s": rates.flops_per_s,
        "mfu_ratio": rates.mfu_ratio,
    }
