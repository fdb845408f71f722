"""`gpuwatch rules`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpuwatch.alerting.render import render
from gpuwatch.config import Config, read_config
from gpuwatch.errors import ConfigError, require

FILE = "gpuwatch.yml"
Runbooks = Annotated[
    str, typer.Option(help="URL of the runbooks, instead of the file's: `/ALERT.md` is appended.", show_default=False)
]


def rules(
    config: Annotated[
        Path | None, typer.Option(help="TOML file whose [alerts] and [prices] are used.", envvar="GPUWATCH_CONFIG")
    ] = None,
    write: Annotated[Path | None, typer.Option(help=f"Write {FILE} into this folder instead of printing it.")] = None,
    runbooks: Runbooks = "",
) -> None:
    """Print the Prometheus recording and alert rules, or write them.

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


def settings_of(config: Path | None, runbooks: str) -> Config:
    """Return a file's settings, the defaults without one; with another URL of the runbooks where one is given."""
    settings = read_config(config) if config is not None else Config()
    if not runbooks:
        return settings
    return msgspec.structs.replace(settings, alerts=replace(settings.alerts, runbooks=runbooks))


def write_file(folder: Path, name: str, text: str, option: str = "") -> None:
    """Write a file into a folder, which is made if there is none, and print its path. Raises: ConfigError naming the option."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}{folder}: {error.strerror}; name a folder that you may write to") from error
    typer.echo(folder / name)
