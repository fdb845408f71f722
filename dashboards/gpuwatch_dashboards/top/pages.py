"""The pages of top at any size, and `--once`: facts and a view in, lines of text out."""

import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.text import Text

from gpuwatch.api import Run
from gpuwatch.errors import SourceError
from gpuwatch.tables import table
from gpuwatch.tools.reports.display import STATES
from gpuwatch_dashboards.panels import live_panels
from gpuwatch_dashboards.render.charts import drawn_lines
from gpuwatch_dashboards.selection import key_of, run_panels
from gpuwatch_dashboards.top import Facts, Reader, Sampled, sections
from gpuwatch_dashboards.top.drawing import BOLD, DIM, Curve, curve_lines, fitted, flowed, rule, styled, swatch, wrapped

PageName = Literal["runs", "gpus", "findings", "panels", "help"]
TALL = 40  # from this height on curves have several lines, and the shares of time are drawn over time
SMALL = 30  # below this height separator lines are left out
LEAST_AREA, MOST_AREA = 4, 10
LEAST_WIDTH = 40
HELP = table("gpuwatch_dashboards.top", "help.yml")


@dataclass(frozen=True)
class View:
    page: PageName = "runs"
    run: str | None = None  # the key of the selected run; None: the newest running one
    gpu: int = 0


@dataclass(frozen=True)
class Page:
    """Lines from top to bottom. Only the body scrolls."""

    body: list[Text]
    above: list[Text] = field(default_factory=list)
    below: list[Text] = field(default_factory=list)


