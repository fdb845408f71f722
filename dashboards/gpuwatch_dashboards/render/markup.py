"""Pieces of the page as HTML. Names, evidence and advice come from other processes: all of it is escaped here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from gpuwatch.api import Finding, Recent, Run
from gpuwatch.diagnosis.cost import money
from gpuwatch.errors import SourceError
from gpuwatch.formatting import duration
from gpuwatch.tools.stacks.records import rows as stack_rows
from gpuwatch_dashboards.model import Node
from gpuwatch_dashboards.render.charts import DrawnLine
from gpuwatch_dashboards.render.palette import SEVERITIES, STATES, VERDICTS, Look
from gpuwatch_dashboards.render.units import digits, display

BRAND = '<div class="gw-brand">gpuwatch</div>'
STATUS_SIGNS = {"running": "●", "ended": "■", "lost": "✕", "gone": "○"}
STATUS_WORDS = {"running": "running", "ended": "ended", "lost": "lost: no message any more", "gone": "no longer seen"}
_CSS_DASHES = {"solid": "solid", "dot": "dotted"}


def verdict(run: Run) -> str:
    """Return the head of the page: who the run is, what is wrong in one sentence, and its key numbers."""
    return run_head(run, _figures(run))


def run_head(run: Run, figures: Sequence[tuple[str, str, str]]) -> str:
    """Return who a run is, its verdict, and (class, number, what it is) of some numbers."""
    v = run.verdict
    look = VERDICTS.get(v.state if v else "unknown", VERDICTS["unknown"])
    sentence = v.sentence if v else "no verdict yet: the first steps are being measured"
    if v is None and run.status != "running":
        sentence = "no verdict is kept of this run"
    return (
        f'<section class="gw-verdict" style="--gw:{look.colour}" data-state="{escape(v.state if v else "unknown")}">'
        f'<p class="gw-run"><strong class="gw-name">{escape(run.name or run.run)}</strong>'
        f'<span class="gw-status gw-{run.status}">{STATUS_SIGNS[run.status]} {STATUS_WORDS[run.status]}</span>'
        f"{''.join(f'<span>{escape(text)}</span>' for text in _identity(run))}</p>"
        f'<h1 class="gw-sentence">{escape(sentence)}</h1>'
        f'<div class="gw-figures">{"".join(_figure(*figure) for figure in figures)}</div></section>'
    )


def _identity(run: Run) -> list[str]:
    facts = [f"rank {run.rank} of {run.world_size}" if run.world_size > 1 else f"rank {run.rank}"]
    who = "@".join(part for part in (run.user, run.host) if part)
    facts += [who] if who else []
    if run.loader and run.loader.num_workers is not None:
        workers = run.loader.num_workers
        facts.append(f"{workers} loader worker{'' if workers == 1 else 's'}" if workers else "no loader workers")
    facts.append(f"for {duration(round(run.watermark_s - run.started_s))}")
    return facts


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """Return (class, number, what it is) of each key number; what was not measured is left out."""
    recent = run.recent or Recent()
    figures: list[tuple[str, str, str]] = []
    if run.verdict and run.verdict.ratio is not None:
        figures.append(
            ("ratio", display(run.verdict.ratio, "ratio"), VERDICTS.get(run.verdict.state, VERDICTS["unknown"]).name)
        )
    if recent.steps_per_s is not None:
        figures.append(("steps", digits(recent.steps_per_s), "steps/s"))
    if recent.samples_per_s:
        figures.append(("samples", digits(recent.samples_per_s), "samples/s"))
    if recent.step_s_p50 is not None:
        figures.append(("p50", display(recent.step_s_p50, "s"), "step p50"))
    if recent.step_s_p95 is not None:
        figures.append(("p95", display(recent.step_s_p95, "s"), "step p95"))
    figures += rate_figures(run)
    best = max(run.findings, key=lambda f: f.predicted_speedup or 1.0, default=None)
    if best is not None and best.gain:
        figures.append(("gain", best.gain, "the throughput, predicted"))
    figures.append(("count", f"{run.steps:,}", "steps done"))
    return figures + cost_figures(run)


def rate_figures(run: Run) -> list[tuple[str, str, str]]:
    """Return (class, number, what it is) of the rates that the training declares; nothing where it declares none."""
    recent = run.recent or Recent()
    figures = []
    if recent.tokens_per_s is not None:
        figures.append(("tokens", f"{recent.tokens_per_s:,.0f}", "tokens/s"))
    if recent.flops_per_s is not None:
        figures.append(("flops", f"{recent.flops_per_s / 1e12:.3g}", "TFLOP/s"))
    if recent.mfu_ratio is not None:
        figures.append(("mfu", display(recent.mfu_ratio, "ratio"), "MFU"))
    return figures


def cost_figures(run: Run) -> list[tuple[str, str, str]]:
    """Return (class, number, what it is) of what a run's GPUs cost; nothing where that is not known."""
    cost = run.cost
    if cost is None:
        return []
    return [
        ("cost", money(cost.total, cost.currency), "cost so far" if run.status == "running" else "cost"),
        ("lost", money(cost.outside_compute, cost.currency), "of it outside compute"),
    ]


