"""`gpuwatch dashboard`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gpuwatch.commands.children import Child, free_port_or_error, wait_for_end
from gpuwatch.extras import require


def dashboard(
    host: Annotated[str, typer.Option(help="Address to serve the page on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve the page on.", min=1, max=65535)] = 8501,
    agent: Annotated[str, typer.Option(help="The agent's URL.", envvar="GPUWATCH_AGENT")] = "http://127.0.0.1:9478",
    prometheus: Annotated[
        str | None, typer.Option(help="Read from this Prometheus instead of an agent.", envvar="GPUWATCH_PROMETHEUS")
    ] = None,
) -> None:
    """Serve the live page.

    Example: `gpuwatch dashboard --prometheus http://prometheus:9090`
    """
    require("streamlit", "dashboard")
    free_port_or_error("--port", host, port)
    from gpuwatch_dashboards.launch import streamlit_command

    command, environment = streamlit_command(port, host, agent, prometheus)
    with Child("dashboard", command, {**os.environ, **environment}) as page:
        typer.echo(f"gpuwatch dashboard: http://{host}:{port}", err=True)
        raise typer.Exit(wait_for_end([page]))