def page(view: View, facts: Facts | SourceError | None, width: int, height: int) -> Page:
    """Return a page for this size in cells; its body is one cell narrower, for the scroll bar.

    The facts are an error while the source does not answer, and None before its first answer.
    """
    whole, width = width, width - 1
    if view.page == "help":
        return Page(help_lines(width))
    if facts is None:
        return Page([Text(), styled("  Waiting for the first answer …", DIM)])
    if isinstance(facts, SourceError):
        return Page(away(facts, width))
    if view.page == "findings":
        return Page(sections.all_findings(facts, width))
    if view.page == "panels":
        return Page(panel_lines(facts.series, width, selected_run(view, facts)))
    node = sections.node_lines(facts, whole)
    if view.page == "gpus":
        node = [rule(f"node {facts.node.host}", whole), *node]
        selected = max(0, min(view.gpu, len(facts.gpus) - 1))
        detail = sections.gpu_detail(facts, facts.gpus[selected], width, height) if facts.gpus else []
        room = height - len(node) - 1
        rows = max(3, min(8, room // 2), room - len(detail))
        return Page(detail, sections.gpu_table(facts, selected, whole, rows), node)
    run = selected_run(view, facts)
    if run is None:
        gpus = [rule("GPUs", width), *sections.gpu_table(facts, None, width, len(facts.gpus))] if facts.gpus else []
        return Page(no_runs(facts.node.host, width) + gpus, [], node)
    tall, small = height >= TALL, height < SMALL
    node = node[:2] if small else [rule(f"node {facts.node.host}", whole), *node]
    gpus = sections.gpu_strip(facts.gpus, whole) if facts.gpus else []
    if facts.gpus and tall:
        gpus = [rule("GPUs", whole), *sections.gpu_table(facts, None, whole, 8)]
    above = sections.run_list(facts.runs, key_of(run), whole, max(3, height // 6))
    series = facts.series if facts.series.run == key_of(run) else facts.series.of_node_only()
    body = [*sections.verdict_lines(run, width), *sections.ledger_lines(run, width, 0.02 if small else 0.0005)]
    body += sections.step_lines(run, series, width)
    curves = sections.run_curves(series, width, 2 if tall else 1)
    room = height - len(above) - len(body) - len(curves) - len(gpus) - len(node)
    found = sections.run_findings(run, facts.time_s, width)
    if len(found) > room:
        found = sections.run_findings(run, facts.time_s, width, full=False)
    body += found + curves
    if tall and room - len(found) > LEAST_AREA:
        body += [Text(), *sections.area_lines(series, width, min(MOST_AREA, room - len(found) - 1))]
    return Page(body, above, gpus + node)


def panel_lines(series: Sampled, width: int, run: Run | None = None) -> list[Text]:
    """Return every panel that an agent can answer: its curves with their latest values, or why there are none."""
    lines: list[Text] = []
    for panel in run_panels(run, [*live_panels()]):
        drawn = drawn_lines(panel, [series.traces.get(f"{panel.key} {curve.legend}", ()) for curve in panel.curves])
        if panel.kind == "stat":  # of several series (e.g. mounts of /dev/shm) the one closest to its limit
            drawn = sorted(drawn, key=lambda line: -(line.value or 0.0))[:1]
        top = panel.maximum or max((v for line in drawn for _, v in line.points if v is not None), default=0.0)
        curves = [Curve(line.name or panel.title, line.points, panel.unit, line.colour, top) for line in drawn]
        lines.append(rule(panel.title, width))
        lines += curve_lines(curves, series.start_s, series.end_s, width, label=min(24, width // 2 - 4))
        lines += [] if curves else wrapped(panel.empty, width - 1, DIM, 1)
    return lines


def selected_run(view: View, facts: Facts) -> Run | None:
    """Return the run to show in detail: the selected one, even before its series have been read."""
    keys = {key_of(run): run for run in facts.runs}
    return keys.get(view.run or "") or keys.get(facts.series.run)


def header(facts: Facts | SourceError | None, width: int) -> Text:
    line = styled(" gpuwatch top", BOLD)
    if isinstance(facts, Facts):
        running = sum(run.status == "running" for run in facts.runs)
        line.append(f"  {facts.node.host} · {running} running · {facts.label}", DIM)
        clock = time.strftime(" %H:%M:%S ", time.localtime(facts.time_s))
        line = fitted(line, width - len(clock)).append(clock, DIM)
    return line


def no_runs(host: str, width: int) -> list[Text]:
    """Return the message shown before the first run: the line to add."""
    lines = [Text(), *wrapped(f"No training run on {host} yet.", width, BOLD, 2), Text()]
    lines += wrapped("Add one line to your training loop:", width, "", 2)
    lines += [Text(), Text("    import gpuwatch"), Text()]
    lines += [styled("    for batch in gpuwatch.watch(loader):", "bold reverse"), Text("        ..."), Text()]
    lines += wrapped("or run the script as it is: gpuwatch run -- python train.py", width, "", 2)
    return lines + wrapped("The run appears here automatically, with a verdict after its first steps.", width, DIM, 2)


def away(error: SourceError, width: int) -> list[Text]:
    """Return the message shown while the source does not answer: what, where, what to do."""
    what, remedy = (f"{text[:1].upper()}{text[1:].rstrip('.')}." for text in (error.what, error.remedy))
    lines = [Text(), *wrapped(what, width - 2, "bold reverse", 2), Text()]
    lines += [*wrapped(remedy.replace("`", ""), width - 2, BOLD, 2), Text()]
    return lines + wrapped("gpuwatch top tries again every second and continues automatically.", width - 2, DIM, 2)


def help_lines(width: int) -> list[Text]:
    lines = [rule("Keys", width)]
    for keys, text in HELP["keys"]:
        lines += wrapped(text, width - 1, "", 22, styled(f"  {keys}", BOLD))
    lines.append(rule("States", width))
    lines += flowed([swatch(state).append(f" {look.name}") for state, look in STATES.items()], width, 2, "   ")
    lines.append(rule("How to read it", width))
    return lines + [line for text in HELP["reading"] for line in wrapped(text, width - 1, "", 2)]


def once(reader: Reader, width: int) -> list[Text]:
    """Return the list of runs, details of the running ones (else of the latest), GPUs and node. Raises SourceError."""
    facts = reader.read()
    runs = list(facts.runs)
    lines = sections.run_list(runs, None, width, len(runs)) if runs else no_runs(facts.node.host, width)
    for run in [run for run in runs if run.status == "running"] or runs[:1]:
        series = facts.series if facts.series.run == key_of(run) else reader.read(key_of(run)).series
        lines += [Text(), *sections.verdict_lines(run, width), *sections.ledger_lines(run, width)]
        lines += sections.step_lines(run, series, width)
        lines += sections.run_findings(run, facts.time_s, width)
        lines += sections.run_curves(series, width)
    if facts.gpus:
        lines += [Text(), rule("GPUs", width), *sections.gpu_table(facts, None, width, len(facts.gpus))]
        lines += sections.finding_lines(facts.node.findings, facts.time_s, True, width) if facts.node.findings else []
    return [*lines, Text(), rule(f"node {facts.node.host}", width), *sections.node_lines(facts, width)]


def print_once(reader: Reader) -> None:
    """Print everything once: plain text where stdout is not a terminal. Raises SourceError."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    lines = [fitted(line, width) for line in once(reader, width)]
    if sys.stdout.isatty():
        Console(legacy_windows=False, width=width).print(*lines, sep="\n", soft_wrap=True)
        return
    text = "".join(f"{line.plain.rstrip()}\n" for line in lines)
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding or "utf-8", "replace"))
    sys.stdout.flush()


def is_interactive() -> bool:
    """Return whether stdin and stdout are a terminal that can be drawn on."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
