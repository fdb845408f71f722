"""`gpuwatch grafana`: the dashboards, as files or in a Grafana."""

from __future__ import annotations

import time
import urllib.parse
from pathlib import Path
from typing import Annotated, Any

import typer

from gpuwatch.alerting.render import RUNBOOKS
from gpuwatch.api import Client
from gpuwatch.commands.rules import Runbooks, write_file
from gpuwatch.config import Config as Settings
from gpuwatch.config import read_config
from gpuwatch.errors import ConfigError, require

grafana = typer.Typer(
    name="grafana",
    help="Push, write or print the Grafana dashboards: GPU fleet, GPU node, Training run.",
    no_args_is_help=True,
)
Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML file whose thresholds, windows, scrape job and currency are used.", envvar="GPUWATCH_CONFIG"
    ),
]


@grafana.command()
def push(
    url: Annotated[str, typer.Option(help="Grafana's URL, with its path prefix, if any.", envvar="GRAFANA_URL")],
    token: Annotated[str, typer.Option(help="Token of a service account (Editor).", envvar="GRAFANA_TOKEN")] = "",
    folder: Annotated[str, typer.Option(help="Title of the folder, which is created if missing.")] = "gpuwatch",
    datasource: Annotated[
        str, typer.Option(help="UID of the Prometheus data source selected by default.")
    ] = "gpuwatch-prometheus",
    agent: Annotated[
        list[str] | None,
        typer.Option(help="URL of an agent whose runs and findings are pushed as annotations; repeatable."),
    ] = None,
    since_hours: Annotated[
        float, typer.Option(help="Annotate only runs that were seen in these hours.", min=0.0)
    ] = 24.0,
    force: Annotated[bool, typer.Option("--force", help="Replace dashboards that were changed by hand.")] = False,
    ca: Annotated[Path | None, typer.Option(help="CA certificate of Grafana's server, in PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not verify Grafana's certificate.")] = False,
    config: Config = None,
    runbooks: Runbooks = RUNBOOKS,
) -> None:
    """Push the dashboards to a Grafana, and annotate them with runs and findings. What exists unchanged is left as it is.

    Example: `gpuwatch grafana push --url https://grafana.example.com --token glsa_…`,
    `gpuwatch grafana push --url http://127.0.0.1:3000 --agent http://node-17:9478`

    Exit codes: 0 done, 1 Grafana does not answer or refuses (the message names the remedy), 2 wrong use.
    """
    require("grafana_client", "dashboard")
    from gpuwatch_dashboards.grafana.connection import connect
    from gpuwatch_dashboards.grafana.push import Pushed, marks_of, push_dashboards, push_folder, push_marks

    def report(pushed: Pushed) -> None:
        where = f"  {_link(url, pushed.url)}" if pushed.url else ""
        typer.echo(f"{pushed.outcome:<9} {pushed.what}{where}")

    dashboards = _dashboards(config, runbooks)
    api = connect(url, token, ca, insecure)
    uid, made = push_folder(api, url, folder)
    report(made)
    for pushed in push_dashboards(api, url, dashboards, uid, datasource=datasource, force=force):
        report(pushed)
    for each in agent or ():
        counts = push_marks(api, url, marks_of(Client(each), time.time() - since_hours * 3600))
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        typer.echo(f"{'marked':<9} runs and findings of {each}: {outcomes}")


@grafana.command()
def write(
    folder: Annotated[Path, typer.Argument(help="Where to write; created if missing.")],
    config: Config = None,
    runbooks: Runbooks = RUNBOOKS,
) -> None:
    """Write the dashboards as files, for provisioning or for import by hand.

    Example: `gpuwatch grafana write /etc/grafana/dashboards --config gpuwatch.toml --runbooks https://wiki/gpuwatch`
    """
    from gpuwatch_dashboards.grafana import files

    for name, dashboard in _dashboards(config, runbooks).items():
        write_file(folder, name, files.text(dashboard))


@grafana.command(name="print")
def print_one(
    dashboard: Annotated[str, typer.Argument(help="fleet, node or run.")],
    config: Config = None,
    runbooks: Runbooks = RUNBOOKS,
) -> None:
    """Print one dashboard's JSON.

    Example: `gpuwatch grafana print run > run.json`
    """
    from gpuwatch_dashboards.grafana import files

    found = _dashboards(config, runbooks)
    name = f"gpuwatch-{dashboard.removeprefix('gpuwatch-').removesuffix('.json')}.json"
    if name not in found:
        names = ", ".join(each.removeprefix("gpuwatch-").removesuffix(".json") for each in found)
        raise ConfigError(f"{dashboard}: no such dashboard; there are {names}")
    typer.echo(files.text(found[name]), nl=False)


def _dashboards(config: Path | None, runbooks: str) -> dict[str, dict[str, Any]]:
    from gpuwatch_dashboards.grafana import files

    return files.load(read_config(config) if config is not None else Settings(), runbooks)


def _link(url: str, path: str) -> str:
    """Return the address of a page from the path that Grafana reports, which may lack the prefix of a reverse proxy."""
    parts = urllib.parse.urlsplit(url)
    front = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if front and path.startswith(front + '/') else front + path}"
