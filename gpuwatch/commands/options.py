"""Options and files that several commands have."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Argument, Option, echo

from gpuwatch.config import HTTP, Config, read_config
from gpuwatch.errors import usable

AGENT = f"http://{HTTP}"
Agent = Annotated[str, Option(help="URL of the agent.", envvar="GPUWATCH_AGENT")]
Http = Annotated[str, Option(help="HOST:PORT on which to serve /metrics and the API.", envvar="GPUWATCH_HTTP")]
_LISTEN = "Endpoint for hooks: ipc:///path/hook.sock, or tcp://ADDRESS:9479 (needs a token); repeatable."
Listen = Annotated[list[str] | None, Option(help=_LISTEN, show_default="this user's socket")]
_HISTORY = "~/.local/state/gpuwatch/history.db; for root below /var/lib"
_FILE = "File of the history (SQLite)."
History = Annotated[Path | None, Option(help=_FILE, envvar="GPUWATCH_HISTORY", show_default=_HISTORY)]
PagePort = Annotated[int, Option(help="Port of the live page.", min=1, max=65535)]
Run = Annotated[str, Argument(help="Id or name of the run, or `last`.")]
_PROMETHEUS = "Read from this Prometheus instead of an agent."
Prometheus = Annotated[str | None, Option(help=_PROMETHEUS, envvar="GPUWATCH_PROMETHEUS")]
ConfigFile = Annotated[Path | None, Option(help="Configuration file (TOML).", envvar="GPUWATCH_CONFIG")]
_RUNBOOKS = "Base URL of the runbooks; overrides the configuration file. `/ALERT.md` is appended."
Runbooks = Annotated[str, Option(help=_RUNBOOKS, show_default=False)]
Json = Annotated[bool, Option("--json", help="Print JSON; the guide of the command describes its fields.")]


def settings_of(config: Path | None, runbooks: str = "") -> Config:
    """Return a file's settings, the defaults without one; with another URL of the runbooks where one is given."""
    settings = read_config(config) if config is not None else Config()
    if not runbooks:
        return settings
    return msgspec.structs.replace(settings, alerts=replace(settings.alerts, runbooks=runbooks))


def write_file(folder: Path, name: str, text: str, option: str = "") -> None:
    """Write a file into a folder, made if there is none, and print its path. Raises: ConfigError naming the option."""
    with usable(f"{option}{folder}", "name a folder that you may write to"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    echo(folder / name)
