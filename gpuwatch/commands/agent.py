"""`gpuwatch agent`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.errors import ConfigError
from gpuwatch.extras import require


def agent(
    config: Annotated[
        Path | None, typer.Option(help="TOML file; an option given here wins.", envvar="GPUWATCH_CONFIG")
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Where to serve /metrics and the API [127.0.0.1:9478].", envvar="GPUWATCH_HTTP")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Where hooks connect: ipc:///path/hook.sock or tcp://127.0.0.1:9479; may be given again."),
    ] = None,
    history: Annotated[Path | None, typer.Option(help="The history file.", envvar="GPUWATCH_HISTORY")] = None,
    keep_days: Annotated[float | None, typer.Option(help="How long history is kept [7].", min=0.01)] = None,
    keep_gib: Annotated[float | None, typer.Option(help="How large the history may grow [2].", min=0.01)] = None,
    procfs: Annotated[Path | None, typer.Option(help="The node's /proc, in a container [/proc].")] = None,
    sysfs: Annotated[Path | None, typer.Option(help="The node's /sys, in a container [/sys].")] = None,
    shm: Annotated[Path | None, typer.Option(help="The node's /dev/shm, in a container [/dev/shm].")] = None,
    series: Annotated[
        str | None,
        typer.Option(help="standard, or full: each core, each link, GPM's rates, error counters from 0 [standard]."),
    ] = None,
    dcgm: Annotated[
        str | None,
        typer.Option(help="Read GPUs from this dcgm-exporter instead of NVML, e.g. http://127.0.0.1:9400."),
    ] = None,
    full_hours: Annotated[
        float | None,
        typer.Option(help="How long steps and samples are kept each for itself, then by the minute [24].", min=0.1),
    ] = None,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Look at stacks when a finding begins (needs py-spy; docs/guides/stacks.md)."),
    ] = False,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            help="Whom to tell without Alertmanager, an Apprise URL (slack://…, json://…); may be given again."
        ),
    ] = None,
) -> None:
    """Take hooks' messages, sample the node once a second, serve Prometheus and the JSON API.

    Examples: `gpuwatch agent --http 0.0.0.0:9478 --history /var/lib/gpuwatch/history.db`;
    `gpuwatch agent --config /etc/gpuwatch/gpuwatch.toml`
    """
    for module in ("prometheus_client", "psutil", "starlette", "uvicorn", "pynvml"):
        require(module, "agent")
    from dataclasses import replace

    from gpuwatch.config import Config, read_config
    from gpuwatch_agent.__main__ import go_on_as_agent
    from gpuwatch_agent.options import Choice, Options, Roots

    if series not in (None, "standard", "full"):
        raise ConfigError(f"--series {series}: standard or full")
    settings = read_config(config) if config is not None else Config()
    own = settings.agent
    kept = Path(own.history) if own.history is not None else None
    options = Options(
        http=http or own.http or "127.0.0.1:9478",
        listen=tuple(listen or own.listen),
        history=history or kept,
        keep_days=_first(keep_days, own.keep_days, 7.0),
        keep_gib=_first(keep_gib, own.keep_gib, 2.0),
        roots=Roots(
            procfs or Path(own.procfs or "/proc"),
            sysfs or Path(own.sysfs or "/sys"),
            shm or Path(own.shm or "/dev/shm"),
        ),
        choice=Choice((series or own.series) == "full", dcgm or own.dcgm),
        full_hours=_first(full_hours, own.full_hours, 24.0),
        notify=replace(settings.notify, urls=tuple(notify)) if notify else settings.notify,
        alerts=settings.alerts,
        prices=settings.prices,
        stacks=replace(settings.stacks, automatic=True) if stacks else settings.stacks,
    )
    go_on_as_agent(options, settings.thresholds)


def _first(*values: float | None) -> float:
    """Return the first value that was given."""
    return next(value for value in values if value is not None)
