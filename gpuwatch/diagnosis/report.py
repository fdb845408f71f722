"""The verdict on a window, and the report of a run: seconds by state, findings, and the verdict as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median
from typing import Any

import msgspec

from gpuwatch.diagnosis.finding import Finding, Verdict
from gpuwatch.diagnosis.rates import Cost, Done, Throughput, cost_of, money, throughput
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.rules.input import between_passes, passes_where
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent, size
from gpuwatch.ledger import states as st
from gpuwatch.tools.reports.display import STATES, counted
from gpuwatch.wire import Flops

_LEAST_START_S, _LEAST_END_S = 1.0, 0.05  # a shorter begin and end of a run is no headline, or not mentioned
_LEAST_STARTUP = 0.02  # share of the time from which start-up is mentioned
_WHOLE = 0.95  # Share of the steps that counts as all of them: the device has not finished the last ones.
_OTHERS_SHOWN = 3
_RATES = ("samples_per_s", "tokens_per_s", "flops_per_s", "mfu_ratio")
_OF_WINDOW = ("duration_s", "timeline", "device", "coverage", "unverified_ratio", "rank", "world_size")


@dataclass(frozen=True, kw_only=True)
class Report:
    """All wall time of a run since its `Watch` was opened. `str()` is the verdict for people."""

    run: str
    name: str
    duration_s: float
    states: Mapping[str, float]  # Seconds by state; their sum is `duration_s`.
    phases: Mapping[str, float]  # The part of `other` in declared phases, in seconds by name; after eight, "rest".
    provisional: Mapping[str, float] = field(default_factory=dict)  # Of `states`: an open step or pause, not final.
    steps: int
    unread_steps: int = 0  # Further ones, which the device had not finished: their time is in `provisional`.
    samples: int | None  # Training samples; None: no batch has a known size.
    tokens: int | None  # Training tokens; None: not counted.
    throughput: Throughput  # Over the time of training steps, waits for data included; evaluation and start-up are not.
    step_s: float | None  # Median time of a training step, including the wait for its batch; None without steps.
    timeline: str  # "host" or "device": the timeline that the states come from.
    device: str
    coverage: float  # Share of the steps that the device timeline measured, 0–1; 0 where there is none.
    unverified_ratio: float  # Share of steps with work on another device or stream, whose input wait is not certain.
    hook_s: float | None = None  # The training thread's time in gpuwatch, as metered on some steps; None: not metered.
    verdict: Verdict
    findings: tuple[Finding, ...]
    cost: Cost | None = None  # Of this rank's GPU, by GPUWATCH_GPU_HOUR; None without a price, or on a CPU.
    training_s: float = 0.0
    rank: int = 0
    world_size: int = 1
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Most bytes of GPU memory that tensors (`allocated`) and torch (`reserved`) held so far; empty: not measured."""
    breakdown: Mapping[str, float] | None = None  # Seconds of compute by section where measured; None: not requested.
    others: Mapping[int, Verdict] = field(default_factory=dict)  # on rank 0: the verdicts of other ranks on themselves

    @property
    def shares(self) -> dict[str, float]:
        """Share of the whole by state, 0–1, largest first."""
        return st.shares(self.states)

    def metrics(self, since: Report | None = None) -> dict[str, float]:
        """Return the run as numbers with stable names, for an experiment tracker; docs/guides/trackers.md lists them.

        `since` is an earlier report of the run: all is then of the time in between. What was not measured is absent.
        """
        before = {} if since is None else _totals(since)
        totals = {name: max(0.0, total - before.get(name, 0.0)) for name, total in _totals(self).items()}
        seconds = {state: totals.pop(state) for state in self.states}
        whole_s, training_s = sum(seconds.values()), totals.pop("training_s")
        rates = {name: totals.pop(name) for name in _RATES if name in totals}
        sections = {name: totals.pop(name) for name in self.breakdown or ()}
        found = {f"{state}_ratio": spent_s / whole_s for state, spent_s in seconds.items() if whole_s > 0}
        if training_s > 0 and totals["steps"] > 0:
            found["step_s"] = training_s / totals["steps"]
            found |= {name: total / training_s for name, total in rates.items()}
        computed_s = sum(sections.values())
        found |= {f"compute_{name}_ratio": spent_s / computed_s for name, spent_s in sections.items() if computed_s > 0}
        found |= {f"memory_{kind}_peak_bytes": float(peak) for kind, peak in self.memory_bytes.items()}
        return {f"gpuwatch/{name}": value for name, value in (found | totals).items()}

    def goes_beyond(self, before: Report | None) -> bool:
        """Whether a step, or more than a moment, has passed since this report: enough to print the verdict again."""
        if before is None or self.steps > before.steps + before.unread_steps:
            return True
        return self.duration_s > 1.02 * before.duration_s + 1.0

    def __str__(self) -> str:
        return render(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Return the verdict for a notebook: a bar of the states and the text, in the colours of the page around it."""
        bar = key = ""
        for look, share in [(STATES[state], share) for state, share in self.shares.items() if share >= 0.001]:
            text, area = f"{look.name} {percent(share)}", f"display:inline-block;background:{look.colour}"
            bar += f'<i title="{text}" style="{area};height:100%;width:{100 * share:.2f}%"></i>'
            square = f'<i style="{area};width:.8em;height:.8em"></i>'
            key += f'<span style="white-space:nowrap;margin-right:1em">{square} {text}</span> '
        return (
            '<div class="gpuwatch" style="max-width:60em">'
            f'<div style="height:1.2em;white-space:nowrap;overflow:hidden;font-size:1em;line-height:0">{bar}</div>'
            f"<div>{key}</div>"
            f'<pre style="white-space:pre-wrap">{escape(str(self))}</pre></div>'
        )

    def html_page(self) -> str:
        """Return the same as a file, without a script, that needs no network."""
        head = '<meta charset="utf-8"><meta name="color-scheme" content="light dark"><meta name="viewport" content="width=device-width">'
        title = f"<title>{escape(self.name)} · gpuwatch</title>"
        return f"<!doctype html><html lang=en><head>{head}{title}</head><body>{self._repr_html_()}</body></html>"


def _totals(report: Report) -> dict[str, float]:
    """Return what only grows: seconds by state, and what was done, a rate as its product with the time of training."""
    rates = {name: getattr(report.throughput, name) for name in _RATES}
    known: dict[str, float | None] = {
        "duration_s": report.duration_s,
        "training_s": report.training_s,
        "steps": report.steps,
        "hook_s": report.hook_s,
        "cost": None if report.cost is None else report.cost.total,
        **(report.breakdown or {}),
        **{name: None if rate is None else rate * report.training_s for name, rate in rates.items()},
    }
    return {**report.states, **{name: float(total) for name, total in known.items() if total is not None}}


def make_report(
    window: Window,
    done: Done,
    flops: Flops | None = None,
    price: tuple[float, str] | None = None,
    thresholds: Thresholds = THRESHOLDS,
    **facts: Any,
) -> Report:
    """Return the report of a window that covers a whole run. `facts`: the fields of it that do not follow from that."""
    window = msgspec.structs.replace(window, is_short=is_short(done.steps, done.seconds, thresholds))
    findings = diagnose(window, thresholds)
    if _headline(window, thresholds):
        findings.sort(key=lambda each: each.cause != "epoch_start_pause")
    priced = window.device in ("cuda", "jax:cuda")
    return Report(
        states=dict(window.states_s),
        phases=dict(window.declared_s),
        steps=done.steps,
        samples=None if done.samples is None else int(done.samples),
        tokens=None if done.tokens is None else int(done.tokens),
        throughput=throughput(done, flops),
        step_s=median(window.steps.step_s) if window.steps else None,
        verdict=give_verdict(window, findings, thresholds),
        findings=tuple(findings),
        cost=cost_of(window.states_s, [price[0]], price[1]) if price is not None and priced else None,
        training_s=done.seconds,
        others={rank: summary.verdict for rank, summary in sorted(window.summaries.items())},
        **{name: getattr(window, name) for name in _OF_WINDOW},
        **facts,
    )


def is_short(steps: int, seconds: float, thresholds: Thresholds = THRESHOLDS) -> bool:
    """Whether a run of so many steps, and so much time in them, is too short for a prediction."""
    return steps < thresholds.short_run_steps or seconds < thresholds.short_run_s


_SENTENCES = {
    st.INPUT_WAIT: ("input", "input_share", "input-bound: {} of the time training waited for data"),
    st.TRANSFER: ("transfer", "transfer_share", "transfer-bound: {} of the time went into copies to the device"),
    st.HOST_WAIT: ("host", "host_wait_share", "host-bound: {} of the time the device waited for host code"),
    st.COMM_WAIT: ("comm", "phase_share", "waiting for other ranks: {} of the time"),
    st.EVAL: ("eval", "phase_share", "evaluation takes {} of the time"),
    st.CHECKPOINT: ("checkpoint", "phase_share", "checkpoints take {} of the time"),
    st.COMPILE: ("other", "phase_share", "torch.compile takes {} of the time (TORCH_LOGS=recompiles shows why)"),
    st.OTHER: ("other", "phase_share", "{} of the time was spent outside of training steps and declared phases"),
    st.STALLED: ("stalled", "phase_share", "stalled for {} of the time: no step was completed"),
    st.UNKNOWN: ("unknown", "phase_share", "{} of the time is unknown: the training process sent no data"),
}
"""By state: the verdict's name, the threshold of the share from which it can be the verdict, the sentence."""


def give_verdict(window: Window, findings: Sequence[Finding] = (), thresholds: Thresholds = THRESHOLDS) -> Verdict:
    """Return the verdict on a window.

    The largest loss that is worth a change decides; without one the verdict is `compute`, which is good. A run that is
    stalled now is stalled, whatever it did before. A rank for which the others wait longer than it loses itself is a
    straggler. Start-up is ignored once there are steps: it passes. Of one step there is no verdict.
    """
    count = len(window.steps)
    if window.stalled_s is not None and not window.may_wait_for_phase:
        text = f"stalled: no training step for {duration(window.stalled_s)}"
        return Verdict("stalled", window.share(st.STALLED), text)
    if not count and window.share(st.STARTUP) >= window.share(*_SENTENCES):
        return Verdict("startup", window.share(st.STARTUP), "starting up: no training step yet")
    if window.is_short and count == 1:
        return Verdict("unknown", 1.0, "short: 1 step, too few for a verdict")
    verdict = _largest_loss(window, findings, thresholds)
    if window.is_short and count:
        step = window.mean_step
        trained_s = step.steps * step.whole_s
        what = f"{count:,} steps, too few"
        if count >= thresholds.short_run_steps and trained_s < thresholds.short_run_s:
            what = f"{duration(trained_s)} in training steps, too little"
        text = f"short: {what} for a prediction; so far {verdict.sentence}"
        verdict = msgspec.structs.replace(verdict, sentence=text)
    return msgspec.structs.replace(verdict, sentence=_headline(window, thresholds) + verdict.sentence)


def _largest_loss(window: Window, findings: Sequence[Finding], thresholds: Thresholds) -> Verdict:
    excluded = _excluded(window, is_named=bool(_headline(window, thresholds)))
    shares_of = {state: window.share(state) for state in _SENTENCES}
    shares_of[st.OTHER] -= sum(window.declared.values())
    between = between_passes(window, thresholds)
    shares_of[st.EVAL] -= between
    losses = [
        (share, state, _SENTENCES[state][2].replace("evaluation", window.evaluation).format(percent(share)))
        for state, share in shares_of.items()
        if share >= getattr(thresholds, _SENTENCES[state][1])
    ]
    losses += _of_declared(window.declared, thresholds.phase_share)
    ratio, state, text = max(losses, default=(0.0, "", ""))
    if between and between >= ratio:
        text = f"{percent(between)} of the time {passes_where(window)}"
        return Verdict("host", between, text + excluded + _by_host_clock(window))
    late = next((finding for finding in findings if finding.cause == "straggler"), None)
    if late is not None and late.ratio > (ratio / 2 if state == st.COMM_WAIT else ratio):  # else: that the ranks wait
        whom = "this one" if late.rank == window.rank else f"rank {late.rank}"
        text = f"straggler: the other ranks wait for {whom} for {percent(late.ratio)} of every step"
        return Verdict("straggler", late.ratio, text + excluded)
    if not losses:
        verdict = _no_loss(window, {finding.cause: finding for finding in findings}, thresholds)
        return msgspec.structs.replace(verdict, sentence=verdict.sentence + excluded)
    if state == st.EVAL and (window.eval_wait_ratio or 0.0) >= thresholds.input_share_critical:
        text += f", {percent(window.eval_wait_ratio or 0.0)} of which is data wait"
    if state != st.INPUT_WAIT:
        return Verdict(_SENTENCES[state][0], ratio, text + excluded)
    if window.waits_hidden_in is not None:
        text = f"the host waited for data {percent(ratio)} of the time; {window.waits_hidden_in} runs asynchronously"
        return Verdict("unknown", ratio, f"{text}, so it is not known for how much of that the device was idle")
    if window.bounded_by_optimizer:
        text = f"{percent(ratio)} of the time was spent between an optimizer step and the next forward pass"
    name = "host" if window.bounded_by_optimizer else "input"
    return Verdict(name, ratio, text + excluded + _by_host_clock(window))


def _no_loss(window: Window, found: Mapping[str, Finding], thresholds: Thresholds) -> Verdict:
    """Return the verdict where no share is a loss: compute, unless that waits itself."""
    share, waited = window.share(st.COMPUTE), window.share(st.INPUT_WAIT)
    if "host_bound" in found:
        text = f"host-bound: {percent(share)} of the time is compute, but the device runs each kernel as soon as it is launched and idles in between"
        return Verdict("host", share * (window.kept_up_ratio or 0.0), text)
    if waits := found.get("step_waits"):
        text = f"host-bound: the step is blocked for {percent(waits.ratio)} of the time (no thread is runnable)"
        return Verdict("host", waits.ratio, text)
    if outside := found.get("outside_torch"):
        text = f"host-bound: for {percent(outside.ratio)} of the time the step runs Python code outside of torch"
        return Verdict("host", outside.ratio, text)
    good = "the GPU is saturated" if "gpu_saturated" in found else "the input keeps up"
    text, step = f"healthy: {percent(share)} of the time is compute, {good}", window.mean_step
    what = "spent before forward passes" if window.bounded_by_optimizer else "data wait"
    if step.wait_s > 0 and step.wait_s >= thresholds.input_share * step.whole_s:  # though steps are little of the time
        part = f"{duration(step.wait_s)} of a {duration(step.whole_s)} step is {what}"
        text = f"{percent(share)} of the time is compute; {part}{_by_host_clock(window)}"
    elif waited >= thresholds.input_share_mild and share >= 0.5 and window.waits_hidden_in is None:
        text = f"mostly compute; {percent(waited)} of the time is {what}: at most {1 / (1 - waited):.1f}× the throughput without it"
        text += _by_host_clock(window)
    parts = {state: window.share(state) for state in (st.EVAL, st.CHECKPOINT)} | dict(window.declared)
    parts["undeclared"] = window.share(st.OTHER) - sum(window.declared.values())
    if share >= 0.5 and (whole := sum(parts.values())) >= thresholds.input_share:
        named = ", ".join(f"{name} {percent(part)}" for name, part in parts.items() if part >= 0.01)
        text = f"mostly compute, {percent(share)} of the time" if waited < thresholds.input_share_mild else text
        text += f"; {percent(whole)} is outside of training steps ({named})"
    if window.job is not None and window.job.goodput_ratio is not None and "checkpoint_interval" in found:
        most = "at most " if window.job.repeated_s is None else ""
        new = f"{most}{percent(window.job.goodput_ratio)} of the job's time went into new steps"
        text = f"{percent(share)} of this run is compute, but after {window.job.interruptions} interruptions {new}"
    return Verdict("compute", share, text)


def _excluded(window: Window, is_named: bool = False) -> str:
    """Return what no share counts, for people. `is_named`: the headline names the begin and end."""
    parts = [] if is_named else _start_and_end(window)
    left_out = [f"{what}, which took {duration(spent_s)}" for what, spent_s in parts]
    if untrained_s := sum(window.untrained_s.values()):
        left_out = [f"{duration(untrained_s)} from the first pass without an optimizer step until training began"]
    if paused_s := window.declared_s.get(st.PAUSE):
        left_out.append(f"{duration(paused_s)} between cells")
    if window.startup_s >= _LEAST_STARTUP * window.duration_s > 0:
        left_out.insert(0, f"start-up, which took {duration(window.startup_s)} of {duration(window.duration_s)}")
    return f" (excluding {', and '.join(left_out)})" if left_out else ""


def _start_and_end(window: Window) -> list[tuple[str, float]]:
    """Return what no share counts of a run's begin and end, in seconds."""
    first_s, waited_s = sum(window.first_step_s.values()), window.first_step_s.get(st.INPUT_WAIT, 0.0)
    first = "the first batch" if 2 * waited_s > first_s else "the first step"
    end = "the end of the pass" + " (its workers shut down)" * bool(window.workers)
    return [each for each in ((first, first_s), (end, window.end_s)) if each[1] >= _LEAST_END_S]


def _headline(window: Window, thresholds: Thresholds) -> str:
    """Return what a run's begin and end took, where that is much of it; else ""."""
    parts = [] if window.untrained_s else _start_and_end(window)
    spent_s = sum(each_s for _, each_s in parts)
    if spent_s < max(_LEAST_START_S, thresholds.phase_share * window.duration_s):
        return ""
    text = ", and ".join(f"{what} took {duration(each_s)}" for what, each_s in parts)
    of = "end" if 2 * window.end_s > spent_s else "start"
    return f"{of}: {text} of {duration(window.duration_s)}; apart from that "


def _of_declared(declared: Mapping[str, float], least: float) -> list[tuple[float, str, str]]:
    """Return (share, state, sentence) of the largest declared phase, or of all where none reaches `least` alone."""
    whole = sum(declared.values())
    if whole < least:
        return []
    name, share = next(((name, share) for name, share in declared.items() if name != st.REST), (st.REST, 0.0))
    if share >= least:
        return [(share, st.OTHER, f"{name} takes {percent(share)} of the time")]
    most = f"{name} the most" if share >= declared.get(st.REST, 0.0) else "each a small part"
    return [(whole, st.OTHER, f"declared phases take {percent(whole)} of the time, {most}")]


def _by_host_clock(window: Window) -> str:
    """Return what limits the trust in a wait for data; empty where nothing does."""
    if window.timeline == "device" or window.device == "cpu":
        return ""
    return " (by the host clock: work queued on the device may hide part of it)"


def render(report: Report) -> str:
    """Return the verdict as a few lines of text: the sentence, where the time went, why, and what to do."""
    head = f"gpuwatch · {report.name} · {_ranks(report)}{duration(report.duration_s)}, {counted(report.steps, 'step')}"
    if report.step_s is not None:
        head += f" of {duration(report.step_s)}"
    whole = sum(report.states.values()) or 1.0
    by_size = sorted(report.phases.items(), key=lambda each: (-each[1], each[0]))
    declared = shares_text({name: spent / whole for name, spent in by_size})
    notes, held = "; ".join(_notes(report)), {kind: size(peak) for kind, peak in report.memory_bytes.items()}
    rows = [
        ("where", shares_text(report.shares) + (f"  ({notes})" if notes else "")),
        *(("" if number else "ranks", line) for number, line in enumerate(_other_ranks(report))),
        ("", "" if report.breakdown is None else breakdown_text(report.breakdown)),
        ("", f"{declared} (declared phases, in other)" if declared else ""),
        ("rate", _rates(report.throughput)),
        ("cost", "" if report.cost is None else _cost(report.cost)),
        ("peak", f"{held['allocated']} of GPU memory in tensors, {held['reserved']} reserved" if held else ""),
    ]
    lines = [head, f"  {report.verdict.sentence}", *(f"  {label:<6}{text}" for label, text in rows if text)]
    roots = [each for each in report.findings if each.root is None][:3]
    return "\n".join([*lines, *(line for each in roots for line in explained(each))])


def explained(finding: Finding, indent: int = 8) -> Iterator[str]:
    """Yield why, and what to do, as lines of text."""
    gain = f" ({finding.gain} the throughput)" if finding.gain else ""
    why = "; ".join(evidence.text for evidence in finding.evidence)
    for label, text in (("why", f"{finding.title}: {why}"), ("do", finding.advice + gain)):
        yield from labelled(label, text, indent)


def labelled(label: str, text: str, indent: int = 8) -> list[str]:
    """Return text with a label before it, wrapped at 100 columns."""
    begin, margin = f"  {label:<{indent - 2}}", " " * indent
    wrapper = textwrap.TextWrapper(100, begin, margin, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def shares_text(by_name: Mapping[str, float]) -> str:
    """Return e.g. "compute 62%  other 5.0%", without what rounds to nothing."""
    return "  ".join(f"{name} {percent(share)}" for name, share in by_name.items() if share >= 0.001)


def breakdown_text(spent_s: Mapping[str, float]) -> str:
    """Return e.g. "in compute: forward and the rest 31%, backward 52%, optimizer 17%"."""
    if not (whole_s := sum(spent_s.values())):
        return "in compute: not measured, as no backward pass was timed after the first step"
    parts = ", ".join(f"{name} {percent(spent_s[name] / whole_s)}" for name in st.SECTIONS if name in spent_s)
    parts += "" if st.OPTIMIZER in spent_s else " (no optimizer step was seen)"
    return f"in compute: {parts.replace(st.FORWARD, 'forward and the rest')}"


def _ranks(report: Report) -> str:
    """Return which ranks a report is about; empty for a single one."""
    if report.world_size == 1:
        return ""
    compared = len(report.others) + 1
    which = {1: "this rank only", report.world_size: "all compared"}.get(compared, f"{compared} compared")
    return f"rank {report.rank} of {report.world_size}, {which} · "


def _other_ranks(report: Report) -> list[str]:
    """Return the ranks that lose time to something else than the verdict's, those that lose most first."""
    mine = report.verdict.state
    differ = [(rank, each) for rank, each in report.others.items() if each.state not in (mine, "compute", "comm")]
    differ.sort(key=lambda each: -each[1].ratio)
    lines = [f"rank {rank}: {other.sentence}" for rank, other in differ[:_OTHERS_SHOWN]]
    if more := len(differ) - len(lines):
        lines.append(f"{more} more rank{'s' * (more > 1)} with a different verdict")
    return lines


def _notes(report: Report) -> list[str]:
    """Return what limits the trust in the states: the host clock, few measured steps, other streams."""
    notes = []
    if report.timeline != "device" and report.device != "cpu":
        notes.append("host clock")
    if report.timeline == "device" and report.coverage < _WHOLE:
        notes.append(f"device events on {percent(report.coverage)} of the steps")
    if (unverified := report.unverified_ratio) >= 1 - _WHOLE:
        notes.append(f"input wait unverified: {percent(unverified)} of the steps use other streams or devices")
    return notes


def _rates(rates: Throughput) -> str:
    """Return tokens and FLOPs a second; empty where neither was counted or declared."""
    parts = []
    if rates.tokens_per_s is not None:
        parts.append(f"{rates.tokens_per_s:,.0f} tokens/s")
    if rates.flops_per_s is not None:
        parts.append(f"{rates.flops_per_s / 1e12:.3g} TFLOP/s")
    if rates.mfu_ratio is not None:
        parts.append(f"MFU {percent(rates.mfu_ratio)}")
    return "  ".join(parts)


def _cost(cost: Cost) -> str:
    """Return the cost of the GPU and its largest loss."""
    lost = {amount: state for state, amount in cost.states.items() if state != st.COMPUTE}
    more = f", {money(max(lost), cost.currency)} of it {lost[max(lost)]}" if lost else ""
    return f"{money(cost.total, cost.currency)}{more} (one GPU at {money(cost.per_hour, cost.currency)} an hour)"
