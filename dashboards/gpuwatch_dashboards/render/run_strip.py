"""All runs of a node as a table: which one is worth a look? HTML, everything escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from urllib.parse import urlencode

from gpuwatch.api import Run
from gpuwatch.ledger.states import shares
from gpuwatch.tools.reports.display import VERDICTS, digits, display
from gpuwatch_dashboards.render.gpu_strip import share_bar
from gpuwatch_dashboards.render.markup import STATUS_SIGNS
from gpuwatch_dashboards.selection import key_of

COLUMNS = ("Run", "Verdict", "Last minute", "Step p50", "Steps/s")
MOST_ROWS = 16


def run_strip(runs: Sequence[Run], shown: Run) -> str:
    """Return the table of the runs that go on, the one shown marked; empty where that is the only one."""
    going = [run for run in runs if run.status == "running"]
    if not going or [key_of(run) for run in going] == [key_of(shown)]:
        return ""
    head = "".join(f'<th scope="col">{text}</th>' for text in COLUMNS)
    rows = "".join(_row(run, key_of(run) == key_of(shown)) for run in going[:MOST_ROWS])
    more = len(going) - MOST_ROWS
    text = f'<p class="gw-foot">and {more:,} more: choose them above</p>' if more > 0 else ""
    return f'<table class="gw-gpus"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{text}'


def _row(run: Run, is_shown: bool) -> str:
    look = VERDICTS.get(run.verdict.state if run.verdict else "unknown", VERDICTS["unknown"])
    sentence = run.verdict.sentence if run.verdict else "no verdict yet"
    rank = f" · rank {run.rank}" if run.world_size > 1 else ""
    link = f"?{urlencode({'run': run.run, 'rank': run.rank})}"
    recent = run.recent
    cells = (
        ("Verdict", f'<i class="gw-dot" style="--gw:{look.colour}"></i>{escape(sentence)}'),
        ("Last minute", share_bar(shares(recent.states)) if recent and recent.states else "–"),
        ("Step p50", display(recent.step_s_p50 if recent else None, "s")),
        ("Steps/s", "–" if recent is None or recent.steps_per_s is None else digits(recent.steps_per_s)),
    )
    return (
        f'<tr data-run="{escape(key_of(run))}"{" aria-current=true" if is_shown else ""}><th scope="row">{STATUS_SIGNS[run.status]} '
        f'<a href="{escape(link)}" target="_self">{escape(run.name or run.run)}{rank}</a></th>'
        f"{''.join(f'<td data-label={chr(34)}{label}{chr(34)}>{cell}</td>' for label, cell in cells)}</tr>"
    )
