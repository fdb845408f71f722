"""`gpuwatch agent`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.cli import require


def agent(
    http: Annotated[
        str, typer.Option(help="Where to serve /metrics and the API.", envvar="GPUWATCH_HTTP")
    ] = "127.0.0.1:9478",
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Where hooks connect: ipc:///path/hook.sock or tcp://127.0.0.1:9479; may be given again."),
    ] = None,
    history: Annotated[Path | None, typer.Option(help="The history file.", envvar="GPUWATCH_HISTORY")] = None,
    keep_days: Annotated[float, typer.Option(help="How long history is kept.", min=0.01)] = 7.0,
    keep_gib: Annotated[float, typer.Option(help="How large the history may grow.", min=0.01)] = 2.0,
    procfs: Annotated[Path, typer.Option(help="The node's /proc, in a container.")] = Path("/proc"),
    sysfs: Annotated[Path, typer.Option(help="The node's /sys, in a container.")] = Path("/sys"),
    shm: Annotated[Path, typer.Option(help="The node's /dev/shm, in a container.")] = Path("/dev/shm"),
) -> None:
    """Take hooks' messages, sample the node once a second, serve Prometheus and the JSON API.

    Example: `gpuwatch agent --http 0.0.0.0:9478 --history /var/lib/gpuwatch/history.db`
    """
    for module in ("prometheus_client", "starlette", "uvicorn", "pynvml"):
        require(module, "agent")
    from gpuwatch_agent.collectors import Roots
    from gpuwatch_agent.main import Options, run_agent

    def ready(url: str) -> None:
        print(f"gpuwatch agent: {url}/metrics", file=sys.stderr, flush=True)

    options = Options(http, tuple(listen or ()), history, keep_days, keep_gib, Roots(procfs, sysfs, shm))
    run_agent(options, ready)
