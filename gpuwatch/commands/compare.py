"""`gpuwatch compare`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpuwatch.commands.report_options import (
    AGENT,
    Agent,
    Config,
    Form,
    HistoryFile,
    Output,
    finish,
    form,
    load_run,
    open_source,
)
from gpuwatch.errors import require
from gpuwatch.tools.reports import as_json as comparison_json
from gpuwatch.tools.reports import broken, parse_gate
from gpuwatch.tools.reports import compare as compare_runs


def compare(
    a: Annotated[str, typer.Argument(help="The run before: its id or name, or a report's JSON file.")],
    b: Annotated[str, typer.Argument(help="The run after: the same, or `last`.")],
    agent: Agent = AGENT,
    history: HistoryFile = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, as docs/guides/report.md describes it.")] = False,
    output: Output = None,
    config: Config = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="End with 1 when B is proven slower than A by more than this share (slower=0.05), or breaks a limit of "
            "`gpuwatch report` (input_wait=0.1); may be given again."
        ),
    ] = None,
) -> None:
    """Set two runs side by side: states, step time and how sure its change is, predicted against achieved.

    Example: `gpuwatch compare resnet50-a resnet50-b`, `gpuwatch compare baseline.json last --fail-on slower=0.05`

    `baseline.json` is what `gpuwatch report RUN --json` wrote. Exit codes: 0 done, 1 a limit of `--fail-on` is broken, 2 wrong use, or no such run.
    """
    gates = [parse_gate(text, of_two=True) for text in fail_on or ()]
    how = form(markdown, as_json)
    source = open_source(agent, history)
    now_s = time.time()
    found = compare_runs(load_run(source, a, now_s, config), load_run(source, b, now_s, config))
    if how is Form.JSON:
        text = comparison_json(found)
    else:
        require("jinja2", "agent")
        from gpuwatch.tools.reports.page import compare_markdown, compare_page

        text = compare_markdown(found) if how is Form.MARKDOWN else compare_page(found)
    failed = [f"{found.b.name} against {found.a.name}: {each}" for each in broken(found.b, gates, found)]
    finish(text, how, output, f"{found.a.name}-{found.b.name}", failed)
