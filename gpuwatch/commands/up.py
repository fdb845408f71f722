"""`gpuwatch up`: agent and page in one command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.commands.children import Child, ChildEnded, free_port_or_error, wait_for_end, wait_until_answers
from gpuwatch.extras import require


def up(
    http: Annotated[str, typer.Option(help="Where the agent serves.", envvar="GPUWATCH_HTTP")] = "127.0.0.1:9478",
    port: Annotated[int, typer.Option(help="Port of the page.", min=1, max=65535)] = 8501,
    listen: Annotated[list[str] | None, typer.Option(help="Where hooks connect.")] = None,
    history: Annotated[Path | None, typer.Option(help="The history file.", envvar="GPUWATCH_HISTORY")] = None,
) -> None:
    """Start the agent and the live page on this machine; Ctrl-C stops both.

    Example: `gpuwatch up`, then `python train.py` with `for batch in gpuwatch.watch(loader):` in it.
    """
    try:
        with running(http, port, listen or [], history) as (children, agent_url, page_url):
            typer.echo(f"page    {page_url}\nagent   {agent_url}/metrics\nCtrl-C stops both.")
            code = wait_for_end(children)
    except ChildEnded as error:
        typer.secho(f"gpuwatch: {error}", fg="red", err=True)
        raise typer.Exit(error.code if error.code > 0 else 1) from None
    raise typer.Exit(code)


@contextmanager
def running(http: str, port: int, listen: list[str], history: Path | None) -> Iterator[tuple[list[Child], str, str]]:
    """Run agent and page; give (children, the agent's URL, the page's URL) once both answer, and stop both at the end.

    Raises: ConfigError for a busy port; ChildEnded when one ends at its start; MissingExtra.
    """
    require("uvicorn", "all")
    require("streamlit", "all")
    from gpuwatch_dashboards.launch import streamlit_command

    free_port_or_error("--port", "127.0.0.1", port)
    agent_url = f"http://{http}"
    agent_command = [sys.executable, "-m", "gpuwatch", "agent", "--http", http]
    agent_command += [part for endpoint in listen for part in ("--listen", endpoint)]
    agent_command += ["--history", str(history)] if history is not None else []
    with ExitStack() as stack:
        agent = stack.enter_context(Child("agent", agent_command, os.environ))
        page_command, environment = streamlit_command(port, "127.0.0.1", agent_url, None)
        page = stack.enter_context(Child("dashboard", page_command, {**os.environ, **environment}, quiet=True))
        wait_until_answers(agent, f"{agent_url}/readyz")
        page_url = f"http://127.0.0.1:{port}"
        wait_until_answers(page, f"{page_url}/_stcore/health")
        yield [agent, page], agent_url, page_url
