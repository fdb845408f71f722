"""A comparison as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from gpuwatch.tools.reports import svg
from gpuwatch.tools.reports.compared_words import compared_rows, loader_rows, outcome_sentences
from gpuwatch.tools.reports.comparing import Comparison
from gpuwatch.tools.reports.model import RunReport
from gpuwatch.tools.reports.page import STEP_LINES, document, findings, key, ledger_plot, sentence, step_plot, table
from gpuwatch.tools.reports.words import headline, plotted_steps


def compare_page(comparison: Comparison) -> str:
    """Return the page: `a` on the left, `b` on the right, one below the other on a phone."""
    a, b = comparison.a, comparison.b
    first, *rest = outcome_sentences(comparison)
    settings = loader_rows(comparison)
    top_s = max(svg.step_top_s(run.steps_over_time.p95_s, run.steps_over_time.data_wait_s) for run in (a, b))
    body = [
        f"<h1>{escape(a.name)} → {escape(b.name)}</h1>",
        f'<p class="verdict">{escape(first)}</p>',
        *(f"<p>{escape(sentence)}</p>" for sentence in rest),
        _two(a, b, lambda run: svg.share_bar(run.shares), headline),
        key({state: max(a.shares.get(state, 0.0), b.shares.get(state, 0.0)) for state in {**a.shares, **b.shares}}),
        "<h2>Side by side</h2>",
        table(("", a.name, b.name, "change"), compared_rows(comparison), 1),
        "<h2>What was set differently</h2>" if settings else "",
        table(("setting", a.name, b.name), settings, 1) if settings else "",
        "<h2>Share of time by state</h2>",
        _two(a, b, ledger_plot),
        "<h2>Step time</h2>",
        _two(a, b, lambda run: step_plot(run, top_s) + soft(sentence(plotted_steps(run)))),
        soft(STEP_LINES),
        "<h2>What to change</h2>",
        _two(a, b, lambda run: findings(run.findings)),
        '<p class="soft">The step times compared are means, first batches of passes left out; the interval is Welch\'s t on the '
        "logarithms of the means of 20 blocks of consecutive steps of each run.</p>",
    ]
    return document(f"{a.name} → {b.name} · gpuwatch", body, b.generated_s, b.gpuwatch)


def soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>' if text else ""


def _two(
    a: RunReport,
    b: RunReport,
    draw: Callable[[RunReport], str],
    head: Callable[[RunReport], str] = lambda run: run.name,
) -> str:
    sides = "".join(f"<div><h3>{escape(head(run))}</h3>{draw(run)}</div>" for run in (a, b))
    return f'<div class="two">{sides}</div>'
