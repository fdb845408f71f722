import os
import shutil
import sys
from importlib.util import find_spec
from typing import Annotated

import typer
from typer import Option

from gpuwatch import __version__
from gpuwatch.api.client import is_url
from gpuwatch.commands.options import AGENT, History, Json
from gpuwatch.errors import ConfigError
from gpuwatch.host.proc import node_name


def doctor(
    agent: Annotated[str | None, Option(help="URL of the agent.", envvar="GPUWATCH_AGENT", show_default=AGENT)] = None,
    prometheus: Annotated[str | None, Option(help="Prometheus to check (URL).", envvar="GPUWATCH_PROMETHEUS")] = None,
    history: History = None,
    json: Json = False,
) -> None:
    """Check the setup for common problems, and print how to fix them. Changes nothing.

    Example: `gpuwatch doctor --prometheus http://prometheus:9090`

    Run it where the problem is: in the training's container for its limits, in the agent's for its permissions. A run
    takes at most three seconds.

    Exit codes: 0 no problem (warnings are possible), 1 at least one problem, 2 wrong usage.
    """
    from gpuwatch.tools.doctor import as_json, as_text, examine
    from gpuwatch.tools.doctor.machine import this_machine
    from gpuwatch.tools.doctor.software import is_address

    for option, url in (("--agent", agent), ("--prometheus", prometheus)):
        if url is not None and not is_url(url):
            raise ConfigError(f"{option} {url}: give a URL such as http://127.0.0.1:9478")
    # An agent that is started in this environment. A GPUWATCH_HTTP that cannot be used is a finding itself.
    address = os.environ.get("GPUWATCH_HTTP", "").strip()
    at, _, port = address.rpartition(":")
    own = f"http://{'127.0.0.1' if at in ('0.0.0.0', '[::]', '::') else at}:{port}" if is_address(address) else AGENT
    if history is None and find_spec("uvicorn") is not None:
        from gpuwatch_agent.history.file import default_history

        history = default_history()
    page = prometheus.rstrip("/") if prometheus is not None else None
    checks = examine(this_machine((agent or own).rstrip("/"), agent is not None, page, history))
    host = node_name()
    if json:
        typer.echo(as_json(checks, __version__, host))
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        typer.echo(as_text(checks, f"gpuwatch doctor · {host} · gpuwatch {__version__}", columns))
    if any(check.status == "problem" for check in checks):
        raise typer.Exit(1)
