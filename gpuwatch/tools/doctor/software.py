"""Versions of Python, gpuwatch and what its extras require; the GPUWATCH_* variables."""

import contextlib
import difflib
import re
from collections.abc import Callable
from pathlib import Path

from gpuwatch.api.client import is_url
from gpuwatch.diagnosis.rates import parse_price
from gpuwatch.errors import ConfigError
from gpuwatch.tools.doctor.machine import DISTRIBUTION, Machine, Outcome, ok, problem, skipped, warning
from gpuwatch.wire import endpoint


def python(machine: Machine) -> Outcome:
    """The interpreter that runs gpuwatch, and thereby the environment of all other versions."""
    version, path = machine.python
    return ok(f"{version} ({path})")


def gpuwatch(machine: Machine) -> Outcome:
    """The installed distribution against the imported package; PyPI's `gpuwatch` is an unrelated tool."""
    imported, installed = machine.gpuwatch_version, machine.version_of(DISTRIBUTION)
    if other := machine.version_of("gpuwatch"):
        return problem(
            f"{imported}, and PyPI's unrelated 'gpuwatch' {other}: they overwrite each other's files",
            f"pip uninstall gpuwatch && pip install --force-reinstall {DISTRIBUTION}",
        )
    if installed is None:
        return warning(f"{imported}, imported from a folder, not installed", f"pip install {DISTRIBUTION}")
    if installed != imported:
        return problem(
            f"{imported} is imported, {installed} is installed: there are two of them",
            f"look for a second copy on PYTHONPATH, or pip install --force-reinstall {DISTRIBUTION}",
        )
    return ok(imported)


def hook(machine: Machine) -> Outcome:
    """The packages that the hook in a training process requires: msgspec and pyzmq."""
    return _installed(machine, None)


def agent_extra(machine: Machine) -> Outcome:
    """The packages that `gpuwatch agent` requires."""
    return _installed(machine, "agent")


def dashboard_extra(machine: Machine) -> Outcome:
    """The packages that `gpuwatch dashboard` requires."""
    return _installed(machine, "dashboard")


def pynvml(machine: Machine) -> Outcome:
    """The deprecated distribution `pynvml` replaces nvidia-ml-py's module with its own."""
    maintained, deprecated = machine.version_of("nvidia-ml-py"), machine.version_of("pynvml")
    if deprecated is not None:
        return warning(
            f"the deprecated distribution 'pynvml' {deprecated} may shadow nvidia-ml-py {maintained or '(not installed)'}",
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        )
    if maintained is None:
        return skipped("nvidia-ml-py is not installed: GPUs cannot be detected", "pip install nvidia-ml-py")
    return ok(f"nvidia-ml-py {maintained}, not shadowed by 'pynvml'")


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 5, 1) of "2.5.1+cu124"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def required(requirements: list[str], extra: str | None, python: tuple[int, ...]) -> list[tuple[str, str]]:
    """Return (distribution, least version or "") of an extra, or of the base for None, for this Python.

    Those under another condition, such as a platform, are left out. Source: Requires-Dist, packaging.python.org.
    """
    found = []
    for requirement in requirements:
        least, _, marker = requirement.replace('"', "'").partition(";")
        extras = re.findall(r"extra == '(\w+)'", marker)
        pythons = re.findall(r"python_version (>=|<) '([\d.]+)'", marker)
        if extras != ([] if extra is None else [extra]) or "platform" in marker:
            continue
        if all((python[:2] >= numbers(bound)) == (sign == ">=") for sign, bound in pythons):
            name, _, version = least.partition(">=")
            found.append((name.strip(), version.strip()))
    return found


