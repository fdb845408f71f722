"""The whole screen as lines: exactly `height` of them, each exactly `width` cells. Pure: facts and a view in, text out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from rich.text import Text

from gpuwatch.api import Run
from gpuwatch.errors import SourceError
from gpuwatch_dashboards.selection import key_of
from gpuwatch_dashboards.terminal.facts import Facts, Strands
from gpuwatch_dashboards.terminal.finding_lines import all_findings, finding_lines
from gpuwatch_dashboards.terminal.gpu_lines import gpu_page, gpu_strip, gpu_table
from gpuwatch_dashboards.terminal.lines import finish, rule
from gpuwatch_dashboards.terminal.looks import BOLD, DIM, KEY, words
from gpuwatch_dashboards.terminal.messages import KEYS, away, help_lines, no_runs
from gpuwatch_dashboards.terminal.node_lines import node_lines
from gpuwatch_dashboards.terminal.run_detail import (
    area_lines,
    ledger_lines,
    sparkline_lines,
    step_lines,
    verdict_lines,
)
from gpuwatch_dashboards.terminal.run_list import run_list
from gpuwatch_dashboards.terminal.view import View

TALL = 38
"""From this height on there is room for curves of several lines and for the ledger over time."""
SMALL = 28
"""Below this height lines that only divide are left out."""
LEAST_FINDING_LINES = 3
LEAST_AREA, MOST_AREA = 3, 10
"""Lines of the ledger over time."""


@dataclass(frozen=True)
class Frame:
    lines: list[Text]
    scroll_end: int = 0
    """How far the page can be scrolled."""


def frame(view: View, facts: Facts | SourceError | None, width: int, height: int) -> Frame:
    """Return the screen. `facts` is an error while the source is away, None before it first answered."""
    body_height = max(1, height - 2)
    body, scroll_end = _body(view, facts, width, body_height)
    body = [*body[:body_height], *[Text()] * (body_height - len(body))]
    lines = [_header(facts, width), *body, _footer(view, width)]
    return Frame([finish(line, width) for line in lines[:height]], scroll_end)


def _body(view: View, facts: Facts | SourceError | None, width: int, height: int) -> tuple[list[Text], int]:
    if view.page == "help":
        return _scrolled(help_lines(width), view.scroll, height)
    if facts is None:
        return [Text(), words("  Asking for the first numbers …", DIM)], 0
    if isinstance(facts, SourceError):
        return away(facts, width), 0
    if view.page == "findings":
        return _scrolled(all_findings(facts, width), view.scroll, height)
    node = _node(facts, width, True)
    if view.page == "gpus":
        room = height - len(node)
        page = gpu_page(facts, max(0, min(view.gpu, len(facts.gpus) - 1)), width, room)
        return [*page, *[Text()] * (room - len(page)), *node], 0
    run = chosen(view, facts)
    if run is None:
        above = no_runs(facts.host, width)
        rows = height - len(above) - len(node) - 2  # less the rule and the head
        if facts.gpus and rows > 0:
            above += [rule("GPUs", width), *gpu_table(facts, None, width, rows)]
        return [*above, *[Text()] * (height - len(above) - len(node)), *node], 0
    return _run_page(facts, run, width, height), 0


def chosen(view: View, facts: Facts) -> Run | None:
    """Return the run in detail: the one just chosen, even before its series have been read."""
    keys = {key_of(run): run for run in facts.runs}
    return keys.get(view.run or "") or keys.get(facts.selected or "")


def _run_page(facts: Facts, run: Run, width: int, height: int) -> list[Text]:
    """Return list, verdict, ledger, step, curves, findings, GPUs and node: what there is room for, the most telling first."""
    tall, small = height >= TALL, height < SMALL
    strands = facts.strands if facts.strands.key == key_of(run) else _of_the_node_only(facts.strands)
    above = run_list(facts.runs, key_of(run), width, max(3, height // 6))
    above += [*verdict_lines(run, width), *ledger_lines(run, width, 0.02 if small else 0.0005)]
    step = step_lines(run, strands, width)
    curves = sparkline_lines(strands, width, 2 if tall else 1)
    below = _gpus(facts, width, 8 if tall else 0) + _node(facts, width, not small)
    room = height - len(above) - len(step) - len(below)
    findings = finding_lines(run.findings, facts.time_s, run.status == "running", width)
    if len(findings) > room - len(curves):
        findings = finding_lines(run.findings, facts.time_s, run.status == "running", width, brief=True)
    if room - len(curves) < min(len(findings), LEAST_FINDING_LINES):
        curves = []  # a small screen, or many states: curves make room for what to do
    room -= len(curves)
    head = [rule("what to do", width)] if room > len(findings) else []
    found = _cut(findings, room - len(head), width)
    spare = room - len(head) - len(found)
    over_time: list[Text] = []
    if tall and spare > LEAST_AREA + 2:
        over_time = [Text(), *area_lines(strands, width, min(MOST_AREA, spare - 2)), Text()]
    space = [Text()] * (spare - len(over_time))
    return [*above, *over_time, *step, *curves, *head, *found, *space, *below]


def _gpus(facts: Facts, width: int, rows: int) -> list[Text]:
    if not facts.gpus:
        return []
    return [rule("GPUs", width), *gpu_table(facts, None, width, rows)] if rows else gpu_strip(facts.gpus, width)


def _node(facts: Facts, width: int, with_rule: bool) -> list[Text]:
    return [*([rule(f"node {facts.host}", width)] if with_rule else []), *node_lines(facts, width)]


def _of_the_node_only(strands: Strands) -> Strands:
    """Return strands without what is about another run: this one's are on their way."""
    return replace(strands, key="", ledger=(), step_s=(), input_ratio=(), phases_s={}, worker_ratio=())


def _cut(lines: list[Text], room: int, width: int) -> list[Text]:
    if len(lines) <= room:
        return lines
    kept = lines[: max(0, room)]
    if kept:
        kept[-1] = finish(kept[-1], width - 9).append(" … f: all", DIM)
    return kept


def _scrolled(lines: list[Text], scroll: int, height: int) -> tuple[list[Text], int]:
    end = max(0, len(lines) - height)
    return lines[min(scroll, end) :], end


def _header(facts: Facts | SourceError | None, width: int) -> Text:
    line = words(" gpuwatch top", BOLD)
    if isinstance(facts, Facts):
        running = sum(run.status == "running" for run in facts.runs)
        line.append(f"  {facts.host} · {running} running · {facts.label}", DIM)
        clock = time.strftime("%H:%M:%S ", time.localtime(facts.time_s))
        line.truncate(width - len(clock) - 1, overflow="ellipsis", pad=True)
        line.append(f" {clock}", DIM)
    return line


def _footer(view: View, width: int) -> Text:
    line = Text(" ")
    pages = {"g": "gpus", "f": "findings", "?": "help"}
    keys = [*KEYS[:1], ("⏎", "its run"), *KEYS[1:]] if view.page == "gpus" else KEYS
    for key, text in keys:
        line.append(f" {key} ", KEY)
        line.append(f" {'runs' if pages.get(key) == view.page else text}  ")
    line.rstrip()
    return line
