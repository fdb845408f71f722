from itertools import chain
from pathlib import Path
from typing import Annotated
from urllib.parse import urljoin, urlsplit

import typer

from gpuwatch.alerting.render import render
from gpuwatch.commands.options import ConfigFile, Runbooks, settings_of, write_file
from gpuwatch.errors import require

_RULES = "gpuwatch.yml"
grafana = typer.Typer(
    name="grafana",
    help="Push the Grafana dashboards or write them as files: GPU fleet, GPU node, Training run.",
    no_args_is_help=True,
)


@grafana.command()
def push(
    url: Annotated[str, typer.Option(help="URL of Grafana, with its path prefix if it has one.", envvar="GRAFANA_URL")],
    token: Annotated[str, typer.Option(help="Token of a service account (Editor).", envvar="GRAFANA_TOKEN")] = "",
    folder: Annotated[str, typer.Option(help="Title of the Grafana folder; created if missing.")] = "gpuwatch",
    datasource: Annotated[str, typer.Option(help="Uid of the default data source.")] = "gpuwatch-prometheus",
    force: Annotated[bool, typer.Option("--force", help="Overwrite dashboards that were edited by hand.")] = False,
    ca: Annotated[Path | None, typer.Option(help="Certificate of the CA of Grafana's certificate (PEM).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not verify Grafana's certificate.")] = False,
    config: ConfigFile = None,
    runbooks: Runbooks = "",
) -> None:
    """Push the dashboards to Grafana. Dashboards that are already up to date stay unchanged.

    Example: `gpuwatch grafana push --url https://grafana.example.com --token glsa_…`

    Exit codes: 0 done, 1 Grafana is unreachable or refused (the message says what to do), 2 wrong usage.
    """
    require("grafana_client", "dashboard")
    from gpuwatch_dashboards.grafana import load
    from gpuwatch_dashboards.grafana import push as pushing

    dashboards = load(settings_of(config, runbooks), datasource).values()
    api = pushing.connect(url, token, ca, insecure)
    uid, made = pushing.push_folder(api, url, folder)
    for pushed in chain([made], (pushing.push_dashboard(api, url, each, uid, force) for each in dashboards)):
        link = f"  {_link(url, pushed.url)}" if pushed.url else ""
        typer.echo(f"{pushed.outcome:<9} {pushed.what}{link}")


@grafana.command()
def write(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; created if missing.")],
    config: ConfigFile = None,
    runbooks: Runbooks = "",
) -> None:
    """Write the dashboards as JSON files, for provisioning or manual import.

    Example: `gpuwatch grafana write /etc/grafana/dashboards --config gpuwatch.toml --runbooks https://wiki/gpuwatch`
    """
    from gpuwatch_dashboards.grafana import load, text

    for name, dashboard in load(settings_of(config, runbooks)).items():
        write_file(folder, name, text(dashboard))


def rules(
    config: ConfigFile = None,
    write: Annotated[Path | None, typer.Option(help=f"Write {_RULES} into this folder instead of printing it.")] = None,
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
        write_file(write, _RULES, text, "--write ")


def _link(url: str, path: str) -> str:
    """Return the URL of a page from its path, which may or may not begin with Grafana's own."""
    front = urlsplit(url).path.rstrip("/")
    return urljoin(url, path if path.startswith(f"{front}/") else front + path)
