"""A run's report and a comparison as Markdown, for a merge request or a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuwatch.formatting import duration
from gpuwatch.tools.reports.compared_words import compared_rows, loader_rows, outcome_sentences
from gpuwatch.tools.reports.comparing import Comparison
from gpuwatch.tools.reports.gates import Broken
from gpuwatch.tools.reports.model import Found, RunReport
from gpuwatch.tools.reports.words import facts, gain, headline, interval, measured_steps, state_rows

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def run_markdown(report: RunReport, broken: Sequence[Broken] = ()) -> str:
    """Return the report; names that others gave are escaped."""
    heads = ("state", "time", "share", "cost") if report.cost else ("state", "time", "share")
    lines = [f"# {plain(headline(report))}", "", f"**{plain(report.verdict.sentence)}**", ""]
    lines += [f"- limit broken: {plain(str(each))}" for each in broken]
    lines += [*(("",) if broken else ()), *table(heads, state_rows(report)), ""]
    if report.step_time is not None:
        step = report.step_time
        surely = f" (95% of the mean: {interval(step.mean_interval_s)})" if step.mean_interval_s else ""
        lines += [
            f"{_a_step(report)} takes {duration(step.mean_s)} on average{surely}, median {duration(step.median_s)}, 95th percentile "
            f"{duration(step.p95_s)}; {duration(step.data_wait_s)} of it is waiting for data.",
            "",
        ]
    lines += ["## What to change", "", *_findings(report.findings), "", "## Environment", ""]
    lines += table(("what", "value"), facts(report))
    return "\n".join(lines) + "\n"


def _a_step(report: RunReport) -> str:
    which = measured_steps(report)
    return f"A step ({which})" if which else "A step"


def compare_markdown(comparison: Comparison) -> str:
    """Return two runs side by side."""
    a, b = comparison.a, comparison.b
    lines = [f"# {plain(a.name)} → {plain(b.name)}", ""]
    lines += [f"**{plain(sentence)}**\n" for sentence in outcome_sentences(comparison)]
    heads = ("", plain(a.name), plain(b.name), "change")
    lines += [*table(heads, compared_rows(comparison)), ""]
    rows = loader_rows(comparison)
    if rows:
        lines += ["## What was set differently", "", *table(("setting", *heads[1:3]), rows), ""]
    for run in (a, b):
        lines += [f"## What to change in {plain(run.name)}", "", *_findings(run.findings), ""]
    return "\n".join(lines).rstrip() + "\n"


def plain(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(plain(cell) for cell in row[: len(heads)])} |" for row in rows]


def _findings(found: Sequence[Found]) -> list[str]:
    if not found:
        return ["No cause was found that is worth a change."]
    lines = []
    for each in found:
        indent = "  " if each.root else ""
        why = "; ".join(evidence.text for evidence in each.evidence)
        promise = gain(each)
        lines.append(f"{indent}- **{plain(each.title)}** (`{each.cause}`, {each.severity}): {plain(why)}")
        lines.append(f"{indent}  - {plain(each.advice)}{f' ({plain(promise)})' if promise else ''}")
    return lines
