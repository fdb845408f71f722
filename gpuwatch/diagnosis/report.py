"""What a run came to: seconds by state, findings, and the verdict as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from gpuwatch.diagnosis.cost import Cost, cost_of, money
from gpuwatch.diagnosis.diagnose import Finding, diagnose
from gpuwatch.diagnosis.finding import Verdict
from gpuwatch.diagnosis.throughput import Done, Throughput, throughput
from gpuwatch.diagnosis.verdict import give_verdict
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import COMPUTE, shares
from gpuwatch.wire import Flops

_WHOLE = 0.95
"""Share of the steps that counts as all of them: the last ones are still on the device."""


@dataclass(frozen=True)
class Report:
    """All wall time of a run since its `Watch` was opened. `str()` is the verdict for people."""

    run: str
    name: str
    duration_s: float
    states: Mapping[str, float]
    """Seconds by state; their sum is `duration_s`."""
    provisional: Mapping[str, float]
    """The part of `states` that is not final yet: an open step or pause, as it looks now."""
    steps: int
    samples: int | None
    """Training samples, None where no batch told its size."""
    tokens: int | None
    """Training tokens, None where nobody counted them."""
    throughput: Throughput
    """While training: over the time of training steps, waits for data included, evaluations and start-up not."""
    step_s: float | None
    """Median time of a training step, the wait for its batch included; None without steps."""
    timeline: str
    """"host" or "device": which clock the states come from."""
    device: str
    coverage: float
    """Share of the steps whose time is by the device's own timeline, 0–1; 0 where there is none."""
    unverified_ratio: float
    """Share of the steps in which work on another device or stream was seen: there the input wait is not certain."""
    hook_s: float | None
    """The training thread's time in gpuwatch itself, as metered on some steps; None where it was not."""
    verdict: Verdict
    findings: tuple[Finding, ...]
    cost: Cost | None = None
    """What this rank's GPU cost, where GPUWATCH_GPU_HOUR tells a price; None on a CPU."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of each state in the whole, 0–1, largest first."""
        return shares(self.states)

    def __str__(self) -> str:
        return render(self)


def make_report(
    run: str,
    name: str,
    window: Window,
    provisional_s: Mapping[str, float],
    done: Done,
    flops: Flops | None = None,
    hook_s: float | None = None,
    price: tuple[float, str] | None = None,
) -> Report:
    """Return the report of a window that covers a whole run."""
    findings = diagnose(window)
    columns = window.steps
    totals = [sum(parts) for parts in zip(columns.data_wait_s, columns.transfer_s, columns.compute_s, strict=True)]
    return Report(
        run=run,
        name=name,
        duration_s=window.duration_s,
        states=dict(window.states_s),
        provisional=dict(provisional_s),
        steps=done.steps,
        samples=None if done.samples is None else int(done.samples),
        tokens=None if done.tokens is None else int(done.tokens),
        throughput=throughput(done, flops),
        step_s=median(totals) if totals else None,
        timeline=window.timeline,
        device=window.device,
        coverage=window.coverage,
        unverified_ratio=window.unverified_ratio,
        hook_s=hook_s,
        verdict=give_verdict(window, findings),
        findings=tuple(findings),
        cost=cost_of(window.states_s, [price[0]], price[1])
        if price and window.device in ("cuda", "jax:cuda")
        else None,
    )


def render(report: Report, width: int = 100) -> str:
    """Return the verdict as a few lines of text: the sentence, where the time went, why, and what to do."""
    head = f"gpuwatch · {report.name} · {duration(report.duration_s)}, {report.steps:,} steps"
    if report.step_s is not None:
        head += f" of {duration(report.step_s)}"
    ledger = "  ".join(f"{state} {percent(share)}" for state, share in report.shares.items() if share >= 0.001)
    lines = [head, f"  {report.verdict.sentence}", f"  {'where':<6}{ledger}{_clock(report)}"]
    lines += _rates(report)
    lines += _cost(report)
    for finding in [each for each in report.findings if each.root is None][:3]:
        why = "; ".join(evidence.text for evidence in finding.evidence)
        lines += _wrapped("why", f"{finding.title}: {why}", width)
        gain = f" ({finding.gain} the throughput)" if finding.gain else ""
        lines += _wrapped("do", finding.advice + gain, width)
    return "\n".join(lines)


def _clock(report: Report) -> str:
    """Return which clock the states come from where that is to be known, and how far it is to be trusted."""
    notes = []
    if report.timeline != "device" and report.device != "cpu":
        notes.append("host clock")
    if report.timeline == "device" and report.coverage < _WHOLE:
        notes.append(f"device events on {percent(report.coverage)} of the steps")
    if report.unverified_ratio >= 1 - _WHOLE:
        notes.append(
            f"input wait unverified: {percent(report.unverified_ratio)} of the steps use other streams or devices"
        )
    return f"  ({'; '.join(notes)})" if notes else ""


def _rates(report: Report) -> list[str]:
    """Return the line of what the user had counted or declared, none where nothing was."""
    rates = report.throughput
    parts = []
    if rates.tokens_per_s is not None:
        parts.append(f"{rates.tokens_per_s:,.0f} tokens/s")
    if rates.flops_per_s is not None:
        parts.append(f"{rates.flops_per_s / 1e12:.3g} TFLOP/s")
    if rates.mfu_ratio is not None:
        parts.append(f"MFU {percent(rates.mfu_ratio)}")
    return [f"  rate  {'  '.join(parts)}"] if parts else []


def _cost(report: Report) -> list[str]:
    """Return the line of what the GPU cost, and what of it was the largest loss; none without a price."""
    cost = report.cost
    if cost is None:
        return []
    lost = {state: amount for state, amount in cost.states.items() if state != COMPUTE}
    worst = max(lost, key=lambda state: lost[state], default=None)
    more = f", {money(lost[worst], cost.currency)} of it {worst}" if worst is not None else ""
    return [
        f"  cost  {money(cost.total, cost.currency)}{more} (one GPU at {money(cost.per_hour, cost.currency)} an hour)"
    ]


def _wrapped(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {label:<6}",
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
