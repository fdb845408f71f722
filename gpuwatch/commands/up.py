"""`gpuwatch up` and `gpuwatch dashboard`: agent and page in one command, and the page alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.commands.children import (
    Child,
    ChildEnded,
    free_port_or_error,
    running,
    wait_for_end,
    wait_until_answers,
)
from gpuwatch.commands.report_options import AGENT, Agent
from gpuwatch.errors import require

Prometheus = Annotated[
    str | None, typer.Option(help="Read from this Prometheus instead of an agent.", envvar="GPUWATCH_PROMETHEUS")
]


def up(
    http: Annotated[
        str, typer.Option(help="HOST:PORT of the agent's /metrics and API.", envvar="GPUWATCH_HTTP")
    ] = "127.0.0.1:9478",
    port: Annotated[int, typer.Option(help="Port of the page.", min=1, max=65535)] = 8501,
    listen: Annotated[list[str] | None, typer.Option(help="Where hooks connect, as for `gpuwatch agent`.")] = None,
    history: Annotated[Path | None, typer.Option(help="The history file.", envvar="GPUWATCH_HISTORY")] = None,
) -> None:
    """Start the agent and the live page on this machine; Ctrl-C stops both.

    Example: `gpuwatch up`, then run a `train.py` that contains `for batch in gpuwatch.watch(loader):`
    """
    try:
        with agent_and_page(http, port, listen or [], history) as (children, agent_url, page_url):
            typer.echo(f"page    {page_url}\nagent   {agent_url}/metrics\nCtrl-C stops both.")
            code = wait_for_end(children)
    except ChildEnded as error:
        typer.secho(f"gpuwatch: {error}", fg="red", err=True)
        raise typer.Exit(error.code if error.code > 0 else 1) from None
    raise typer.Exit(code)


@contextmanager
def agent_and_page(
    http: str, port: int, listen: list[str], history: Path | None
) -> Iterator[tuple[list[Child], str, str]]:
    """Run agent and page; give (children, the agent's URL, the page's URL) once both answer, and stop both at the end.

    Raises: ConfigError for a busy port; ChildEnded when one ends at its start; MissingExtra.
    """
    require("uvicorn", "all")
    require("streamlit", "all")
    from gpuwatch_dashboards.launch import streamlit_command

    free_port_or_error("--port", "127.0.0.1", port)
    agent_url, page_url = f"http://{http}", f"http://127.0.0.1:{port}"
    agent_command = [sys.executable, "-m", "gpuwatch", "agent", "--http", http]
    agent_command += [part for endpoint in listen for part in ("--listen", endpoint)]
    agent_command += ["--history", str(history)] if history is not None else []
    page_command, environment = streamlit_command(port, "127.0.0.1", agent_url, None)
    with (
        running(agent_command, os.environ) as agent,
        running(page_command, {**os.environ, **environment}, quiet=True) as page,
    ):
        wait_until_answers("agent", agent, f"{agent_url}/readyz")
        wait_until_answers("dashboard", page, f"{page_url}/_stcore/health")
        yield [agent, page], agent_url, page_url


def dashboard(
    host: Annotated[str, typer.Option(help="Address to serve the page on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve the page on.", min=1, max=65535)] = 8501,
    agent: Agent = AGENT,
    prometheus: Prometheus = None,
) -> None:
    """Serve the live page.

    Example: `gpuwatch dashboard --prometheus http://prometheus:9090`
    """
    require("streamlit", "dashboard")
    free_port_or_error("--port", host, port)
    from gpuwatch_dashboards.launch import streamlit_command

    command, environment = streamlit_command(port, host, agent, prometheus)
    with running(command, {**os.environ, **environment}) as page:
        typer.echo(f"gpuwatch dashboard: http://{host}:{port}", err=True)
        raise typer.Exit(wait_for_end([page]))
