"""Options that several commands have."""

from __future__ import annotations

import re
from typing import Annotated

import typer

AGENT = "http://127.0.0.1:9478"
Agent = Annotated[str, typer.Option(help="The agent's URL.", envvar="GPUWATCH_AGENT")]
Prometheus = Annotated[
    str | None, typer.Option(help="Read from this Prometheus instead of an agent.", envvar="GPUWATCH_PROMETHEUS")
]


def file_name(run: str) -> str:
    """Return a run's name as a part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", run)[:80]
