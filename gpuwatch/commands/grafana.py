from itertools import chain
from pathlib import Path
from typing import Annotated
from urllib.parse import urljoin, urlsplit

import typer

from gpuwatch.commands.options import ConfigFile, Runbooks, settings_of, write_file
from gpuwatch.errors import require

grafana = typer.Typer(
    name="grafana",
    help="Push the Grafana dashboards or write them as files: GPU fleet, GPU node, Training run.",
    no_args_is_help=True,
)


@grafana.command()
def push(
    url: Annotated[str, typer.Option(help="Grafana's URL, with its path prefix, if any.", envvar="GRAFANA_URL")],
    token: Annotated[str, typer.Option(help="Token of a service account (Editor).", envvar="GRAFANA_TOKEN")] = "",
    folder: Annotated[str, typer.Option(help="Title of the folder; created if missing.")] = "gpuwatch",
    datasource: Annotated[str, typer.Option(help="Uid of the Prometheus to select at first.")] = "gpuwatch-prometheus",
    force: Annotated[bool, typer.Option("--force", help="Replace dashboards that were edited by hand.")] = False,
    ca: Annotated[Path | None, typer.Option(help="Certificate of Grafana's certificate authority, in PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept any certificate.")] = False,
    config: ConfigFile = None,
    runbooks: Runbooks = "",
) -> None:
    """Push the dashboards to a Grafana. What is already there is left as it is.

    Example: `gpuwatch grafana push --url https://grafana.example.com --token glsa_…`

    Exit codes: 0 done, 1 Grafana is unreachable or refuses (the message says what to do), 2 wrong use.
    """
    require("grafana_client", "dashboard")
    from gpuwatch_dashboards.grafana import load
    from gpuwatch_dashboards.grafana import push as pushing

    dashboards = load(settings_of(config, runbooks))
    api = pushing.connect(url, token, ca, insecure)
    uid, made = pushing.push_folder(api, url, folder)
    pushing_each = pushing.push_dashboards(api, url, dashboards, uid, datasource=datasource, force=force)
    for pushed in chain([made], pushing_each):
        link = f"  {_link(url, pushed.url)}" if pushed.url else ""
        typer.echo(f"{pushed.outcome:<9} {pushed.what}{link}")


@grafana.command()
def write(
    folder: Annotated[Path, typer.Argument(help="Where to write; created if missing.")],
    config: ConfigFile = None,
    runbooks: Runbooks = "",
) -> None:
    """Write the dashboards as files, for provisioning or manual import.

    Example: `gpuwatch grafana write /etc/grafana/dashboards --config gpuwatch.toml --runbooks https://wiki/gpuwatch`
    """
    from gpuwatch_dashboards.grafana import load, text

    for name, dashboard in load(settings_of(config, runbooks)).items():
        write_file(folder, name, text(dashboard))


def _link(url: str, path: str) -> str:
    """Return the URL of a page from its path, which may or may not begin with Grafana's own."""
    front = urlsplit(url).path.rstrip("/")
    return urljoin(url, path if path.startswith(f"{front}/") else front + path)
