"""`gpuwatch report`."""

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
from gpuwatch.tools.reports import as_json as report_json
from gpuwatch.tools.reports import broken, parse_gate


def report(
    run: Annotated[str, typer.Argument(help="A run's id or name, or `last`.")] = "last",
    agent: Agent = AGENT,
    history: HistoryFile = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, as docs/guides/report.md describes it.")] = False,
    output: Output = None,
    config: Config = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="End with 1 when a state takes more than this share, e.g. input_wait=0.1; may be given again."
        ),
    ] = None,
) -> None:
    """Write a report of one run: where its time went, why, and what to change.

    Example: `gpuwatch report last`, `gpuwatch report resnet50-a --json --fail-on input_wait=0.1`

    The page is one file without scripts. Without `--output` it is written to `gpuwatch-NAME.html`; Markdown and JSON go to stdout.
    With `--history FILE` no agent is needed, nor need one run. `step_s=0.05` limits the mean step time.
    Exit codes: 0 done, 1 a limit of `--fail-on` is broken, 2 wrong use, or no such run.
    """
    gates = [parse_gate(text) for text in fail_on or ()]
    how = form(markdown, as_json)
    found = load_run(open_source(agent, history), run, time.time(), config)
    failed = broken(found, gates)
    if how is Form.JSON:
        text = report_json(found)
    else:
        require("jinja2", "agent")
        from gpuwatch.tools.reports.page import run_markdown, run_page

        text = run_markdown(found, failed) if how is Form.MARKDOWN else run_page(found, failed)
    finish(text, how, output, found.name, [f"{found.name}: {each}" for each in failed])
