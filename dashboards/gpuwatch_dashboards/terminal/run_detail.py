"""One run: verdict, ledger, step, and its last minutes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from gpuwatch.api import Recent, Run
from gpuwatch.costs import money
from gpuwatch.units import duration
from gpuwatch_dashboards.palette import PHASES
from gpuwatch_dashboards.selection import key_of
from gpuwatch_dashboards.terminal.bars import area, bar, legend
from gpuwatch_dashboards.terminal.curve_lines import LABEL, Curve, curve_lines, last
from gpuwatch_dashboards.terminal.facts import Strands
from gpuwatch_dashboards.terminal.lines import cell, flowed, rule, wrapped
from gpuwatch_dashboards.terminal.looks import BOLD, DIM, verdict_style, words
from gpuwatch_dashboards.terminal.run_list import NO_VERDICT, STATUS_SIGNS, title_of
from gpuwatch_dashboards.units import digits, display


def verdict_lines(run: Run, width: int) -> list[Text]:
    """Return who the run is, and what is wrong in one sentence."""
    head = Text()
    head.append(title_of(run), BOLD)
    head.append(f" {STATUS_SIGNS[run.status]} {run.status}", "green" if run.status == "running" else DIM)
    head.append(f" · {' · '.join(_identity(run))}", DIM)
    head.truncate(width - 6, overflow="ellipsis")
    sentence = run.verdict.sentence if run.verdict else NO_VERDICT
    style = verdict_style(run.verdict.state if run.verdict else None)
    lines = wrapped(sentence, width - 3, style)
    for line in lines:
        line.pad(1)
        line.stylize(style)
    return [rule(head, width), *(Text(" ").append_text(line) for line in lines)]


def _identity(run: Run) -> list[str]:
    facts = [f"rank {run.rank} of {run.world_size}"] if run.world_size > 1 else []
    facts += ["@".join(part for part in (run.user, run.host) if part)] if run.user or run.host else []
    if run.loader and run.loader.num_workers is not None:
        facts.append(f"{run.loader.num_workers} workers")
    facts += [f"{duration(round(run.watermark_s - run.started_s))}", f"{run.steps:,} steps"]
    return facts


def ledger_lines(run: Run, width: int, least: float = 0.0005) -> list[Text]:
    """Return the bars of the last minute and of the whole run, and the legend of states with at least this share."""
    recent = run.recent.states if run.recent else {}
    bars = [("last minute", recent)] if recent else []
    bars.append(("(whole run)" if recent else "whole run", run.states))
    lines = [
        words(f" {cell(name, LABEL - 2)} ", DIM).append_text(bar(states, width - LABEL - 1)) for name, states in bars
    ]
    return [*lines, *flowed(legend(recent, run.states, least), width)]


def step_lines(run: Run, strands: Strands, width: int) -> list[Text]:
    """Return the time of a step, the speed and the cost, and what the mean step of the last minute was made of."""
    recent = run.recent or Recent()
    pieces: list[Text] = []
    if recent.step_s_p50 is not None:
        pieces.append(_figure("step p50 ", display(recent.step_s_p50, "s")))
    if recent.step_s_p95 is not None:
        pieces.append(_figure("p95 ", display(recent.step_s_p95, "s")))
    if recent.steps_per_s is not None:
        pieces.append(_figure("", digits(recent.steps_per_s), " steps/s"))
    if recent.samples_per_s:
        pieces.append(_figure("", digits(recent.samples_per_s), " samples/s"))
    if run.cost is not None:
        lost = money(run.cost.outside_compute, run.cost.currency)
        pieces.append(_figure("", money(run.cost.total, run.cost.currency), f" ({lost} outside compute)"))
    lines = flowed(pieces, width, gap=" · ")
    phases = strands.phases_s if strands.key == key_of(run) else {}
    known = [phase for phase in reversed(PHASES) if phase in phases]
    if known:
        whole = _figure("mean ", display(sum(phases.values()), "s"), " = ") if width >= 76 else Text()
        parts = [_figure("", display(phases[phase], "s"), f" {PHASES[phase].name}") for phase in known]
        lines.append(Text(" ").append_text(whole).append_text(words(" + ", DIM).join(parts)))
    return lines


def _figure(before: str, number: str, after: str = "") -> Text:
    return words(before, DIM).append(number, Style(bold=True, dim=False)).append(after, DIM)


def curves(strands: Strands) -> list[Curve]:
    """Return what is drawn over the last minutes."""
    step, wait = last(strands.step_s), last(strands.input_ratio)
    return [
        Curve("step time", strands.step_s, display(step, "s"), PHASES["compute"].colour, None),
        Curve("input wait", strands.input_ratio, display(wait, "ratio"), PHASES["data_wait"].colour),
        Curve("CPU", strands.cpu_ratio, display(last(strands.cpu_ratio), "ratio")),
        Curve("/dev/shm", strands.shm_ratio, display(last(strands.shm_ratio), "ratio")),
    ]


def sparkline_lines(strands: Strands, width: int, rows: int = 1) -> list[Text]:
    """Return the curves two abreast, each `rows` high, their last value behind them."""
    return curve_lines(curves(strands), strands.start_s, strands.end_s, width, rows)


def area_lines(strands: Strands, width: int, rows: int) -> list[Text]:
    """Return the ledger over the last minutes, one column a stretch of time."""
    drawn = area(strands.ledger, width - LABEL - 1, rows, strands.start_s, strands.end_s)
    minutes = f"{(strands.end_s - strands.start_s) / 60:.0f} min"
    labels: Sequence[str] = ["100%", *[""] * (rows - 2), minutes] if rows > 1 else [minutes]
    return [
        words(f" {cell(label, LABEL - 2)} ", DIM).append_text(line) for label, line in zip(labels, drawn, strict=True)
    ]
