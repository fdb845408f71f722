"""`gpuwatch doctor`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from gpuwatch import __version__
from gpuwatch.errors import ConfigError, MissingExtra
from gpuwatch.extras import require

_AGENT = "http://127.0.0.1:9478"


def doctor(
    agent: Annotated[
        str | None, typer.Option(help=f"The agent's URL ({_AGENT}).", envvar="GPUWATCH_AGENT", metavar="URL")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(help="Check this Prometheus too.", envvar="GPUWATCH_PROMETHEUS", metavar="URL")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the live page.", min=1, max=65535)] = 8501,
    history: Annotated[Path | None, typer.Option(help="The history file.", envvar="GPUWATCH_HISTORY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as docs/guides/doctor.md describes it.")] = False,
) -> None:
    """Check everything that commonly goes wrong, and say what to do about it. Nothing is changed.

    Example: `gpuwatch doctor --prometheus http://prometheus:9090`

    Run it where the problem is: in the training's container for its limits, in the agent's for its rights. It takes at most
    three seconds. Exit codes: 0 no problem (there may be warnings), 1 at least one problem, 2 wrong use.
    """
    require("rich", "agent")
    from rich.console import Console

    from gpuwatch.tools.doctor import examine, report
    from gpuwatch.tools.doctor.surroundings import here

    url = _url(agent, "--agent") if agent is not None else _default_agent(os.environ)
    prometheus_url = _url(prometheus, "--prometheus") if prometheus is not None else None
    around = here(url, agent is not None, prometheus_url, history or _default_history(), port)
    checks = examine(around)
    host = socket.gethostname()
    title = f"gpuwatch doctor · {host} · gpuwatch {__version__}"
    console = Console(highlight=False)
    if as_json:
        typer.echo(report.as_json(checks, __version__, host))
    elif sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower():
        report.show(checks, title, console)
    else:
        typer.echo(report.as_text(checks, title))
    if any(check.status == "problem" for check in checks):
        raise typer.Exit(1)


def _url(value: str, option: str) -> str:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{option} {value}: give a URL such as http://127.0.0.1:9478")
    return value.rstrip("/")


def _default_agent(environ: Mapping[str, str]) -> str:
    """Return where an agent started in this environment serves; a GPUWATCH_HTTP that is none is a finding of its own."""
    host, _, port = environ.get("GPUWATCH_HTTP", "").strip().rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        return _AGENT
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '[::]', '::') else host}:{port}"


def _default_history() -> Path | None:
    """Return where an agent of this user keeps its history; None where the agent's extra is not installed."""
    try:
        require("uvicorn", "agent")
        from gpuwatch_agent.options import default_history
    except (MissingExtra, ImportError):
        return None
    return default_history()
