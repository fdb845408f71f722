"""A run's report as one self-contained HTML page: no script, no network, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from gpuwatch.diagnosis.cost import money
from gpuwatch.formatting import duration, percent
from gpuwatch.tools.reports import svg
from gpuwatch.tools.reports.gates import Broken
from gpuwatch.tools.reports.looks import SEVERITIES, STATES
from gpuwatch.tools.reports.model import Found, RunReport
from gpuwatch.tools.reports.words import (
    VISIBLE,
    facts,
    gain,
    headline,
    interval,
    measured_steps,
    plotted_steps,
    state_rows,
    when,
)
from gpuwatch.tools.stacks.records import rows as stack_rows

STEP_LINES = "Band: 5th to 95th percentile; line: median; dashed: mean wait for data."


def run_page(report: RunReport, broken: Sequence[Broken] = ()) -> str:
    """Return the page."""
    body = [
        f"<h1>{escape(headline(report))}</h1>",
        f'<p class="sub">{escape(report.host)} · {when(report.started_s)} · {escape(report.status)}</p>',
        f'<p class="verdict">{escape(report.verdict.sentence)}</p>',
        *(f'<p class="bad">limit broken: {escape(str(each))}</p>' for each in broken),
        svg.share_bar(report.shares),
        key(report.shares),
        _cards(report),
        "<h2>What to change</h2>",
        findings(report.findings),
        "<h2>Where the time went</h2>",
        table(("state", "time", "share", "cost") if report.cost else ("state", "time", "share"), state_rows(report), 1),
        plots(report),
        _rank_table(report),
        "<h2>Environment</h2>",
        table(None, facts(report), 9, "facts"),
    ]
    return document(f"{report.name} · gpuwatch", body, report.generated_s, report.gpuwatch)


def document(title: str, body: Iterable[str], generated_s: float, version: str) -> str:
    """Return a whole page around its parts."""
    style = files("gpuwatch.tools.reports").joinpath("style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>\n"
        + "\n".join(part for part in body if part)
        + f"\n<footer>made by gpuwatch {escape(version)}, {when(generated_s)}. Times below the plots count from the run's start.</footer>"
        "</main></body></html>\n"
    )


def key(shares: Mapping[str, float]) -> str:
    """Return what the colours mean, of states that can be seen."""
    present = {state for state, share in shares.items() if share >= VISIBLE}
    items = "".join(
        f'<li><i style="background:{colour}"></i>{escape(word)}</li>'
        for state, (word, colour) in STATES.items()
        if state in present
    )
    return f'<ul class="key">{items}</ul>'


def card(value: str, what: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>'


def findings(found: Sequence[Found]) -> str:
    """Return the findings, each consequence within its root."""
    if not found:
        return '<p class="soft">No cause was found that is worth a change.</p>'
    roots = [each for each in found if each.root is None]
    return "".join(_finding(root, found) for root in roots)


def _finding(found: Found, every: Sequence[Found]) -> str:
    evidence = "".join(f"<li>{escape(each.text)}</li>" for each in found.evidence)
    hanging = [each for each in every if each.root == found.cause and each.rank == found.rank and each is not found]
    promise = gain(found)
    return (
        f'<div class="finding" style="border-left-color:{SEVERITIES[found.severity]}">'
        f"<h3>{escape(found.title)}</h3>"
        f'<div class="soft">{escape(found.cause)}{f", rank {found.rank}" if found.rank else ""} · {escape(found.severity)}'
        f" · there for {duration(found.active_s)}</div><ul>{evidence}</ul>"
        f'<div class="do">{escape(found.advice)}</div>'
        + (f'<div class="soft">{escape(promise)}</div>' if promise else "")
        + _stacks(found)
        + "".join(_finding(each, every) for each in hanging)
        + "</div>"
    )


def _stacks(found: Found) -> str:
    """Return where each process stood when the finding began, folded away; empty where nobody looked."""
    seen = found.stacks
    if seen is None:
        return ""
    rows = stack_rows(seen)
    files = "".join(f'<div class="soft">flame graph: {escape(file)}</div>' for file in seen.flame_graphs)
    head = f"Where its {len(rows)} processes stood ({duration(seen.seconds)}, {when(seen.time_s)})"
    return f"<details><summary>{escape(head)}</summary>{table(None, rows, 9, 'facts')}{files}</details>"


def plots(report: RunReport) -> str:
    """Return the plots over time; a plot without anything to show is left out."""
    ledger = ledger_plot(report)
    band = step_plot(report)
    rows = [
        (f"{each.cause}{f' · rank {each.rank}' if each.rank else ''}", each.severity, each.episodes)
        for each in report.findings
    ]
    when_found = svg.episodes(rows, report.started_s, report.until_s)
    return (
        figure("Share of time by state", ledger, "", key(report.shares))
        + figure(
            "Step time", band, " ".join(filter(None, (STEP_LINES, sentence(plotted_steps(report)))))
        )
        + figure("When each cause was there", when_found, "")
    )  # fmt: skip


def sentence(text: str) -> str:
    """Return a text as a sentence; nothing of nothing."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def ledger_plot(report: RunReport) -> str:
    over = report.over_time
    return svg.stacked_shares(over.end_s, over.states, report.started_s, report.until_s)