def _figure(kind: str, number: str, what: str) -> str:
    return f'<div class="gw-figure gw-figure-{kind}"><b>{escape(number)}</b><span>{escape(what)}</span></div>'


def panel_head(title: str, question: str, legend: Sequence[tuple[DrawnLine, str]] = ()) -> str:
    """Return a panel's title, the question it answers, and its legend with a value for each line or area."""
    entries = "".join(
        f'<li><i class="{_key_class(line)}" style="--gw:{line.colour};'
        f'border-top-style:{_CSS_DASHES.get(line.dash, "dashed")}"></i>'
        f"{escape(line.name)} <b>{escape(value)}</b></li>"
        for line, value in legend
    )
    return (
        f'<div class="gw-panel"><h2 title="{escape(question)}">{escape(title)}</h2>'
        f"<p>{escape(question)}</p>{f'<ul>{entries}</ul>' if entries else ''}</div>"
    )


def _key_class(line: DrawnLine) -> str:
    return f"gw-square {Look('', '', line.pattern).hatch}" if line.stacked or line.pattern else ""


def looks_head(title: str, question: str, looks: Sequence[Look]) -> str:
    """Return a panel's title and question, with what its colours mean."""
    entries = "".join(
        f'<li><i class="gw-square {look.hatch}" style="--gw:{look.colour}"></i>{escape(look.name)}</li>'
        for look in looks
    )
    return panel_head(title, question).replace("</p></div>", f"</p><ul>{entries}</ul></div>")


FLEET_NEEDS_PROMETHEUS = (
    '<section class="gw-message"><h1>The fleet needs a Prometheus.</h1><p>An agent knows its own node only. Start these pages with '
    "<code>gpuwatch dashboard --prometheus http://HOST:9090</code>, or everything at once with <code>docker compose up</code>.</p>"
    "<p>Prometheus scrapes the agents and loads the rules that <code>gpuwatch rules</code> writes.</p></section>"
)
NOTHING_RECORDED = (
    '<section class="gw-message"><h1>Prometheus answers, but no GPU time is recorded.</h1><p>Two things are needed: a scrape job for '
    "the agents, and the rules in <code>rule_files</code>:</p><pre>gpuwatch rules &gt; gpuwatch.yml\n"
    "promtool check rules gpuwatch.yml</pre><p>The first numbers come after five minutes; this page goes on by itself.</p></section>"
)


def key_of_looks(looks: Iterable[Look]) -> str:
    """Return what colours mean."""
    entries = "".join(
        f'<li><i class="gw-square {look.hatch}" style="--gw:{look.colour}"></i>{escape(look.name)}</li>'
        for look in looks
    )
    return f'<div class="gw-panel"><ul>{entries}</ul></div>'


def state_key(states: Iterable[str]) -> str:
    """Return what the colours of states mean, in the order of a ledger; each state once."""
    found = set(states)
    return key_of_looks(look for state, look in STATES.items() if state in found)


def too_few_to_compare(known: int) -> str:
    """Return the page's message while there are fewer than two runs."""
    text = "No run is known yet." if known == 0 else "One run is known so far."
    return (
        f'<section class="gw-message"><h1>{text} A comparison takes two.</h1>'
        "<p>Train, change the one thing that the finding advises, train again: the two runs appear here side by side, with what "
        'was predicted beside what was achieved.</p><p>Runs get names by <code>gpuwatch.Watch(run="resnet50-a")</code> or '
        "<code>GPUWATCH_RUN</code>. A kept report: <code>gpuwatch compare a.json last</code>.</p></section>"
    )


def past_findings(found: Sequence[Finding], clock: Callable[[float], str]) -> str:
    """Return what was found over the run, the newest first, as a list; `clock` gives a time in the reader's zone."""
    if not found:
        return '<div class="gw-nothing">Nothing was found in this run.</div>'
    titles = {f.cause: f.title for f in found}
    rows = "".join(
        f'<li style="--gw:{SEVERITIES[f.severity].colour}" data-cause="{escape(f.cause)}">'
        f"<b>{escape(f.title)}</b><span>{escape(' · '.join(_past_facts(f, titles, clock)))}</span>{stacks(f)}</li>"
        for f in sorted(found, key=lambda f: -(f.since_s or 0.0))
    )
    return f'<ul class="gw-past">{rows}</ul>'


def _past_facts(f: Finding, titles: Mapping[str, str], clock: Callable[[float], str]) -> list[str]:
    seen_s = f.seen_s or 0.0
    facts = [f"{clock(f.since_s or seen_s)} to {clock(seen_s)}", display(f.ratio, "ratio")]
    if (root := titles.get(f.root or "")) is not None:
        return [*facts, f"a consequence of: {root}"]
    return [*facts, f"predicted {f.gain} the throughput"] if f.gain else facts


