"""Findings: what was found, what proves it, the one change to make, and what it would give."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from gpuwatch.api import Finding, Run
from gpuwatch.units import duration
from gpuwatch_dashboards.terminal.facts import Facts
from gpuwatch_dashboards.terminal.lines import rule, wrapped
from gpuwatch_dashboards.terminal.looks import BOLD, DIM, SEVERITY_SIGNS, severity_style, words
from gpuwatch_dashboards.terminal.run_list import title_of
from gpuwatch_dashboards.units import display

_INDENT = 7


def finding_lines(found: Sequence[Finding], now_s: float, live: bool, width: int, brief: bool = False) -> list[Text]:
    """Return the findings in full, or in brief (what, and what to do); one line where there are none."""
    if not found:
        text = "No bottleneck found in the last minute." if live else "No finding was active when the run stopped."
        return [words(f" {text}", DIM)]
    return [line for finding in found for line in _finding(finding, now_s, width, brief)]


def _finding(finding: Finding, now_s: float, width: int, brief: bool) -> list[Text]:
    head = Text(" ")
    head.append(f" {SEVERITY_SIGNS.get(finding.severity, '?')} ", severity_style(finding.severity))
    head.append(" ")
    about = [] if finding.ratio is None else [display(finding.ratio, "ratio")]
    about += [finding.gpu if finding.gpu.startswith("GPU") else f"GPU {finding.gpu}"] if finding.gpu else []
    about += [f"for {duration(round(now_s - finding.since_s))}"] if finding.since_s is not None else []
    title = wrapped(finding.title, width - head.cell_len - 1, BOLD)
    lines = [head.append_text(title[0]) if title else head]
    if brief and len(title) > 1:
        lines[0].append(" …")
    else:
        lines += [_indented(line, 5) for line in title[1:]]
    tail = words(f"  {', '.join(about)}", DIM)
    if lines[-1].cell_len + tail.cell_len <= width:
        lines[-1].append_text(tail)
    why = "; ".join(item.text.strip() for item in finding.evidence)
    gain = finding.predicted_speedup or 1.0
    advice = f"{finding.advice} → up to {gain:.1f}× faster" if finding.advice and gain >= 1.05 else finding.advice
    for word, text, style in (("why", why, ""), ("do", advice, BOLD)):
        if text and not (brief and word == "why"):
            paragraph = wrapped(text, width - 1, style, _INDENT + 1)
            first = paragraph[0].plain.lstrip()
            paragraph[0] = words(f"   {word:<{_INDENT - 2}}", DIM).append(first, style)
            lines += paragraph
    return lines


def _indented(line: Text, indent: int) -> Text:
    line.pad_left(indent)
    return line


def all_findings(facts: Facts, width: int) -> list[Text]:
    """Return the findings of every run and GPU, the selected run's first."""
    runs = sorted((run for run in facts.runs if run.findings), key=lambda run: _key(run) != facts.selected)
    lines: list[Text] = []
    for run in runs:
        lines += [rule(title_of(run), width), *finding_lines(run.findings, facts.time_s, True, width)]
    if facts.gpu_findings:
        lines += [rule("GPUs without a run", width), *finding_lines(facts.gpu_findings, facts.time_s, True, width)]
    if not lines:
        lines = [words(" Nothing found: no run and no GPU has a bottleneck that gpuwatch knows.", DIM)]
    return lines


def _key(run: Run) -> str:
    return f"{run.run}/{run.rank}"