def _installed(machine: Machine, extra: str | None) -> Outcome:
    wanted = required(machine.requirements(), extra, numbers(machine.python[0]))
    if not wanted:
        return skipped("requirements are unknown: gpuwatch is not installed", f"pip install {DISTRIBUTION}")
    versions = [(name, machine.version_of(name), least) for name, least in wanted]
    missing = [name for name, version, _ in versions if version is None]
    old = [f"{name} {has} (needs {least})" for name, has, least in versions if has and numbers(has) < numbers(least)]
    if not missing and not old:
        return ok(", ".join(f"{name} {version}" for name, version, _ in versions))
    found = "; ".join(f"{what}: {', '.join(of)}" for what, of in (("missing", missing), ("too old", old)) if of)
    if extra is None:
        return problem(found, f"pip install --upgrade {DISTRIBUTION}")
    remedy = f"pip install --upgrade '{DISTRIBUTION}[{extra}]'   (needed on machines that run gpuwatch {extra})"
    return problem(found, remedy) if old else warning(found, remedy)


def is_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536


def is_flag(value: str) -> bool:
    return value.lower() in ("0", "1", "true", "false", "yes", "no")


_ACCEPTED: dict[str, tuple[Callable[[str], object], str]] = {
    "ENDPOINT": (lambda value: endpoint.checked(value, "it"), "ipc:///absolute/path.sock or tcp://ADDRESS:PORT"),
    "RUN JOB TAG NODE GRAFANA_PASSWORD TOKEN API_TOKEN AGENT_ADDRESS AUTO_SCRIPT AUTO_NOTES": (lambda value: True, ""),
    "QUIET DISABLE AUTO TRACE BREAKDOWN": (is_flag, "1 or 0"),
    "AUTO_PID": (str.isdigit, "a process id"),
    "LOG": (lambda value: value.lower() == "auto" or is_flag(value), "auto"),
    "HTTP ADDRESS": (is_address, "HOST:PORT"),
    "AGENT_SCHEME": (lambda value: value in ("http", "https"), "http or https"),
    "HISTORY CONFIG TOKEN_FILE API_TOKEN_FILE CLIENT_CERT OOM_SNAPSHOT": (
        lambda value: not Path(value).is_dir(),
        "a file, not a folder",
    ),
    "AGENT AGENT_URL PROMETHEUS PROMETHEUS_URL OTLP ALERTMANAGER_URL": (is_url, "http://HOST:PORT"),
    "RUN_DIR": (lambda value: value.startswith("/"), "an absolute path"),
    "GPU_HOUR": (parse_price, "a price and its currency, as in 4.2 EUR"),
    "AGENT_PORT PROMETHEUS_PORT ALERTMANAGER_PORT GRAFANA_PORT DASHBOARD_PORT": (
        lambda value: is_address(f"host:{value}"),
        "a port, 1 to 65535",
    ),
    "AGENT_MEMORY PROMETHEUS_MEMORY ALERTMANAGER_MEMORY GRAFANA_MEMORY DASHBOARD_MEMORY": (
        lambda value: re.fullmatch(r"\d+[bkmg]?", value.lower()),
        "a size, as in 512m",
    ),
}
"""By variables: what accepts a value (else it returns False or raises ConfigError), and what to give instead."""
KNOWN = {f"GPUWATCH_{name}": accepted for names, accepted in _ACCEPTED.items() for name in names.split()}
"""Every variable that some part of gpuwatch or its compose file reads."""


def environment(machine: Machine) -> Outcome:
    """GPUWATCH_* variables: names that no part of gpuwatch reads (typos are otherwise silent), and invalid values."""
    ours = {name: value.strip() for name, value in machine.environ.items() if name.startswith("GPUWATCH_")}
    bad, unknown = [], []
    if machine.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        unknown.append("TORCH_FR_BUFFER_SIZE=0: if a run hangs, the rank that the others wait for will not be named")
    for name, value in sorted(ours.items()):
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1, 0.8)
            unknown.append(f"nothing reads {name}" + (f" (did you mean {near[0]}?)" if near else ""))
        elif value:
            with contextlib.suppress(ConfigError):
                if KNOWN[name][0](value):
                    continue
            bad.append(f"{name}={value}: give {KNOWN[name][1]}")
    if bad or unknown:
        remedy = "correct it, or unset it; docs/guides/doctor.md lists those that are read"
        return (problem if bad else warning)("; ".join(bad + unknown), remedy)
    return ok(", ".join(sorted(ours)) if ours else "no GPUWATCH_* variable is set")
