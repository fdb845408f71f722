"""`gpuwatch agent`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.errors import require


class Series(str, Enum):
    """How many time series are served."""

    standard = "standard"
    full = "full"


def agent(
    config: Annotated[
        Path | None, typer.Option(help="TOML file; an option given here wins.", envvar="GPUWATCH_CONFIG")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT to serve /metrics and the API on.", envvar="GPUWATCH_HTTP", show_default="127.0.0.1:9478"
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="Where hooks connect: ipc:///path/hook.sock or tcp://127.0.0.1:9479; repeatable.",
            show_default="this user's socket",
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="The history file (SQLite).",
            envvar="GPUWATCH_HISTORY",
            show_default="~/.local/state/gpuwatch/history.db; for root below /var/lib",
        ),
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(help="Days that the history is kept.", min=0.01, show_default="7")
    ] = None,
    keep_gib: Annotated[
        float | None, typer.Option(help="Maximum size of the history, in GiB.", min=0.01, show_default="2")
    ] = None,
    procfs: Annotated[
        Path | None, typer.Option(help="In a container: where the node's /proc is mounted.", show_default="/proc")
    ] = None,
    sysfs: Annotated[
        Path | None, typer.Option(help="In a container: where the node's /sys is mounted.", show_default="/sys")
    ] = None,
    shm: Annotated[
        Path | None, typer.Option(help="In a container: where the node's /dev/shm is mounted.", show_default="/dev/shm")
    ] = None,
    series: Annotated[
        Series | None,
        typer.Option(
            help="full adds series per core and per link, GPM's rates, and error counters that are still 0.",
            show_default="standard",
        ),
    ] = None,
    dcgm: Annotated[
        str | None,
        typer.Option(help="Read GPUs from this dcgm-exporter instead of NVML, e.g. http://127.0.0.1:9400."),
    ] = None,
    full_hours: Annotated[
        float | None,
        typer.Option(
            help="Hours that steps and samples are kept at full resolution, before they are downsampled to one per minute.",
            min=0.1,
            show_default="24",
        ),
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Sample stacks when a finding begins (needs py-spy; docs/stacks.md).")
    ] = False,
    notify: Annotated[
        list[str] | None,
        typer.Option(help="Apprise URL to notify without Alertmanager (slack://…, json://…); repeatable."),
    ] = None,
) -> None:
    """Receive messages of the hooks, sample the node once a second, serve Prometheus metrics and the JSON API.

    Examples: `gpuwatch agent --http 0.0.0.0:9478 --history /var/lib/gpuwatch/history.db`;
    `gpuwatch agent --config /etc/gpuwatch/gpuwatch.toml`
    """
    for module in ("prometheus_client", "psutil", "starlette", "uvicorn", "pynvml"):
        require(module, "agent")
    from dataclasses import replace

    from gpuwatch.config import Config, read_config
    from gpuwatch_agent.__main__ import go_on_as_agent
    from gpuwatch_agent.options import Choice, Options, Roots

    settings = read_config(config) if config is not None else Config()
    own = settings.agent
    kept = history or own.history
    options = Options(
        http=http or own.http or "127.0.0.1:9478",
        listen=tuple(listen or own.listen),
        history=Path(kept) if kept else None,
        keep_days=keep_days or own.keep_days or 7.0,
        keep_gib=keep_gib or own.keep_gib or 2.0,
        roots=Roots(
            Path(procfs or own.procfs or "/proc"),
            Path(sysfs or own.sysfs or "/sys"),
            Path(shm or own.shm or "/dev/shm"),
        ),
        choice=Choice((series or own.series) == "full", dcgm or own.dcgm),
        full_hours=full_hours or own.full_hours or 24.0,
        notify=replace(settings.notify, urls=tuple(notify)) if notify else settings.notify,
        alerts=settings.alerts,
        prices=settings.prices,
        stacks=replace(settings.stacks, automatic=True) if stacks else settings.stacks,
    )
    go_on_as_agent(options, settings.thresholds)
