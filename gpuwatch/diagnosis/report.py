"""The verdict on a window, and the report of a run: seconds by state, findings, and the verdict as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from gpuwatch.diagnosis.finding import Finding, Verdict
from gpuwatch.diagnosis.rates import Cost, Done, Throughput, cost_of, money, throughput
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import (
    CHECKPOINT,
    COMM_WAIT,
    COMPUTE,
    EVAL,
    HOST_WAIT,
    INPUT_WAIT,
    OTHER,
    STALLED,
    STARTUP,
    TRANSFER,
    UNKNOWN,
    shares,
)
from gpuwatch.wire import Flops

_WHOLE = 0.95
"""Share of the steps that counts as all of them: the device has not finished the last ones."""


@dataclass(frozen=True)
class Report:
    """All wall time of a run since its `Watch` was opened. `str()` is the verdict for people."""

    run: str
    name: str
    duration_s: float
    states: Mapping[str, float]
    """Seconds by state; their sum is `duration_s`."""
    phases: Mapping[str, float]
    """The part of `other` in declared phases, in seconds by their names; those after the first eight names are "rest"."""
    provisional: Mapping[str, float]
    """The part of `states` that is not final yet: an open step or pause."""
    steps: int
    samples: int | None
    """Training samples; None: no batch has a known size."""
    tokens: int | None
    """Training tokens; None: not counted."""
    throughput: Throughput
    """Over the time of training steps, waits for data included; evaluation and start-up are not."""
    step_s: float | None
    """Median time of a training step, including the wait for its batch; None without steps."""
    timeline: str
    """"host" or "device": the timeline that the states come from."""
    device: str
    coverage: float
    """Share of the steps that the device timeline measured, 0–1; 0 where there is none."""
    unverified_ratio: float
    """Share of the steps with work on another device or stream, whose input wait is not certain."""
    hook_s: float | None
    """The training thread's time in gpuwatch itself, as metered on some steps; None: not metered."""
    verdict: Verdict
    findings: tuple[Finding, ...]
    cost: Cost | None = None
    """Cost of this rank's GPU, at the price in GPUWATCH_GPU_HOUR; None without a price, or on a CPU."""
    training_s: float = 0.0
    """Time of all training steps, waits for data included."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of the whole by state, 0–1, largest first."""
        return shares(self.states)

    def metrics(self, since: Report | None = None) -> dict[str, float]:
        """Return the run as numbers with stable names, for an experiment tracker; docs/guides/trackers.md lists them.

        `since` is an earlier report of the same run: everything is then of the time between the two. What was not measured is absent.
        """
        return metrics(self, since)

    def __str__(self) -> str:
        return render(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Return the verdict for a notebook."""
        from gpuwatch.diagnosis.html import fragment

        return fragment(self)


def make_report(
    run: str,
    name: str,
    window: Window,
    provisional_s: Mapping[str, float],
    done: Done,
    flops: Flops | None = None,
    hook_s: float | None = None,
    price: tuple[float, str] | None = None,
    thresholds: Thresholds = THRESHOLDS,
) -> Report:
    """Return the report of a window that covers a whole run."""
    window = msgspec.structs.replace(window, is_short=is_short(done.steps, done.seconds, thresholds))
    findings = diagnose(window, thresholds)
    if window.is_short:
        findings = [msgspec.structs.replace(each, predicted_speedup=None, predicted_range=None) for each in findings]
    columns = window.steps
    totals = [sum(parts) for parts in zip(columns.data_wait_s, columns.transfer_s, columns.compute_s, strict=True)]
    return Report(
        run=run,
        name=name,
        duration_s=window.duration_s,
        states=dict(window.states_s),
        phases=dict(window.declared_s),
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
        verdict=give_verdict(window, findings, thresholds),
        findings=tuple(findings),
        cost=cost_of(window.states_s, [price[0]], price[1])
        if price and window.device in ("cuda", "jax:cuda")
        else None,
        training_s=done.seconds,
    )


_RATES = ("samples_per_s", "tokens_per_s", "flops_per_s", "mfu_ratio")


def metrics(report: Report, since: Report | None = None) -> dict[str, float]:
    """See `Report.metrics`."""
    totals = _totals(report)
    if since is not None:
        totals = {name: max(0.0, total - _totals(since).get(name, 0.0)) for name, total in totals.items()}
    seconds = {state: totals.pop(state) for state in report.states}
    found = {
        f"{state}_ratio": each / total_s for state, each in seconds.items() if (total_s := sum(seconds.values())) > 0
    }
    training_s = totals.pop("training_s")
    if training_s > 0 and totals["steps"] > 0:
        found["step_s"] = training_s / totals["steps"]
        found |= {name: totals.pop(name) / training_s for name in _RATES if name in totals}
    found |= {name: total for name, total in totals.items() if name not in _RATES}
    return {f"gpuwatch/{name}": value for name, value in found.items()}


def _totals(report: Report) -> dict[str, float]:
    """Return what only grows: seconds by state, and what was done, a rate as its product with the time of training."""
    rates = {name: getattr(report.throughput, name) for name in _RATES}
    known: dict[str, float | None] = {
        "duration_s": report.duration_s,
        "training_s": report.training_s,
        "steps": report.steps,
        "hook_s": report.hook_s,
        "cost": None if report.cost is None else report.cost.total,
        **{name: None if rate is None else rate * report.training_s for name, rate in rates.items()},
    }
    return {**report.states, **{name: float(total) for name, total in known.items() if total is not None}}


def is_short(steps: int, seconds: float, thresholds: Thresholds = THRESHOLDS) -> bool:
    """Whether a run of so many steps, and so much time in them, is too short for a prediction."""
    return steps < thresholds.short_run_steps or seconds < thresholds.short_run_s


_SENTENCES = {
    INPUT_WAIT: ("input", "input_share", "input-bound: {} of the time training waited for data"),
    TRANSFER: ("transfer", "transfer_share", "transfer-bound: {} of the time went into copies to the device"),
    HOST_WAIT: ("host", "host_wait_share", "host-bound: {} of the time the device waited for host code"),
    COMM_WAIT: ("comm", "phase_share", "waiting for other ranks: {} of the time"),
    EVAL: ("eval", "phase_share", "evaluation takes {} of the time"),
    CHECKPOINT: ("checkpoint", "phase_share", "checkpoints take {} of the time"),
    OTHER: ("other", "phase_share", "{} of the time passed outside of training steps and declared phases"),
    STALLED: ("stalled", "phase_share", "stalled for {} of the time: no step was completed"),
    UNKNOWN: ("unknown", "phase_share", "{} of the time is unknown: the training process sent no data"),
}
"""By state: the verdict's name, the threshold of the share from which it can be the verdict, the sentence."""


def give_verdict(window: Window, findings: Sequence[Finding] = (), thresholds: Thresholds = THRESHOLDS) -> Verdict:
    """Return the verdict on a window.

    The largest loss that is worth a change decides; without one the verdict is `compute`, which is good. A run that is stalled
    now is stalled, whatever it did before. A rank for which the others wait longer than it loses itself is a straggler. Start-up is ignored
    once there are steps: it passes. Of one step there is no verdict.
    """
    if window.stalled_s is not None:
        text = f"stalled: no training step for {duration(window.stalled_s)}"
        return Verdict("stalled", window.share(STALLED), text)
    if not len(window.steps) and window.share(STARTUP) >= window.share(*_SENTENCES):
        return Verdict("startup", window.share(STARTUP), "starting up: no training step yet")
    if window.is_short and len(window.steps):
        return _so_far(window, findings, thresholds)
    spent = sum(window.first_step_s.values())
    first = f" (excluding the first step, which took {duration(spent)})" if spent else ""
    if window.untrained_s:
        first += f" (excluding {duration(sum(window.untrained_s.values()))} of passes without an optimizer step)"
    shares_of = {state: window.share(state) for state in _SENTENCES}
    shares_of[OTHER] -= sum(window.declared.values())
    losses = [
        (share, state, _SENTENCES[state][2].format(percent(share)))
        for state, share in shares_of.items()
        if share >= getattr(thresholds, _SENTENCES[state][1])
    ]
    losses += _of_declared(window.declared, thresholds.phase_share)
    late = max((finding.ratio or 0.0 for finding in findings if finding.cause == "straggler"), default=0.0)
    if late > max(losses, default=(0.0, "", ""))[0]:
        text = f"straggler: the other ranks wait for this one for {percent(late)} of every step"
        return Verdict("straggler", late, text + first)
    if not losses:
        share = window.share(COMPUTE)
        if any(finding.cause == "host_bound" for finding in findings):
            text = f"host-bound: {percent(share)} of the time is compute, but the device runs each kernel as soon as it is launched, and idles in between"
            return Verdict("host", share * (window.kept_up_ratio or 0.0), text + first)
        if waits := next((finding for finding in findings if finding.cause == "step_waits"), None):
            text = f"host-bound: for {percent(waits.ratio)} of the time the step waits, and computes nothing"
            return Verdict("host", waits.ratio, text + first)
        saturated = any(finding.cause == "gpu_saturated" for finding in findings)
        good = "the GPU is saturated" if saturated else "the input keeps up"
        text, waited = f"healthy: {percent(share)} of the time is compute, {good}", window.share(INPUT_WAIT)
        if waited >= thresholds.input_share_mild and share >= 0.5 and window.waits_hidden_in is None:
            what = "passes outside of torch" if window.bounded_by_optimizer else "waits for data"
            text = f"mostly compute; {percent(waited)} of the time {what}: {1 / (1 - waited):.1f}× at most without it"
            text += _by_host_clock(window)
        return Verdict("compute", share, text + first)
    ratio, state, text = max(losses)
    if state == INPUT_WAIT and window.waits_hidden_in is not None:
        text = f"by the host clock the loop waited for data {percent(ratio)} of the time; {window.waits_hidden_in} runs asynchronously"
        return Verdict("unknown", ratio, f"{text}, and for how much of that the device idled was not measured")
    if state == INPUT_WAIT and window.bounded_by_optimizer:
        text = "{} of the time passed between an optimizer step and the next forward pass, outside of torch"
        return Verdict("host", ratio, text.format(percent(ratio)) + first + _by_host_clock(window))
    if state == INPUT_WAIT:
        first += _by_host_clock(window)
    return Verdict(_SENTENCES[state][0], ratio, text + first)


def _of_declared(declared: Mapping[str, float], least: float) -> list[tuple[float, str, str]]:
    """Return (share, state, sentence) of the declared phase that takes most, or of all of them where none reaches `least` alone."""
    whole = sum(declared.values())
    if whole < least:
        return []
    name, share = next(iter(declared.items()))
    if share >= least:
        return [(share, OTHER, f"{name} takes {percent(share)} of the time")]
    return [(whole, OTHER, f"declared phases take {percent(whole)} of the time, {name} the most")]


def _so_far(window: Window, findings: Sequence[Finding], thresholds: Thresholds) -> Verdict:
    """Return the verdict on a run that has only a few steps: what it did so far, and that this promises nothing."""
    count = len(window.steps)
    if count == 1:
        return Verdict("unknown", 1.0, "short: 1 step, too few for a verdict")
    verdict = give_verdict(msgspec.structs.replace(window, is_short=False), findings, thresholds)
    text = f"short: {count} steps, too few for a prediction; so far {verdict.sentence}"
    return msgspec.structs.replace(verdict, sentence=text)


def _by_host_clock(window: Window) -> str:
    """Return what limits the trust in a wait for data; empty where nothing does."""
    if window.timeline == "device" or window.device == "cpu":
        return ""
    return " (by the host clock: work queued on the device may hide part of it)"


def render(report: Report, width: int = 100) -> str:
    """Return the verdict as a few lines of text: the sentence, where the time went, why, and what to do."""
    head = f"gpuwatch · {report.name} · {duration(report.duration_s)}, {report.steps:,} step{'' if report.steps == 1 else 's'}"
    if report.step_s is not None:
        head += f" of {duration(report.step_s)}"
    ledger = "  ".join(f"{state} {percent(share)}" for state, share in report.shares.items() if share >= 0.001)
    lines = [head, f"  {report.verdict.sentence}", f"  {'where':<6}{ledger}{_clock(report)}"]
    lines += _phases(report)
    lines += _rates(report)
    lines += _cost(report)
    for finding in [each for each in report.findings if each.root is None][:3]:
        why = "; ".join(evidence.text for evidence in finding.evidence)
        lines += _wrapped("why", f"{finding.title}: {why}", width)
        gain = f" ({finding.gain} the throughput)" if finding.gain else ""
        lines += _wrapped("do", finding.advice + gain, width)
    return "\n".join(lines)


def _clock(report: Report) -> str:
    """Return what limits the trust in the states: the host clock, few measured steps, other streams; empty if nothing does."""
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


def _phases(report: Report) -> list[str]:
    """Return the line of declared phases that are no states of their own; none without any."""
    whole = sum(report.states.values())
    shown = [(spent / whole, name) for name, spent in report.phases.items() if whole and spent / whole >= 0.001]
    parts = "  ".join(f"{name} {percent(share)}" for share, name in sorted(shown, reverse=True))
    return [f"  {'':<6}{parts} (declared phases, in other)"] if parts else []


def _rates(report: Report) -> list[str]:
    """Return the line of tokens and FLOPs a second; none where neither was counted or declared."""
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
    """Return the line with the cost of the GPU and its largest loss; none without a price."""
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
