"""The GPUWATCH_* variables of this environment: names that nothing reads, values that cannot be used."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from gpuwatch.diagnosis.cost import parse_price
from gpuwatch.errors import ConfigError
from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, warning
from gpuwatch.tools.doctor.surroundings import Surroundings
from gpuwatch.wire import endpoint


def _endpoint(value: str) -> str:
    try:
        endpoint.checked(value, "it")
    except ConfigError:
        return "ipc:///absolute/path.sock or tcp://127.0.0.1:PORT"
    return ""


def _flag(value: str) -> str:
    return "" if value.lower() in ("0", "1", "true", "false", "yes", "no") else "1 or 0"


def _url(value: str) -> str:
    parts = urlsplit(value)
    return "" if parts.scheme in ("http", "https") and parts.hostname else "http://HOST:PORT"


def _port(value: str) -> str:
    return "" if value.isdigit() and 0 < int(value) < 65536 else "a port, 1 to 65535"


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    return "" if host and not _port(port) else "HOST:PORT"


def _folder(value: str) -> str:
    return "" if value.startswith("/") else "an absolute path"


def _file(value: str) -> str:
    return "" if not Path(value).is_dir() else "a file, not a folder"


def _price(value: str) -> str:
    try:
        parse_price(value)
    except ConfigError:
        return "a price and its currency, as in 4.2 EUR"
    return ""


def _any(value: str) -> str:
    return ""


KNOWN: dict[str, Callable[[str], str]] = {
    "GPUWATCH_ENDPOINT": _endpoint,
    "GPUWATCH_RUN": _any,
    "GPUWATCH_QUIET": _flag,
    "GPUWATCH_DISABLE": _flag,
    "GPUWATCH_AUTO": _flag,
    "GPUWATCH_HTTP": _address,
    "GPUWATCH_HISTORY": _file,
    "GPUWATCH_CONFIG": _file,
    "GPUWATCH_AGENT": _url,
    "GPUWATCH_AGENT_URL": _url,
    "GPUWATCH_PROMETHEUS": _url,
    "GPUWATCH_PROMETHEUS_URL": _url,
    "GPUWATCH_RUN_DIR": _folder,
    "GPUWATCH_TAG": _any,
    "GPUWATCH_GPU_HOUR": _price,
    "GPUWATCH_AGENT_PORT": _port,
    "GPUWATCH_PROMETHEUS_PORT": _port,
    "GPUWATCH_ALERTMANAGER_PORT": _port,
    "GPUWATCH_GRAFANA_PORT": _port,
    "GPUWATCH_DASHBOARD_PORT": _port,
}
"""Every variable that some part of gpuwatch or its compose file reads, with what is wrong with a value: "" for nothing."""


def environment(around: Surroundings) -> Outcome:
    """GPUWATCH_* variables: a typo in a name is read by nobody, and nobody says so."""
    ours = {name: value.strip() for name, value in around.environ.items() if name.startswith("GPUWATCH_")}
    bad = [
        f"{name}={value}: give {wanted}"
        for name, value in sorted(ours.items())
        if name in KNOWN and value and (wanted := KNOWN[name](value))
    ]
    unknown = [_unknown(name) for name in sorted(ours.keys() - KNOWN.keys())]
    if bad:
        return problem("; ".join(bad + unknown), "correct it, or unset it")
    if unknown:
        return warning(
            "; ".join(unknown), "correct the name, or unset it; docs/guides/doctor.md lists those that are read"
        )
    return ok(", ".join(sorted(ours)) if ours else "no GPUWATCH_* variable is set")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, KNOWN, 1, 0.8)
    return f"nothing reads {name}" + (f" (did you mean {near[0]}?)" if near else "")
