"""What `gpuwatch report` and `gpuwatch compare` share: where runs are read from, and where the result goes."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.api import Client, RunSource
from gpuwatch.config import read_config
from gpuwatch.errors import ConfigError, require
from gpuwatch.tools.reports import RunReport, from_json, gather

AGENT = "http://127.0.0.1:9478"
Agent = Annotated[str, typer.Option(help="The agent's URL.", envvar="GPUWATCH_AGENT")]
HistoryFile = Annotated[Path | None, typer.Option(help="Read this history file instead of asking an agent.")]
Config = Annotated[
    Path | None, typer.Option(help="TOML file whose [prices] are used before the agent's.", envvar="GPUWATCH_CONFIG")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="The file to write; - for stdout.")]


class Form(Enum):
    """What is written; the value is the file's ending."""

    HTML = "html"
    MARKDOWN = "md"
    JSON = "json"


def form(markdown: bool, as_json: bool) -> Form:
    """Return what is asked for. Raises: ConfigError for both at once."""
    if markdown and as_json:
        raise ConfigError("--markdown and --json: give one of them; a report is written once")
    return Form.JSON if as_json else Form.MARKDOWN if markdown else Form.HTML


def open_source(agent: str, history: Path | None) -> RunSource:
    """Return the history file if one is given, else the agent. Raises: ConfigError."""
    if history is None:
        return Client(agent, "give --agent URL, or read its file with --history FILE")
    require("prometheus_client", "agent")
    from gpuwatch_agent.history.source import HistorySource

    return HistorySource(history)


def load_run(source: RunSource, wanted: str, now_s: float, config: Path | None = None) -> RunReport:
    """Return a run's report, from the source or from a report's JSON file. Raises: ConfigError."""
    if wanted.endswith(".json"):
        try:
            return from_json(Path(wanted).read_bytes(), wanted)
        except OSError as error:
            raise ConfigError(
                f"{wanted}: {error.strerror}; make it with gpuwatch report RUN --json -o {wanted}"
            ) from error
    return gather(source, wanted, now_s, None if config is None else read_config(config).prices)


def write(text: str, how: Form, output: Path | None, name: str) -> None:
    """Write the result; a page without a name for it gets one, which is said on stdout. Raises: ConfigError."""
    if str(output) == "-" or (output is None and how is not Form.HTML):
        typer.echo(text, nl=not text.endswith("\n"))
        return
    path = output or Path(f"gpuwatch-{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}.html")
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}; choose a file that you may write to") from error
    typer.echo(str(path))
