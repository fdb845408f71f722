"""Runs: the list, one run in detail, and findings."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from gpuwatch.api import Finding, Recent, Run
from gpuwatch.diagnosis.cost import money
from gpuwatch.formatting import duration, percent
from gpuwatch.tools.reports.display import PHASES, SEVERITIES, STATUS_SIGNS, VERDICTS, digits, display
from gpuwatch_dashboards.selection import key_of
from gpuwatch_dashboards.top.drawing import (
    BOLD,
    DIM,
    LABEL,
    Curve,
    area,
    bar,
    cell,
    curve_lines,
    figure,
    flowed,
    harmless,
    legend,
    plate,
    rule,
    table,
    words,
    wrapped,
)
from gpuwatch_dashboards.top.reading import Facts, Sampled, last

SEVERITY_SIGNS = {"critical": "‼", "warning": "!", "info": "i"}
NO_VERDICT = "no verdict yet: the first steps are being measured"
_INDENT = 8


def title_of(run: Run) -> str:
    return harmless(f"{run.name or run.run}{f' #{run.rank}' if run.world_size > 1 else ''}")


def run_list(runs: Sequence[Run], selected: str | None, width: int, rows: int) -> list[Text]:
    """Return a head and at most `rows` runs, the selected one among them."""
    if width < 56:
        name, status, speed, p50, bars = 14, 1, 0, 7, 0
    elif width < 76:
        name, status, speed, p50, bars = 12, 1, 6, 7, 10
    elif width < 120:
        name, status, speed, p50, bars = 15, 9, 6, 7, 14
    else:
        name, status, speed, p50, bars = 26, 9, 8, 8, 32
    columns: list[tuple[str, int | None]] = [("run", name), ("status" if status > 1 else "", status)]
    columns += [("step/s", -speed), ("p50", -p50), ("last minute", bars), ("verdict", None)]
    keys = [key_of(run) for run in runs]
    lines: list[Sequence[str | Text]] = []
    for run in runs:
        recent = run.recent or Recent()
        state = words(
            cell(status_of(run) if status > 1 else STATUS_SIGNS[run.status], status),
            "green" if run.status == "running" else "dim",
        )
        verdict = words(" ", verdict_style(run)).append(f" {run.verdict.sentence if run.verdict else NO_VERDICT}")
        per_s = digits(recent.steps_per_s) if recent.steps_per_s is not None else "–"
        drawn = bar(recent.states or run.states, bars)
        lines.append((title_of(run), state, per_s, display(recent.step_s_p50, "s"), drawn, verdict))
    return table(columns, lines, keys.index(selected) if selected in keys else None, rows)


def status_of(run: Run) -> str:
    return f"{STATUS_SIGNS[run.status]} {run.status}"


def verdict_style(run: Run) -> Style:
    return plate(VERDICTS.get(run.verdict.state if run.verdict else "", VERDICTS["unknown"]))


def verdict_lines(run: Run, width: int) -> list[Text]:
    """Return which run it is, and what is wrong in one sentence."""
    facts = [f"rank {run.rank} of {run.world_size}"] if run.world_size > 1 else []
    facts += ["@".join(part for part in (run.user, run.host) if part)] if run.user or run.host else []
    if run.loader and run.loader.num_workers is not None:
        facts.append(f"{run.loader.num_workers} workers")
    facts += [duration(round(run.watermark_s - run.started_s)), f"{run.steps:,} steps"]
    head = words(title_of(run), BOLD)
    head.append(f" {status_of(run)}", "green" if run.status == "running" else DIM)
    head.append(f" · {' · '.join(facts)}", DIM)
    head.truncate(width - 6, overflow="ellipsis")
    sentence = wrapped(run.verdict.sentence if run.verdict else NO_VERDICT, width - 3)
    return [rule(head, width), *(Text(" ").append(f" {line.plain} ", verdict_style(run)) for line in sentence)]


def ledger_lines(run: Run, width: int, least: float = 0.0005) -> list[Text]:
    """Return the bars of the last minute and of the whole run, and the legend of states with at least this share."""
    recent = run.recent.states if run.recent else {}
    bars = [("last minute", recent)] if recent else []
    bars.append(("(whole run)" if recent else "whole run", run.states))
    lines = [figure(f" {cell(name, LABEL - 2)} ", "").append_text(bar(of, width - LABEL - 1)) for name, of in bars]
    return [*lines, *flowed(legend(recent, run.states, least), width)]


def step_lines(run: Run, series: Sampled, width: int) -> list[Text]:
    """Return the time of a step, the speed, MFU and the cost, and what the mean step of the last minute was made of."""
    recent = run.recent or Recent()
    pieces: list[Text] = []
    for name, seconds in (("step p50 ", recent.step_s_p50), ("p95 ", recent.step_s_p95)):
        pieces += [figure(name, display(seconds, "s"))] if seconds is not None else []
    rates = ((recent.steps_per_s, "steps"), (recent.samples_per_s, "samples"), (recent.tokens_per_s, "tokens"))
    pieces += [figure("", digits(rate), f" {what}/s") for rate, what in rates if rate is not None]
    pieces += [figure("MFU ", percent(recent.mfu_ratio))] if recent.mfu_ratio is not None else []
    if run.cost is not None:
        lost = money(run.cost.outside_compute, run.cost.currency)
        pieces.append(figure("", money(run.cost.total, run.cost.currency), f" ({lost} outside compute)"))
    lines = flowed(pieces, width, gap=" · ")
    phases = series.phases_s() if series.run == key_of(run) and width >= 56 else {}
    known = [phase for phase in reversed(PHASES) if phase in phases]
    if known:
        whole = figure("mean ", display(sum(phases.values()), "s"), " = ") if width >= 76 else Text()
        parts = [figure("", display(phases[phase], "s"), f" {PHASES[phase].name}") for phase in known]
        lines.append(Text(" ").append_text(whole).append_text(words(" + ", DIM).join(parts)))
    return lines


def run_curves(series: Sampled, width: int, rows: int = 1) -> list[Text]:
    """Return the curves of the last minutes, each `rows` high."""
    step, shm = series.points("step"), series.shm_ratio()
    wait, cpu = series.points("ledger {state}", state="input_wait"), series.points("cpu busy, of all cores")
    curves = [
        Curve("step time", step, display(last(step), "s"), PHASES["compute"].colour, None),
        Curve("input wait", wait, display(last(wait), "ratio"), PHASES["data_wait"].colour),
        Curve("CPU", cpu, display(last(cpu), "ratio")),
        Curve("/dev/shm", shm, display(last(shm), "ratio")),
    ]
    return curve_lines(curves, series.start_s, series.end_s, width, rows)


def area_lines(series: Sampled, width: int, rows: int) -> list[Text]:
    """Return the shares of time over the last minutes, one column a stretch of time."""
    drawn = area(series.traces.get("ledger {state}", ()), width - LABEL - 1, rows, series.start_s, series.end_s)
    minutes = f"{(series.end_s - series.start_s) / 60:.0f} min"
    labels = ["100%", *[""] * (rows - 2), minutes]
    return [
        figure(f" {cell(label, LABEL - 2)} ", "").append_text(line) for label, line in zip(labels, drawn, strict=True)
    ]


def finding_lines(found: Sequence[Finding], now_s: float, live: bool, width: int, full: bool = True) -> list[Text]:
    """Return each root cause with what to do and why, and its consequences under it; by title only unless `full`."""
    if not found:
        text = "No bottleneck found in the last minute." if live else "No finding was active when the run stopped."
        return [words(f" {text}", DIM)]
    causes = {finding.cause for finding in found}
    lines: list[Text] = []

    def add(finding: Finding, depth: int) -> None:
        lines.extend(_finding(finding, now_s, width, depth, full))
        for consequence in found:
            if consequence.root == finding.cause and depth < len(found):
                add(consequence, depth + 1)

    for finding in found:
        if finding.root not in causes:
            add(finding, 0)
    return lines


def _finding(finding: Finding, now_s: float, width: int, depth: int, full: bool) -> list[Text]:
    sign = words(
        f" {SEVERITY_SIGNS.get(finding.severity, '?')} ", plate(SEVERITIES.get(finding.severity, SEVERITIES["info"]))
    )
    indent = _INDENT + 2 * depth
    head = Text(" ").append_text(sign) if depth == 0 else words(f"{'':>{indent - 3}}└", DIM)
    about = [] if finding.ratio is None else [display(finding.ratio, "ratio")]
    if finding.gpu:
        about.append(finding.gpu if finding.gpu.startswith("GPU") else f"GPU {finding.gpu}")
    elif finding.rank is not None:
        about.append(f"rank {finding.rank}")
    about += [f"for {duration(round(now_s - finding.since_s))}"] if finding.since_s is not None else []
    left = 5 if depth == 0 else indent
    lines = wrapped(finding.title, width - 1, BOLD if depth == 0 else "", left, head)
    tail = words(f"  {', '.join(about)}", DIM)
    if full and lines[-1].cell_len + tail.cell_len > width:
        lines.append(Text(" " * (left - 2)))
    if lines[-1].cell_len + tail.cell_len <= width:
        lines[-1].append_text(tail)
    advice = f"{finding.advice} → {finding.gain} faster" if finding.advice and finding.gain else finding.advice
    why = "; ".join(item.text.strip() for item in finding.evidence)
    for name, text, style in (("do", advice, BOLD), ("why", why, "")):
        if text and (full or depth == 0):
            label = words(f"{name:>{indent - 5 + len(name)}}", DIM)
            lines += wrapped(text, width - 1, style, indent, label)
    return lines


def all_findings(facts: Facts, width: int) -> list[Text]:
    """Return the findings of every run and GPU, the selected run's first."""
    lines: list[Text] = []
    for run in sorted(facts.runs, key=lambda run: key_of(run) != facts.selected):
        if run.findings:
            lines += [rule(title_of(run), width), *finding_lines(run.findings, facts.time_s, True, width)]
    if facts.node.findings:
        lines += [rule("GPUs without a run", width), *finding_lines(facts.node.findings, facts.time_s, True, width)]
    return lines or [words(" Nothing found: no run and no GPU has a bottleneck that gpuwatch knows.", DIM)]