def nothing(text: str) -> str:
    """Return what a panel says in place of a chart."""
    return f'<div class="gw-nothing"><span>{_code(text)}</span></div>'


def findings(found: Sequence[Finding], now_s: float, live: bool) -> str:
    """Return the active findings as cards: one for each root, its consequences inside."""
    if not found:
        text = "No bottleneck found in the last minute." if live else "No finding was active when the run stopped."
        return f'<div class="gw-nothing">{text}</div>'
    causes = {finding.cause for finding in found}
    return "".join(_finding(finding, found, now_s) for finding in found if finding.root not in causes)


def _finding(finding: Finding, found: Sequence[Finding], now_s: float) -> str:
    look = SEVERITIES[finding.severity]
    gain = ""
    if finding.gain:
        kind, title = "upper bound", "What no time lost to this cause would give"
        if finding.predicted_range is not None:
            kind, title = "predicted", "The lowest and the highest gain that the evidence allows"
        gain = f'<div class="gw-gain"><b>{finding.gain}</b> the throughput<span title="{title}">{kind}</span></div>'
    facts = [look.name, display(finding.ratio, "ratio")]
    if finding.rank is not None:
        facts.append(f"rank {finding.rank}")
    if finding.gpu:
        facts.append(f"GPU {finding.gpu}")
    if finding.since_s is not None:
        facts.append(f"for {duration(round(now_s - finding.since_s))}")
    advice = f'<p class="gw-advice"><b>Do this:</b> {escape(finding.advice)}</p>' if finding.advice else ""
    return (
        f'<article class="gw-finding" style="--gw:{look.colour}" data-cause="{escape(finding.cause)}">'
        f'<p class="gw-facts">{escape(" · ".join(facts))}</p><h3>{escape(finding.title)}</h3>'
        f"<ul>{_evidence(finding)}</ul>{advice}{gain}{stacks(finding)}{_consequences(finding, found)}</article>"
    )


def _evidence(finding: Finding) -> str:
    return "".join(f"<li>{escape(item.text)}</li>" for item in finding.evidence)


def _consequences(root: Finding, found: Sequence[Finding]) -> str:
    """Return what follows from a finding, folded up: the root's advice is the change to make."""
    return "".join(
        f'<details class="gw-consequence" data-cause="{escape(each.cause)}"><summary>Consequence: {escape(each.title)} · '
        f"{display(each.ratio, 'ratio')}</summary><ul>{_evidence(each)}</ul>{_consequences(each, found)}</details>"
        for each in found
        if each.root == root.cause and each.cause != root.cause
    )


def stacks(finding: Finding) -> str:
    """Return where each process's code stood when the finding began, folded up; nothing where nobody looked."""
    seen = finding.stacks
    if seen is None:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(who)}</th><td>{escape(where)}</td></tr>' for who, where in stack_rows(seen)
    )
    graphs = ", ".join(seen.flame_graphs)
    files = f"<p>Flame graph, on the node: <code>{escape(graphs)}</code></p>" if graphs else ""
    return f'<details class="gw-stacks"><summary>Where the code stood</summary><table class="gw-table">{rows}</table>{files}</details>'


def away(error: SourceError) -> str:
    """Return the page's message while its source does not answer."""
    return (
        f'<section class="gw-message"><h1>{escape(_sentence(error.what))}.</h1><p>{_code(_sentence(error.remedy))}.</p>'
        "<p>This page tries again every few seconds and goes on by itself.</p></section>"
    )


def no_runs(node: Node, short: bool = False) -> str:
    """Return the page's message before any training was seen: the one line to add. `short`: there is more below it."""
    return (
        f'<section class="gw-message{" gw-short" if short else ""}"><h1>No training run on {escape(node.host)} yet.</h1>'
        "<p>Add one line to your training loop:</p>"
        "<pre>import gpuwatch\n\n<mark>for batch in gpuwatch.watch(loader):</mark>\n    ...</pre>"
        "<p>The run appears here by itself, with a verdict after its first steps.</p></section>"
    )


def foot(label: str, node: Node, run: Run | None, time_text: str) -> str:
    """Return the small print: source, time of the last refresh, and whatever does not work."""
    parts = [f"{escape(label)} · updated {escape(time_text)}"]
    failed = [f"{c.name} ({c.message})" if c.message else c.name for c in node.collectors if c.success is False]
    if failed:
        parts.append(f'<strong class="gw-failed">collectors that fail: {escape("; ".join(failed))}</strong>')
    if node.history_failures:
        parts.append(f"{node.history_failures:,} commits to the history failed")
    if run and run.records_lost:
        parts.append(f"{run.records_lost:,} step records lost (their time is in the ledger all the same)")
    if node.gpus == ():
        parts.append("no GPU on this node")
    if run and run.timeline == "host":
        parts.append("host timeline: waits are what the training process saw, not the device")
    return f'<p class="gw-foot">{" · ".join(parts)}</p>'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".")


def _code(text: str) -> str:
    """Return text with `commands` marked up."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))
