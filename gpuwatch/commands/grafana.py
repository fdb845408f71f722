"""`gpuwatch grafana`: the dashboards, as files or in a Grafana."""

from __future__ import annotations

import time
import urllib.parse
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.config import Config as Settings
from gpuwatch.config import read_config
from gpuwatch.errors import ConfigError
from gpuwatch.extras import require

grafana = typer.Typer(
    name="grafana",
    help="The Grafana dashboards: GPU fleet, GPU node, Training run, runbooks. Push them, write them, print one.",
    no_args_is_help=True,
)
Config = Annotated[
    Path | None,
    typer.Option(help="TOML file whose windows, scrape job and currency are used.", envvar="GPUWATCH_CONFIG"),
]


@grafana.command()
def push(
    url: Annotated[str, typer.Option(help="Grafana's address, its path included.", envvar="GRAFANA_URL")],
    token: Annotated[str, typer.Option(help="Token of a service account (Editor).", envvar="GRAFANA_TOKEN")] = "",
    folder: Annotated[str, typer.Option(help="Title of the folder; it is made if there is none.")] = "gpuwatch",
    datasource: Annotated[str, typer.Option(help="Uid of the Prometheus to read at first.")] = "gpuwatch-prometheus",
    agent: Annotated[
        list[str] | None, typer.Option(help="Mark the runs and findings of this agent too; may be given again.")
    ] = None,
    since_hours: Annotated[float, typer.Option(help="Runs heard of in so many hours are marked.", min=0.0)] = 24.0,
    force: Annotated[bool, typer.Option("--force", help="Replace dashboards that were changed by hand.")] = False,
    ca: Annotated[Path | None, typer.Option(help="Certificate, in PEM, of who signed Grafana's.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Take any certificate.")] = False,
    config: Config = None,
) -> None:
    """Put the dashboards into a Grafana, and mark runs and findings on them. What is there already is left alone.

    Example: `gpuwatch grafana push --url https://grafana.example.com --token glsa_…`,
    `gpuwatch grafana push --url http://127.0.0.1:3000 --agent http://node-17:9478`

    Exit codes: 0 done, 1 Grafana is away or refuses (the message says what to do), 2 wrong use.
    """
    require("grafana_client", "dashboard")
    from gpuwatch.api import Client
    from gpuwatch_dashboards.grafana import files
    from gpuwatch_dashboards.grafana.connection import connect
    from gpuwatch_dashboards.grafana.push import Pushed, push_dashboards, push_folder
    from gpuwatch_dashboards.grafana.push_marks import marks_of, push_marks

    def tell(pushed: Pushed) -> None:
        where = f"  {_link(url, pushed.url)}" if pushed.url else ""
        typer.echo(f"{pushed.outcome:<9} {pushed.what}{where}")

    dashboards = files.load(_read(config))
    api = connect(url, token, ca, insecure)
    uid, made = push_folder(api, url, folder)
    tell(made)
    for pushed in push_dashboards(api, url, dashboards, uid, datasource=datasource, force=force):
        tell(pushed)
    for each in agent or ():
        counts = push_marks(api, url, marks_of(Client(each), time.time() - since_hours * 3600))
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        typer.echo(f"{'marked':<9} runs and findings of {each}: {told}")


@grafana.command()
def write(
    folder: Annotated[Path, typer.Argument(help="Where to write; it is made if there is none.")],
    config: Config = None,
) -> None:
    """Write the dashboards as files, for provisioning or for import by hand.

    Example: `gpuwatch grafana write /etc/grafana/dashboards --config gpuwatch.toml`
    """
    from gpuwatch_dashboards.grafana import files

    for name, dashboard in files.load(_read(config)).items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(files.text(dashboard), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}; name a folder that you may write to") from error
        typer.echo(folder / name)


@grafana.command(name="print")
def print_one(
    dashboard: Annotated[str, typer.Argument(help="fleet, node, run or runbooks.")], config: Config = None
) -> None:
    """Print one dashboard's JSON.

    Example: `gpuwatch grafana print run > run.json`
    """
    from gpuwatch_dashboards.grafana import files

    found = files.load(_read(config))
    name = f"gpuwatch-{dashboard.removeprefix('gpuwatch-').removesuffix('.json')}.json"
    if name not in found:
        names = ", ".join(each.removeprefix("gpuwatch-").removesuffix(".json") for each in found)
        raise ConfigError(f"{dashboard}: no such dashboard; there are {names}")
    typer.echo(files.text(found[name]), nl=False)


def _link(url: str, path: str) -> str:
    """Return the address of a page that Grafana names by its path, with or without the path that is in front of Grafana."""
    parts = urllib.parse.urlsplit(url)
    front = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if front and path.startswith(front + '/') else front + path}"


def _read(path: Path | None) -> Settings:
    return read_config(path) if path is not None else Settings()