def step_plot(report: RunReport, top_s: float = 0.0) -> str:
    steps = report.steps_over_time
    columns = (steps.time_s, steps.p05_s, steps.median_s, steps.p95_s, steps.data_wait_s)
    return svg.step_band(*columns, report.started_s, report.until_s, top_s)


def figure(title: str, plot: str, caption: str, below: str = "") -> str:
    if not plot:
        return ""
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<h2>{escape(title)}</h2><figure class="plot">{plot}{below}{said}</figure>'


def table(heads: Sequence[str] | None, rows: Sequence[Sequence[str]], numbers_from: int, kind: str = "wide") -> str:
    """Return a table; the columns from `numbers_from` on are set to the right."""
    width = len(heads) if heads else 2

    def line(row: Sequence[str], tag: str) -> str:
        kinds = (' class="n"' if index >= numbers_from else "" for index in range(width))
        cells = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=False))
        return f"<tr>{''.join(cells)}</tr>"

    head = line(heads, "th") if heads else ""
    return f'<div class="wide {kind}"><table>{head}{"".join(line(row, "td") for row in rows)}</table></div>'


def _cards(report: RunReport) -> str:
    step = report.step_time
    cards = [card(percent(report.shares.get("compute", 0.0)), "of the time is compute")]
    if step is not None:
        surely = f" (95%: {interval(step.mean_interval_s)})" if step.mean_interval_s else ""
        cards.append(
            card(
                duration(step.mean_s),
                f"a step on average{surely}{f', {which}' if (which := measured_steps(report)) else ''}",
            )
        )
        cards.append(card(duration(step.data_wait_s), "of it waiting for data"))
        cards.append(card(duration(step.p95_s), "95th percentile"))
    if report.cost is not None:
        cost, gpus = report.cost, f"{report.cost.gpus} GPU{'s' if report.cost.gpus > 1 else ''}"
        so_far = " so far" if report.status == "running" else ""
        cards.append(card(money(cost.total, cost.currency), f"for {gpus}{so_far}"))
        cards.append(card(money(cost.outside_compute, cost.currency), "of it outside compute"))
    return f'<div class="cards">{"".join(cards)}</div>'


def _rank_table(report: RunReport) -> str:
    if len(report.ranks) < 2:
        return ""
    rows = []
    for rank in report.ranks:
        whole = sum(rank.states.values()) or 1.0
        shares = (percent(rank.states.get(state, 0.0) / whole) for state in ("compute", "input_wait", "comm_wait"))
        rows.append((str(rank.rank), rank.host, rank.status, f"{rank.steps:,}", *shares))
    heads = ("rank", "host", "status", "steps", "compute", "input wait", "waits for others")
    return "<h2>Ranks</h2>" + table(heads, rows, 3)
