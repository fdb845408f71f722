import os
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from gpuwatch import __version__
from gpuwatch.commands.options import AGENT, History, Json
from gpuwatch.errors import ConfigError


def doctor(
    agent: Annotated[str | None, Option(help="URL of the agent.", envvar="GPUWATCH_AGENT", show_default=AGENT)] = None,
    prometheus: Annotated[str | None, Option(help="Prometheus to check (URL).", envvar="GPUWATCH_PROMETHEUS")] = None,
    history: History = None,
    json: Json = False,
) -> None:
    """Check the setup for common problems, and print how to fix them. Changes nothing.

    Example: `gpuwatch doctor --prometheus http://prometheus:9090`

    Run it where the problem is: in the training's container for its limits, in the agent's for its permissions. A run takes at
    most three seconds.

    Exit codes: 0 no problem (warnings are possible), 1 at least one problem, 2 wrong usage.
    """
    from gpuwatch.tools.doctor import examine, outcome
    from gpuwatch.tools.doctor.machine import this_machine

    url = _url(agent, "--agent") if agent is not None else _default_agent()
    prometheus_url = _url(prometheus, "--prometheus") if prometheus is not None else None
    checks = examine(this_machine(url, agent is not None, prometheus_url, history or _default_history()))
    host = socket.gethostname()
    title = f"gpuwatch doctor · {host} · gpuwatch {__version__}"
    if json:
        typer.echo(outcome.as_json(checks, __version__, host))
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        typer.echo(outcome.as_text(checks, title, columns))
    if any(check.status == "problem" for check in checks):
        raise typer.Exit(1)


def _url(value: str, option: str) -> str:
    from gpuwatch.tools.doctor.software import is_url

    if not is_url(value):
        raise ConfigError(f"{option} {value}: give a URL such as http://127.0.0.1:9478")
    return value.rstrip("/")


def _default_agent() -> str:
    """Return where an agent started in this environment serves. A GPUWATCH_HTTP that cannot be used is a finding itself."""
    from gpuwatch.tools.doctor.software import is_address

    address = os.environ.get("GPUWATCH_HTTP", "").strip()
    if not is_address(address):
        return AGENT
    host, _, port = address.rpartition(":")
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '[::]', '::') else host}:{port}"


def _default_history() -> Path | None:
    """Return where an agent of this user keeps its history; None where the agent's extra is not installed."""
    if find_spec("uvicorn") is None:
        return None
    from gpuwatch_agent.history.file import default_history

    return default_history()
