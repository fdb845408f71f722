from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.alerting.render import render
from gpuwatch.commands.options import ConfigFile, Runbooks, settings_of, write_file
from gpuwatch.errors import require

FILE = "gpuwatch.yml"


def rules(
    config: ConfigFile = None,
    write: Annotated[Path | None, typer.Option(help=f"Write {FILE} into this folder instead of printing it.")] = None,
    runbooks: Runbooks = "",
) -> None:
    """Print the recording and alert rules for Prometheus, or write them to a folder.

    Examples: `gpuwatch rules > /etc/prometheus/rules/gpuwatch.yml`;
    `gpuwatch rules --config gpuwatch.toml --write /etc/prometheus/rules`
    """
    require("yaml", "agent")
    settings = settings_of(config, runbooks)
    text = render(settings.alerts, settings.prices)
    if write is None:
        typer.echo(text, nl=False)
    else:
        write_file(write, FILE, text, "--write ")
