"""The configuration file, one for all parts: `gpuwatch agent --config FILE.toml`, `gpuwatch rules --config FILE.toml`.

[agent] is how the agent is started, [thresholds] when a cause is worth naming, [alerts] when one is worth an alert, [prices]
what a GPU-hour costs, [notify] who is told without Alertmanager, [stacks] whether stacks are looked at. Every key is a field of the section's dataclass; a wrong one
is named. No section is required.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from gpuwatch.alerting.thresholds import SHARED, AlertThresholds, Prices
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.errors import ConfigError, MissingExtra

T = TypeVar("T")


@dataclass(frozen=True)
class AgentSettings:
    """How the agent is started. None or empty: the command line's own default. An option given there wins."""

    http: str | None = None
    listen: tuple[str, ...] = ()
    history: str | None = None
    keep_days: float | None = None
    keep_gib: float | None = None
    procfs: str | None = None
    sysfs: str | None = None
    shm: str | None = None
    series: str | None = None
    dcgm: str | None = None
    full_hours: float | None = None

    def __post_init__(self) -> None:
        for name in ("keep_days", "keep_gib"):
            value = getattr(self, name)
            if value is not None and value < 0.01:
                raise ConfigError(f"{name} = {value}: must be at least 0.01")
        if self.series not in (None, "standard", "full"):
            raise ConfigError(f'series = {self.series!r}: "standard" or "full"')
        if self.full_hours is not None and self.full_hours < 0.1:
            raise ConfigError(f"full_hours = {self.full_hours}: must be at least 0.1")


@dataclass(frozen=True)
class NotifySettings:
    """Who the agent tells by itself, where there is no Alertmanager."""

    urls: tuple[str, ...] = ()
    """Apprise URLs, e.g. "slack://…", "mailto://…", "json://host:port/path"."""
    min_severity: str = "warning"
    repeat_s: float = 14400.0
    """After how long an alert that goes on is told again; 0: never."""
    name: str | None = None
    """What the node is called in messages; None: its host name."""

    def __post_init__(self) -> None:
        if self.min_severity not in ("warning", "critical"):
            raise ConfigError(f'min_severity = {self.min_severity!r}: "warning" or "critical"')
        if self.repeat_s < 0:
            raise ConfigError(f"repeat_s = {self.repeat_s}: a duration in seconds, or 0 for never")


@dataclass(frozen=True)
class StackSettings:
    """Whether the agent looks at stacks when a finding begins: once a finding, and a run once in `every_s`. Needs py-spy."""

    automatic: bool = False
    folder: str | None = None
    """Where flame graphs are kept; None: `stacks` beside the history."""
    seconds: float = 3.0
    """For how long a look lasts."""
    rate_hz: int = 25
    every_s: float = 600.0
    keep: int = 100
    """How many flame graphs are kept."""

    def __post_init__(self) -> None:
        for name, least in (("seconds", 1), ("rate_hz", 1), ("every_s", 10), ("keep", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True)
class Config:
    """All sections; those that the file lacks are at their defaults."""

    agent: AgentSettings = field(default_factory=AgentSettings)
    thresholds: Thresholds = field(default_factory=Thresholds)
    alerts: AlertThresholds = field(default_factory=AlertThresholds)
    prices: Prices = field(default_factory=Prices)
    notify: NotifySettings = field(default_factory=NotifySettings)
    stacks: StackSettings = field(default_factory=StackSettings)


def read_config(path: Path) -> Config:
    """Return what the file says. Raises: ConfigError naming the file, the section and the key; MissingExtra."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"--config {path}: {reason}; name a TOML file that can be read") from error
    return parse_config(text, str(path))


def parse_config(text: str, where: str) -> Config:
    """Return what a TOML text says; `where` stands in errors. Raises: ConfigError; MissingExtra."""
    tables = _toml(text, where)
    sections = {each.name: each for each in fields(Config)}
    for name, table in tables.items():
        if name not in sections:
            raise ConfigError(f"{where}: [{name}] is not a section{_meant(name, sections)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} = … stands outside a section; write it below [{name}]")
    kinds: dict[str, Any] = {
        "agent": AgentSettings, "thresholds": Thresholds, "alerts": AlertThresholds, "prices": Prices, "notify": NotifySettings,
        "stacks": StackSettings,
    }  # fmt: skip
    chosen = tables.get("thresholds", {})
    shared = {alert: chosen[name] for alert, name in SHARED.items() if name in chosen}
    if shared:
        tables["alerts"] = {**shared, **tables.get("alerts", {})}
    return Config(**{name: _section(kinds[name], table, f"{where}: [{name}]") for name, table in tables.items()})


def _section(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    known = {each.name: str(each.type) for each in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where} {key} is not a key{_meant(key, known)}")
        values[key] = _checked(value, known[key], f"{where} {key} = {value!r}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error


def _checked(value: Any, annotation: str, what: str) -> Any:
    """Return the value as the field wants it. Raises: ConfigError for one of another type."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation.startswith("tuple[str"):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f'{what}: must be a list of texts, e.g. ["a", "b"]')
        return tuple(value)
    if annotation.startswith("Mapping"):
        if not isinstance(value, dict):
            raise ConfigError(f'{what}: must be a table, e.g. {{"NVIDIA H200" = 4.2}}')
        return value
    if annotation.startswith("str") and not isinstance(value, str):
        raise ConfigError(f"{what}: must be a text")
    if annotation.startswith("float") and not number:
        raise ConfigError(f"{what}: must be a number")
    if annotation.startswith("int") and (not number or value != int(value)):
        raise ConfigError(f"{what}: must be a whole number")
    if annotation.startswith("bool") and not isinstance(value, bool):
        raise ConfigError(f"{what}: must be true or false")
    return value


def _meant(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(known)}"


def _toml(text: str, where: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise MissingExtra("tomli", "agent") from None
    try:
        loaded: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    return loaded
