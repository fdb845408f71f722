"""The configuration file, one for all parts: `gpuwatch agent --config FILE.toml`, `gpuwatch rules --config FILE.toml`.

Its sections are the fields of `Config`; every key is a field of the section's class, with its bounds. None is required.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from gpuwatch.alerting.thresholds import SHARED, AlertThresholds, Prices
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.errors import ConfigError, require, usable

HTTP = "127.0.0.1:9478"  # where an agent serves, and where it is looked for, by default


class AgentSettings(msgspec.Struct, frozen=True):
    """How the agent is started. A command line option wins."""

    http: str = HTTP
    listen: tuple[str, ...] = ()  # Endpoints for hooks; empty: this user's socket (`endpoint.default_listen`).
    history: str | None = None
    keep_days: Annotated[float, Meta(ge=0.01, le=36_500)] = 7.0
    keep_gib: Annotated[float, Meta(ge=0.01, le=1_000_000)] = 2.0
    procfs: str = "/proc"
    sysfs: str = "/sys"
    shm: str = "/dev/shm"
    series: Literal["standard", "full"] = "standard"
    dcgm: str | None = None  # A dcgm-exporter on this node, read instead of NVML.
    allocations: str = "/run/gpuwatch/allocations"  # Where a scheduler's scripts put a file for each job that has GPUs.
    pod_resources: str = "/var/lib/kubelet/pod-resources/kubelet.sock"  # The kubelet's list of devices.
    full_hours: Annotated[float, Meta(ge=0.1, le=876_000)] = 24.0
    web_config: str | None = None  # TLS and passwords, in the format of the Prometheus exporters.
    api_token_file: str | None = None  # The API's token; made by the agent where there is no such file.
    token_file: str | None = None  # The token of hooks that connect over TCP; likewise.
    otlp: str | None = None  # The OpenTelemetry collector that metrics and findings are pushed to.
    otlp_every_s: Annotated[float, Meta(ge=1, le=120)] = 15.0  # Counters' first zeros wait for no rarer scrapes.


class NotifySettings(msgspec.Struct, frozen=True):
    """Notifications that the agent itself sends, where there is no Alertmanager."""

    urls: tuple[str, ...] = ()  # Apprise URLs, e.g. "slack://…", "mailto://…", "json://host:port/path".
    min_severity: Literal["info", "warning", "critical"] = "warning"
    repeat_s: Annotated[float, Meta(ge=0)] = 14400.0  # How often an alert that stays active is repeated; 0: never.
    name: str | None = None  # The node's name in messages; None: its host name.


class StackSettings(msgspec.Struct, frozen=True):
    """Automatic stack captures when a finding begins: once per finding, and per run once in `every_s`. Needs py-spy."""

    automatic: bool = False
    folder: str | None = None  # Where flame graphs are kept; None: `stacks` in the history's folder.
    seconds: Annotated[float, Meta(ge=1, le=600)] = 3.0  # Duration of a capture.
    rate_hz: Annotated[int, Meta(ge=1, le=1000)] = 25
    every_s: Annotated[float, Meta(ge=10)] = 600.0
    keep: Annotated[int, Meta(ge=1)] = 100  # How many flame graphs are kept.


class Config(msgspec.Struct, frozen=True):
    """All sections; absent ones have their defaults."""

    agent: AgentSettings = AgentSettings()
    thresholds: Thresholds = Thresholds()
    alerts: AlertThresholds = AlertThresholds()
    prices: Prices = Prices()
    notify: NotifySettings = NotifySettings()
    stacks: StackSettings = StackSettings()


SECTIONS: dict[str, type[Any]] = {field.encode_name: type(field.default) for field in msgspec.structs.fields(Config)}


def read_config(path: Path) -> Config:
    """Return a file's configuration. Raises: ConfigError naming the file, the section and the key; MissingExtra."""
    named_by = "GPUWATCH_CONFIG" if os.environ.get("GPUWATCH_CONFIG") == str(path) else "--config"
    with usable(f"{named_by} {path}", "name a TOML file that can be read"):
        text = path.read_text(encoding="utf-8")
    return parse_config(text, str(path))


def own_config() -> Config:
    """Return the configuration in the file named by GPUWATCH_CONFIG, else the defaults. Raises: as `read_config`."""
    file = os.environ.get("GPUWATCH_CONFIG")
    return read_config(Path(file)) if file else Config()


def parse_config(text: str, where: str) -> Config:
    """Return the configuration in a TOML text; `where` names it in errors. Raises: ConfigError; MissingExtra."""
    if sys.version_info < (3, 11):
        require("tomli", "agent")
    try:
        tables: dict[str, Any] = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if all(isinstance(table, dict) for table in tables.values()):
        chosen = tables.get("thresholds", {})
        shared = {alert: chosen[name] for alert, name in SHARED.items() if name in chosen}
        tables = {**tables, "alerts": {**shared, **tables.get("alerts", {})}}
    return Config(**sections(tables, SECTIONS, where))


def sections(tables: Mapping[str, Any], known: Mapping[str, type[Any]], where: str) -> dict[str, Any]:
    """Return a file's sections by name, as objects of their classes. Raises: ConfigError naming file, section, key."""
    for name, table in tables.items():
        own = next((section for section, kind in known.items() if name in (section, *kind.__annotations__)), None)
        if not isinstance(table, dict) and own is not None:
            raise ConfigError(f"{where}: {name} = … is outside of a section; move it below [{own}]")
        if name not in known:
            raise ConfigError(f"{where}: [{name}] is not a section{_suggest(name, known)}")
    return {name: section(known[name], table, f"{where}: [{name}]") for name, table in tables.items()}


def section(kind: type[Any], table: Mapping[str, Any], where: str) -> Any:
    """Return a section as an object of its class. Raises: ConfigError that begins with `where` and names the key."""
    known = kind.__annotations__
    for key in table:
        if key not in known:
            raise ConfigError(f"{where} {key} is not a key{_suggest(key, known)}")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).partition(" - at `$.")
        expected = expected.lower()
        key = re.split(r"\W", path)[0]
        if choices := [each for each in get_args(known[key]) if isinstance(each, str)]:  # a Literal
            expected = f"give {' or '.join(choices)}"
        raise ConfigError(f"{where} {key} = {table[key]!r}: {expected}") from error
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(known)}"
