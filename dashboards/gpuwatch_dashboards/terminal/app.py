"""`gpuwatch top`: live on a terminal, once elsewhere."""

from __future__ import annotations

import os
import shutil
import sys

from rich.console import Console
from rich.text import Text

from gpuwatch_dashboards.selection import key_of
from gpuwatch_dashboards.terminal.facts import Facts
from gpuwatch_dashboards.terminal.feed import Feed
from gpuwatch_dashboards.terminal.finding_lines import finding_lines
from gpuwatch_dashboards.terminal.frame import frame
from gpuwatch_dashboards.terminal.gpu_lines import gpu_table
from gpuwatch_dashboards.terminal.lines import finish, rule
from gpuwatch_dashboards.terminal.messages import no_runs
from gpuwatch_dashboards.terminal.node_lines import node_lines
from gpuwatch_dashboards.terminal.reader import Reader
from gpuwatch_dashboards.terminal.run_detail import ledger_lines, sparkline_lines, step_lines, verdict_lines
from gpuwatch_dashboards.terminal.run_list import run_list
from gpuwatch_dashboards.terminal.screen import Terminal, ansi
from gpuwatch_dashboards.terminal.view import View

LEAST_WIDTH = 60


def is_interactive() -> bool:
    """Return whether there is a terminal to draw on and to take keys from."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def watch(reader: Reader) -> None:
    """Show the live screen until `q`."""
    view = View()
    with Terminal() as terminal, Feed(reader, terminal.wake) as feed:
        while not (view.done or terminal.ended):
            latest = feed.latest
            drawn = frame(view, latest, *terminal.size)
            terminal.paint(drawn.lines)
            facts = latest if isinstance(latest, Facts) else None
            for key in terminal.wait():
                if key == "redraw":
                    terminal.redraw()
                view = view.pressed(key, facts, drawn.scroll_end)
            feed.want(view.run)


def print_once(reader: Reader) -> None:
    """Print everything once: plain text where stdout is not a terminal. Raises SourceError."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    console = Console(legacy_windows=False)
    for line in once(reader, width):
        text = ansi(finish(line, width), console) if sys.stdout.isatty() else finish(line, width).plain.rstrip()
        data = f"{text}\n".encode(sys.stdout.encoding or "utf-8", "replace")
        sys.stdout.buffer.write(data)
    sys.stdout.flush()


def once(reader: Reader, width: int) -> list[Text]:
    """Return every run on a line, those that run (else the latest) in detail, GPUs and node. Raises SourceError."""
    facts = reader.read()
    lines: list[Text] = []
    if facts.runs:
        lines += run_list(facts.runs, None, width, len(facts.runs))
    else:
        lines += no_runs(facts.host, width)
    running = [run for run in facts.runs if run.status == "running"]
    for run in running or facts.runs[:1]:
        seen = facts if facts.selected == key_of(run) else reader.read(key_of(run))
        lines += [Text(), *verdict_lines(run, width), *ledger_lines(run, width)]
        lines += [*step_lines(run, seen.strands, width), *sparkline_lines(seen.strands, width)]
        lines += finding_lines(run.findings, facts.time_s, run.status == "running", width)
    if facts.gpus:
        lines += [Text(), rule("GPUs", width), *gpu_table(facts, None, width, len(facts.gpus))]
        lines += finding_lines(facts.gpu_findings, facts.time_s, True, width) if facts.gpu_findings else []
    return [*lines, Text(), rule(f"node {facts.host}", width), *node_lines(facts, width)]
