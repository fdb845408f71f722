"""`gpuwatch rules`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.errors import ConfigError
from gpuwatch.extras import require

FILE = "gpuwatch.yml"


def rules(
    config: Annotated[
        Path | None, typer.Option(help="TOML file whose [alerts] and [prices] are used.", envvar="GPUWATCH_CONFIG")
    ] = None,
    write: Annotated[Path | None, typer.Option(help=f"Write {FILE} into this folder instead of printing it.")] = None,
    runbooks: Annotated[str, typer.Option(help="Where the runbooks are: what stands before /<Alert>.md.")] = "",
) -> None:
    """Print the Prometheus recording and alert rules, or write them.

    Examples: `gpuwatch rules > /etc/prometheus/rules/gpuwatch.yml`;
    `gpuwatch rules --config gpuwatch.toml --write /etc/prometheus/rules`
    """
    require("yaml", "agent")
    from gpuwatch.alerting.render import RUNBOOKS, render
    from gpuwatch.config import Config, read_config

    settings = read_config(config) if config is not None else Config()
    text = render(settings.alerts, settings.prices, runbooks=runbooks or RUNBOOKS)
    if write is None:
        typer.echo(text, nl=False)
        return
    try:
        write.mkdir(parents=True, exist_ok=True)
        (write / FILE).write_text(text)
    except OSError as error:
        raise ConfigError(f"--write {write}: {error.strerror}; name a folder that you may write to") from error
    typer.echo(write / FILE)
