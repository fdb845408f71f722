from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace
from typer import Context, Option

from gpuwatch.commands.options import History, Http, Listen, settings_of
from gpuwatch.config import HTTP, AgentSettings, section
from gpuwatch.errors import require

_CONFIG = "Configuration file (TOML). Options on the command line override it."
_SERIES = "`full` also exports link traffic, clocks, more series of runs, and counters that are still 0."
_DCGM = "Read GPU metrics from this dcgm-exporter instead of NVML, e.g. http://127.0.0.1:9400."
_ALLOCATIONS = "Folder with one file per job that has GPUs (docs/deploy/allocations.md)."
_PODS = "Socket of the kubelet's PodResources API, which lists the GPUs of each pod."
_FULL = "Hours for which steps and samples keep full resolution. Older ones are downsampled to one per minute."
_STACKS = "Sample stacks with py-spy when a finding begins (docs/guides/stacks.md)."
_NOTIFY = "Apprise URL to send notifications to without Alertmanager (slack://…, json://…); repeatable."
_WEB = "File with TLS settings and passwords, in the format of Prometheus exporters (docs/deploy/security.md)."
_API_TOKEN = "File with the API's bearer token, created if missing. Required when not listening on loopback."
_TOKEN = "File with the token that hooks need over TCP, created if missing."
_OTLP = "OpenTelemetry collector to push metrics and findings to (OTLP/HTTP), e.g. http://127.0.0.1:4318 (docs/deploy/otlp.md)."
_OWN = AgentSettings()


def agent(
    context: Context,
    config: Annotated[Path | None, Option(help=_CONFIG, envvar="GPUWATCH_CONFIG")] = None,
    http: Http = HTTP,
    listen: Listen = None,
    history: History = None,
    keep_days: Annotated[float, Option(help="Retention of the history, in days.")] = _OWN.keep_days,
    keep_gib: Annotated[float, Option(help="Maximum size of the history, in GiB.")] = _OWN.keep_gib,
    procfs: Annotated[Path, Option(help="Where the node's /proc is mounted (in a container).")] = Path(_OWN.procfs),
    sysfs: Annotated[Path, Option(help="Where the node's /sys is mounted (in a container).")] = Path(_OWN.sysfs),
    shm: Annotated[Path, Option(help="Where the node's /dev/shm is mounted (in a container).")] = Path(_OWN.shm),
    series: Annotated[str, Option(help=_SERIES)] = _OWN.series,
    dcgm: Annotated[str | None, Option(help=_DCGM)] = None,
    allocations: Annotated[Path, Option(help=_ALLOCATIONS)] = Path(_OWN.allocations),
    pod_resources: Annotated[Path, Option(help=_PODS)] = Path(_OWN.pod_resources),
    full_hours: Annotated[float, Option(help=_FULL)] = _OWN.full_hours,
    stacks: Annotated[bool, Option("--stacks", help=_STACKS)] = False,
    notify: Annotated[list[str] | None, Option(help=_NOTIFY)] = None,
    web_config: Annotated[Path | None, Option("--web.config.file", help=_WEB)] = None,
    api_token_file: Annotated[Path | None, Option(help=_API_TOKEN, envvar="GPUWATCH_API_TOKEN_FILE")] = None,
    token_file: Annotated[Path | None, Option(help=_TOKEN, envvar="GPUWATCH_TOKEN_FILE")] = None,
    otlp: Annotated[str | None, Option(help=_OTLP, envvar="GPUWATCH_OTLP")] = None,
    otlp_every_s: Annotated[float, Option(help="Seconds between two pushes to --otlp.")] = _OWN.otlp_every_s,
) -> None:
    """Receive the hooks' messages, sample the node once a second, and serve Prometheus metrics and the JSON API.

    Examples: `gpuwatch agent --http 0.0.0.0:9478 --history /var/lib/gpuwatch/history.db`;
    `gpuwatch agent --config /etc/gpuwatch/gpuwatch.toml`
    """
    for module in ("prometheus_client", "starlette", "uvicorn", "pynvml"):
        require(module, "agent")
    from gpuwatch_agent.__main__ import go_on_as_agent

    settings = settings_of(config)
    # What the command line and the environment give overrides the [agent] section.
    keys, source = AgentSettings.__struct_fields__, context.get_parameter_source
    given = {key: context.params[key] for key in keys if getattr(source(key), "name", "DEFAULT") != "DEFAULT"}
    chosen = msgspec.to_builtins(settings.agent) | msgspec.to_builtins(given, enc_hook=str)
    notices = replace(settings.notify, urls=tuple(notify)) if notify else settings.notify
    captures = replace(settings.stacks, automatic=True) if stacks else settings.stacks
    own = section(AgentSettings, chosen, "command line:")
    go_on_as_agent(replace(settings, agent=own, notify=notices, stacks=captures))
